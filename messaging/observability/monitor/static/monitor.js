"use strict";
// Texts of messages, topics and names become text nodes only: nothing in them is parsed as markup.

const POINTS = 120;
const SVG = "http://www.w3.org/2000/svg";
const histories = new Map(); // process -> report -> line -> values
const sections = new Map(); // process -> its element
let token = "";
let inspecting = null;

const $ = (id) => document.getElementById(id);

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

// --- numbers

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const exact = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

function number(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") return bytes(value);
  if (unit === "seconds") return duration(value);
  if (unit === "since") return new Date(value * 1000).toLocaleString();
  const text = Math.abs(value) >= 100 || Number.isInteger(value) ? whole.format(value) : exact.format(value);
  return unit ? `${text} ${unit}` : text;
}

function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${exact.format(value / size)} ${unit}`;
  return `${whole.format(value)} B`;
}

function duration(value) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (value >= 2 * size) return `${exact.format(value / size)} ${unit}`;
  return value >= 1 || value === 0 ? `${exact.format(value)} s` : `${exact.format(value * 1000)} ms`;
}

// --- a process

function showProcess(view) {
  remember(view);
  const reports = element("div", "reports", ...view.reports.map((report) => reportCard(view.key, report)));
  const title = element("h2", "", view.process || "this process", " ", element(
    "small", "", `${view.host}, pid ${view.pid}, up ${duration(view.uptime)}` +
    (view.omitted ? `, ${view.omitted} values left out` : "")));
  if (view.status === "silent") title.append(" ", element("span", "badge warn", `silent for ${duration(view.age)}`));
  const section = element("section", view.status === "silent" ? "process silent" : "process", title, reports);
  section.dataset.key = view.key;
  const before = sections.get(view.key);
  if (before) return update(before, section);
  $("processes").append(section);
  sections.set(view.key, section);
}

// Make `old` equal to `made`. Nodes stay, and with them what is selected in them and how far they are scrolled.
function update(old, made) {
  if (old.nodeName !== made.nodeName) return old.replaceWith(made);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  const kept = [...old.childNodes];
  const wanted = [...made.childNodes];
  wanted.forEach((child, index) => (index < kept.length ? update(kept[index], child) : old.append(child)));
  kept.slice(wanted.length).forEach((child) => child.remove());
}

function remember(view) {
  const kept = histories.get(view.key) || new Map();
  histories.set(view.key, kept);
  for (const report of view.reports) {
    const lines = kept.get(report.key) || new Map();
    kept.set(report.key, lines);
    for (const [line, value] of Object.entries(report.chart)) {
      const values = lines.get(line) || [];
      lines.set(line, values);
      values.push(value);
      if (values.length > POINTS) values.shift();
    }
  }
}

function reportCard(process, report) {
  const [state, level] = report.state;
  const isWide = report.tables.some((each) => each.columns.length > 10);
  const card = element("article", isWide ? "report wide" : "report", element("header", "",
    element("h3", "", report.name), element("span", "kind", report.kind.replaceAll("_", " ")),
    element("span", `badge ${["good", "warn", "bad", "idle"].includes(level) ? level : "idle"}`, state)));
  if (report.error) card.append(element("p", "", report.error));
  if (report.problems.length)
    card.append(element("ul", "problems", ...report.problems.map((problem) => element("li", "", problem))));
  if (report.tiles.length)
    card.append(element("div", "tiles", ...report.tiles.map(([label, value, unit]) =>
      element("div", "", element("b", "", number(value, unit)), element("span", "", label)))));
  const lines = (histories.get(process) || new Map()).get(report.key) || new Map();
  const names = Object.keys(report.chart);
  if (names.length) card.append(element("div", "charts", ...names.map((line) => chart(line, lines.get(line) || []))));
  if (report.facts.length)
    card.append(element("dl", "", ...report.facts.flatMap(([label, text]) =>
      [element("dt", "", label), element("dd", "", text)])));
  for (const each of report.tables) card.append(table(each));
  return card;
}

function chart(name, values) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(1e-9, ...known);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${POINTS} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", name);
  const line = document.createElementNS(SVG, "polyline");
  const first = POINTS - values.length;
  line.setAttribute("points", values.flatMap((value, index) =>
    value === null ? [] : [`${first + index},${(38 - (36 * value) / most).toFixed(1)}`]).join(" "));
  svg.append(line);
  const last = known.length ? number(known[known.length - 1]) : "–";
  return element("figure", "", svg, element("figcaption", "", `${name}: ${last}, at most ${number(known.length ? most : null)}`));
}

function table({ title, columns, rows }) {
  return element("table", "", element("caption", "", title),
    element("thead", "", element("tr", "", ...columns.map((column) => element("th", "", column)))),
    element("tbody", "", ...rows.map((row) => element("tr", "", ...row.map(cell)))));
}

function cell(value) {
  if (Array.isArray(value)) {
    const [amount, rate, unit] = value;
    const text = number(amount, unit) + (rate === null || rate === undefined ? "" : ` (${number(rate)}/s)`);
    return element("td", "number", text);
  }
  if (typeof value === "number") return element("td", "number", number(value));
  if (typeof value === "boolean") return element("td", "", value ? "yes" : "no");
  return element("td", "", value === null ? "–" : value);
}

// --- server-sent events over fetch: the token is sent in a header

async function* events(path, options) {
  const answer = await fetch(path, { ...options, headers: authorized(options && options.headers), cache: "no-store" });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(await problem(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const found = parsed(text.slice(0, end));
      text = text.slice(end + 2);
      if (found) yield found;
    }
  }
}

class Unauthorized extends Error {}

function authorized(headers) {
  return token ? { ...headers, authorization: `Bearer ${token}` } : { ...headers };
}

async function problem(answer) {
  try {
    return (await answer.json()).problem;
  } catch {
    return `the monitor answered ${answer.status}`;
  }
}

function parsed(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? { name, data: JSON.parse(data) } : null;
}

// --- following

function connection(text, level) {
  $("connection").textContent = text;
  $("connection").className = `badge ${level}`;
}

async function follow() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 10000)) {
    try {
      for await (const { name, data } of events("/api/events")) {
        $("login").hidden = true;
        if (name === "histories") start(data);
        else if (name === "process") showProcess(data);
        else if (name === "gone") gone(data.key);
        else if (name === "counts") counts(data);
        connection("live", "good");
        pause = 500;
      }
      connection("disconnected", "bad");
    } catch (error) {
      if (error instanceof Unauthorized) return login();
      connection(error.message || "disconnected", "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function start(found) {
  histories.clear();
  for (const section of sections.values()) section.remove();
  sections.clear();
  for (const [process, reports] of Object.entries(found))
    histories.set(process, new Map(Object.entries(reports).map(([report, lines]) =>
      // the newest value comes again with the view of the process
      [report, new Map(Object.entries(lines).map(([line, values]) => [line, values.slice(0, -1)]))])));
}

function gone(key) {
  const section = sections.get(key);
  if (section) section.remove();
  sections.delete(key);
  histories.delete(key);
}

function counts(data) {
  const texts = [data.viewers === 1 ? "1 viewer" : `${data.viewers} viewers`];
  if (data.invalid) texts.push(`${data.invalid} messages were no snapshots`);
  if (data.crowded_out) texts.push(`${data.crowded_out} snapshots of further processes`);
  if (data.failure) texts.push(data.failure);
  $("counts").textContent = texts.join("; ");
  instances(data.instances);
}

// the instances that the inspector can use
function instances(names) {
  const select = $("instance");
  const shown = [...select.options].map((option) => option.value);
  if (shown.length === names.length && shown.every((name, index) => name === names[index])) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => {
    const option = element("option", "", name);
    option.value = name;
    return option;
  }));
  if (names.includes(chosen)) select.value = chosen;
}

function login() {
  connection("a token is needed", "warn");
  $("login-problem").textContent = token ? "This is not the token." : "";
  $("login").hidden = false;
  $("token").focus();
}

$("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  follow();
});

// --- the inspector

$("inspect").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  if (inspecting) inspecting.abort();
  else look();
});

async function look() {
  const controller = (inspecting = new AbortController());
  $("look").textContent = "Stop";
  $("messages").replaceChildren();
  $("inspect-state").textContent = "waiting for messages";
  const most = Number($("count").value);
  const body = JSON.stringify({
    instance: $("instance").value, channel: $("channel").value, count: most, seconds: Number($("seconds").value),
  });
  try {
    for await (const { name, data } of events("/api/inspect", { method: "POST", body, signal: controller.signal })) {
      if (name !== "messages") {
        $("inspect-state").textContent = data.text;
        continue;
      }
      $("inspect-state").textContent = `${whole.format(data.total)} messages arrived`;
      for (const message of data.messages) $("messages").prepend(shownMessage(message));
      while ($("messages").childElementCount > most) $("messages").lastElementChild.remove();
    }
  } catch (error) {
    $("inspect-state").textContent = error.name === "AbortError" ? "stopped" : error.message || "a token is needed";
  }
  inspecting = null;
  $("look").textContent = "Look";
}

function shownMessage(message) {
  const headers = Object.entries(message.headers).map(([name, value]) =>
    [element("dt", "", name), element("dd", "", typeof value === "string" ? value : JSON.stringify(value))]);
  return element("li", "",
    element("b", "", message.channel), " ",
    element("small", "", `${new Date(message.time * 1000).toLocaleTimeString()}, ${bytes(message.size)}, ${message.form}`),
    element("dl", "", ...headers.flat()),
    element("pre", "", message.payload + (message.cut ? " …" : "")));
}

follow();
