"""The page of the monitor in a real browser: Chromium, through Playwright. Skipped where there is none."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
from messaging.observability.monitor import SnapshotPublisher
from messaging.observability.monitor.server import Monitor
from messaging.services import ServiceRegistry
from messaging.services.reporting import PartReporter, register_reporter
from messaging.testing.waiting import PATIENCE, Recorder

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script><b id="injected">x</b>'
TOKEN = "0123456789abcdef-token"


class Plant:
    """An instance that publishes the same message again and again, on a thread: Playwright's runs an event loop."""

    def __init__(self, url: str, services: ServiceRegistry, channel: str, payload: bytes, **options: Any) -> None:
        self._stop = threading.Event()
        self._ready: Recorder[object] = Recorder()
        self._thread = threading.Thread(target=self._run, args=(url, services, channel, payload, options))

    def _run(self, url: str, services: ServiceRegistry, channel: str, payload: bytes, options: dict[str, Any]) -> None:
        with messaging.connect(url, services=services, name="plant") as m:
            m.on("a/+", lambda _: None)
            self._ready.append(m)
            while not self._stop.wait(0.01):
                m.publish(channel, payload, **options)

    def __enter__(self) -> Plant:
        self._thread.start()
        self._ready.wait_for(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(15_000)
    yield found
    context.close()


def test_live_rates_appear_on_the_page(page: Any) -> None:
    services = ServiceRegistry()
    with Plant("memory://browsed", services, "a/1", b"x"), Monitor(services=services, port=0, interval=0.2) as monitor:
        page.goto(monitor.url)
        page.get_by_text("live", exact=True).wait_for()
        card = page.locator("article", has=page.get_by_role("heading", name="plant"))
        card.wait_for()
        card.locator("figcaption").filter(has_text=re.compile(r"in /s: [1-9]")).first.wait_for()
        card.locator('polyline[points*=" "]').first.wait_for(state="attached")  # a line of several values


def test_markup_in_names_topics_and_payloads_is_inert(page: Any) -> None:
    services = ServiceRegistry()
    register_reporter(services, PartReporter("odd", MARKUP, lambda: {"text": MARKUP}, lambda: [MARKUP]))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    channel = "in/" + MARKUP.replace("/", "|").replace("#", "").replace("+", "")
    with (
        Plant("memory://injected", services, channel, MARKUP.encode(), headers={"h": MARKUP}),
        Monitor(services=services, port=0, interval=0.2) as monitor,
    ):
        page.goto(monitor.url)
        page.get_by_role("heading", name=MARKUP).wait_for()
        inspect(page, "in/#")
        found = page.locator("#messages li").first
        assert MARKUP in found.locator("pre").inner_text()
        assert MARKUP.replace("/", "|") in found.locator("b").inner_text()
        assert page.title() == "Messaging monitor"
        assert page.locator("#injected").count() == 0
        assert page.locator("main script, main img, #messages script, #messages img").count() == 0
        assert errors == []


def inspect(page: Any, channel: str) -> None:
    """Look at a channel until a message is shown."""
    page.locator("#instance option", has_text="plant").wait_for(state="attached")
    page.locator("#channel").fill(channel)
    page.locator("#look").click()
    page.locator("#messages li").first.wait_for()


def test_a_token_opens_the_page(page: Any) -> None:
    services = ServiceRegistry()
    with (
        Plant("memory://guarded", services, "a/1", b"x"),
        Monitor(services=services, port=0, interval=0.2, token=TOKEN) as monitor,
    ):
        page.goto(monitor.url)
        page.get_by_text("a token is needed").wait_for()
        assert page.get_by_role("heading", name="plant").count() == 0
        page.locator("#token").fill("wrong-wrong-wrong-wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_text("This is not the token.").wait_for()
        page.locator("#token").fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("heading", name="plant").wait_for()
        assert TOKEN not in page.url


def test_the_inspector_hides_secrets(page: Any) -> None:
    services = ServiceRegistry()
    with (
        Plant("memory://hidden", services, "in/x", b'{"password": "hunter2", "celsius": 21}'),
        Monitor(services=services, port=0, interval=0.2) as monitor,
    ):
        page.goto(monitor.url)
        inspect(page, "in/#")
        assert "celsius" in page.locator("#messages li").first.inner_text()
        assert "hunter2" not in page.content()
        assert "***" in page.locator("#messages li").first.inner_text()


def test_the_page_asks_for_nothing_that_it_does_not_need(page: Any) -> None:
    services = ServiceRegistry()
    messages: list[str] = []
    urls: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("request", lambda request: urls.append(request.url))
    with Plant("memory://needed", services, "a/1", b"x"), Monitor(services=services, port=0, interval=0.2) as monitor:
        page.goto(monitor.url)
        page.get_by_role("heading", name="plant").wait_for()
        assert not page.locator("#login").is_visible(), "no token is needed"
        assert messages == [], "nothing violates the content security policy"
        assert all(url.startswith(monitor.url) for url in urls)


def test_what_is_selected_stays_while_numbers_change(page: Any) -> None:
    services = ServiceRegistry()
    with Plant("memory://selected", services, "a/1", b"x"), Monitor(services=services, port=0, interval=0.1) as monitor:
        page.goto(monitor.url)
        heading = page.get_by_role("heading", name="plant")
        heading.wait_for()
        heading.evaluate("node => { getSelection().selectAllChildren(node); node.marked = true; }")
        caption = page.locator("figcaption").first
        before = caption.inner_text()
        page.wait_for_function("before => document.querySelector('figcaption').textContent !== before", arg=before)
        assert page.evaluate("getSelection().toString()") == "plant"
        assert heading.evaluate("node => node.marked")


def test_a_process_appears_while_it_publishes(page: Any) -> None:
    services, watched = ServiceRegistry(), ServiceRegistry()
    stop = threading.Event()

    def publish() -> None:
        with (
            messaging.connect("memory://processes", services=watched, name="plant") as m,
            SnapshotPublisher(m, interval=0.2, process="press-1"),
        ):
            stop.wait(PATIENCE)

    def serve() -> None:
        with (
            messaging.connect("memory://processes", services=services) as m,
            Monitor(m, port=0, interval=0.2) as monitor,
        ):
            urls.append(monitor.url)
            done.wait(PATIENCE)

    urls: Recorder[str] = Recorder()
    done = threading.Event()
    threads = [threading.Thread(target=each) for each in (serve, publish)]
    for each in threads:
        each.start()
    try:
        page.goto(urls.wait_for(1)[0])
        process = page.get_by_role("heading", name="press-1")
        process.wait_for()
        page.get_by_role("heading", name="plant").wait_for()
        stop.set()
        process.wait_for(state="detached")
        page.get_by_text("live", exact=True).wait_for()
        done.set()
        page.get_by_text("live", exact=True).wait_for(state="detached")
    finally:
        stop.set()
        done.set()
        for each in threads:
            each.join(PATIENCE)
