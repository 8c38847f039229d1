"""``messaging events``: following, publishing and looking up the events of a network, and reading past ones."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import messaging
from messaging import Messaging
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.distributedeventing import DistributedEventAdmin, EventNetwork
from messaging.journal import Journal
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from messaging.typedevent import TypedEventBus
from tests.cli.conftest import Run, refused
from tests.cli.program import Program, ready

FAST = ("--heartbeat", "0.3")


Here = tuple[str, Messaging]


@pytest.fixture
def here() -> Iterator[Here]:
    """A broker in this process: its URL, and an instance."""
    url = f"memory://events-{uuid4().hex[:8]}"
    with messaging.connect(url) as m:
        yield url, m


@contextmanager
def admin_at(m: Messaging, name: str = "billing", **settings: Any) -> Iterator[DistributedEventAdmin]:
    with DistributedEventAdmin(ServiceRegistry(), m, name=name, network=EventNetwork(**settings)) as admin:
        admin.ready.result(PATIENCE)
        yield admin


@contextmanager
def meanwhile(admin: DistributedEventAdmin, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` once another member wants events."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            eventually(lambda: any(each.interests for each in admin.members()))
            act()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert errors == []


def watched(run: Run, url: str, *arguments: str) -> list[str]:
    code, out, err = run("events", "watch", url, *arguments, *FAST)
    assert code == 0, err
    assert "watching" in err
    return out.splitlines()


# --- watch


def test_watch_writes_topic_sender_and_data(run: Run, here: Here) -> None:
    url, m = here
    with admin_at(m) as admin:

        def act() -> None:
            admin.publish_event("other", 1)
            admin.publish_event("orders/placed", {"id": 7, "text": "é\x9b"}, correlation_id="c1")

        with meanwhile(admin, act):
            (line,) = watched(run, url, "orders/**", "--count", "1")
        time, topic, sender, data = line.split("  ", 3)
        assert time.endswith("+00:00")
        assert (topic, sender, data) == ("orders/placed", "billing", '{"id":7,"text":"é\\x9b"}')


def test_watch_writes_json_payloads_and_formats(run: Run, here: Here) -> None:
    url, m = here
    with admin_at(m) as admin:
        node = admin.node
        assert node is not None

        def act() -> None:
            admin.publish_event("a/b", {"set": {1}}, correlation_id="c1")

        with meanwhile(admin, act):
            (line,) = watched(run, url, "a/*", "-C", "1", "--json")
        found = json.loads(line)
        assert (found["topic"], found["kind"], found["correlation_id"]) == ("a/b", "data", "c1")
        assert (found["sender"], found["sender_name"], found["data"]) == (
            node.member,
            "billing",
            {"set": {"$set": [1]}},
        )
        with meanwhile(admin, act):
            assert watched(run, url, "-C", "1", "-F", "payload") == ['{"set":{"$set":[1]}}']
        with meanwhile(admin, act):
            assert watched(run, url, "-C", "1", "-F", "%t=%p %D") == ['a/b={"set":{"$set":[1]}} c1']


def test_watch_shows_the_ends_of_sessions_only_when_asked(run: Run, here: Here) -> None:
    url, m = here
    with admin_at(m) as admin:

        def act() -> None:
            with admin.create_session("a") as closed:
                closed.publish_event(1)
            failing: Any = admin.create_session("b")
            failing.publish_event(2)
            failing.error(ValueError("boom"))
            admin.publish_event("c", 3)

        with meanwhile(admin, act):
            lines = watched(run, url, "--type", "all", "-C", "5")
        assert [line.split("  ")[1] for line in lines] == ["a", "a", "b", "b", "c"]
        assert lines[1].endswith(" closed]")
        assert lines[3].endswith(" failed: ValueError: boom]")
        with meanwhile(admin, act):
            assert [line.split("  ")[3] for line in watched(run, url, "-C", "3")] == ["1", "2", "3"]


def test_a_member_that_crashes_ends_its_sessions(url: str, topic: str, m: Messaging) -> None:
    prefix = topic.replace("/", "-")
    with ready("watching", "events", "watch", url, "--type", "all", "--prefix", prefix, *FAST, "--json") as program:
        member, session = str(uuid4()), "s1"
        announcement = {"announcement": 1, "kind": "update", "member": member, "name": "gone", "heartbeat": 0.2}
        m.publish(f"{prefix}-members/all", json.dumps(announcement).encode(), qos=1).result(PATIENCE)
        event = encode(WireEvent("a", 1, sender=member, sequence=1, session=session))
        m.publish(f"{prefix}/a", event, qos=1).result(PATIENCE)
        assert json.loads(program.out.until(lambda _: True))["sender_name"] == "gone"
        end = json.loads(program.out.until(lambda line: b'"error"' in line))
        assert (end["topic"], end["session"], end["error"]["type"]) == ("a", session, "EventSessionLostError")


def test_a_session_that_the_broker_kept_longer_than_its_sender_lived_ends(url: str, topic: str, m: Messaging) -> None:
    prefix = topic.replace("/", "-")
    with ready("watching", "events", "watch", url, "--type", "all", "--prefix", prefix, *FAST, "--json") as program:
        event = encode(WireEvent("a", 1, sender=str(uuid4()), sequence=1, session="s1"))
        m.publish(f"{prefix}/a", event, qos=1).result(PATIENCE)
        end = json.loads(program.out.until(lambda line: b'"error"' in line))
        assert (end["topic"], end["session"], end["error"]["type"]) == ("a", "s1", "EventSessionLostError")


def test_watch_understands_the_events_of_typed_buses(run: Run, here: Here) -> None:
    url, m = here
    with TypedEventBus(ServiceRegistry(), name="shop") as bus, bus.connect(m, "*") as connection:
        connection.ready.result(PATIENCE)

        def act() -> None:
            eventually(lambda: any(each.interests for each in connection.get_dto().node.members))
            bus.deliver_untyped("a-b/c_d", {"n": 1})

        thread = threading.Thread(target=act)
        thread.start()
        (line,) = watched(run, url, "a-b/+", "--grammar", "typed", "-C", "1")
        thread.join(PATIENCE)
        assert line.split("  ")[1:] == ["a-b/c_d", "shop", '{"n":1}']


def test_watch_ends_with_3_without_enough_events(run: Run, here: Here) -> None:
    code, out, err = run("events", "watch", here[0], "-C", "2", "-W", "0.1", *FAST)
    assert (code, out) == (3, "")
    assert "timeout: 0 of 2 events within 0.1 s" in err
    assert run("events", "watch", here[0], "-W", "0.1", *FAST)[:2] == (0, "")


def test_the_broker_may_come_from_the_environment(run: Run, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGING_URL", here[0])
    with admin_at(here[1]) as admin:
        got: Recorder[Any] = Recorder()
        admin.on("a", handler=lambda event: got.append(event.value))
        assert run("events", "publish", "a", "text")[0] == 0
        assert got.wait_for(1) == ["text"]
        with meanwhile(admin, lambda: admin.publish_event("b", 2)):
            code, out, _ = run("events", "watch", "b", "-C", "1", "-F", "payload", *FAST)
        assert (code, out) == (0, "2\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_watch_leaves_the_network(url: str, topic: str, number: signal.Signals) -> None:
    prefix = topic.replace("/", "-")
    with messaging.connect(url) as m, admin_at(m, prefix=prefix) as admin:
        with ready("watching", "events", "watch", url, "--prefix", prefix) as program:
            eventually(lambda: len(admin.members()) == 1)
            program.signal(number)
            assert program.ended() == 130
        eventually(lambda: not admin.members())  # at once: a lost one would be known for seconds


def test_a_watch_without_a_reader_ends(url: str, topic: str) -> None:
    with Program("events", "watch", url, "--prefix", topic.replace("/", "-")) as program:
        program.says("watching")
        assert program.process.stdout is not None
        program.process.stdout.close()
        assert program.ended() == 0


# --- publish


@table(
    "arguments, data",
    [
        (('{"id": 7}',), {"id": 7}),
        (("7",), 7),
        (("hello there",), "hello there"),
        (("7", "--text"), "7"),
        (('{"$set": [1]}',), {1}),
        (("--file", "FILE"), [1, 2]),
    ],
)
def test_publish_sends_json_or_text(
    run: Run, here: Here, tmp_path: Path, arguments: tuple[str, ...], data: Any
) -> None:
    url, m = here
    file = tmp_path / "data.json"
    file.write_text("[1, 2]\n")
    with admin_at(m) as admin:
        got: Recorder[Any] = Recorder()
        admin.on("a/*", handler=lambda event: got.append(event.value), is_whole=True)
        given = [each.replace("FILE", str(file)) for each in arguments]
        code, out, err = run("events", "publish", url, "a/b", *given, "--correlation-id", "c", "--reply-to", ".r")
        assert (code, out, err) == (0, "", "")
        (event,) = got.wait_for(1)
        assert (event.topic, event.data, event.correlation_id, event.reply_to) == ("a/b", data, "c", ".r")


def test_publish_reaches_programs_that_announce_nothing(url: str, topic: str, m: Messaging) -> None:
    prefix = topic.replace("/", "-")
    with m.subscribe(f"{prefix}/#", qos=1) as stream:
        with Program("events", "publish", url, "a/b", "-", "--prefix", prefix, "-q", "at_least_once") as program:
            program.send(b'{"n": 1}')
            program.end_input()
            assert program.ended() == 0
        found = json.loads(stream.receive(PATIENCE).payload)
        assert (found["topic"], found["data"]) == ("a/b", {"n": 1})


def test_publish_names_the_members_that_were_notified(run: Run, here: Here) -> None:
    url, m = here
    with admin_at(m) as admin:
        got: Recorder[Any] = Recorder()
        admin.on("a", handler=lambda event: got.append(event.value))
        code, _, err = run("events", "publish", url, "a", "1", "--notify", *FAST)
        assert (code, got) == (0, [1])
        assert err.startswith("messaging: notified 1 member: billing (")
        code, _, err = run("events", "publish", url, "b", "1", "--notify", *FAST)
        assert (code, err) == (0, "messaging: warning: notified no member: no consumer of 'b' is known\n")


def test_publish_names_the_members_that_were_not_notified(run: Run, here: Here) -> None:
    url, m = here
    free = threading.Event()
    with admin_at(m) as admin:
        admin.on("a", handler=lambda _: free.wait(PATIENCE))
        try:
            text = refused(run, "events", "publish", url, "a", "1", "--notify", "-W", "1", *FAST, code=3)
        finally:
            free.set()
        assert text.startswith("notified 0 of 1 members within 1 s; missing: billing (")


# --- topics and members


def test_topics_and_members_are_listed(run: Run, here: Here) -> None:
    url, m = here
    with messaging.connect(url) as other, admin_at(m) as billing, admin_at(other, "audit") as audit:
        billing.publish_event("orders/placed", 1)
        audit.on("orders/**", handler=lambda _: None)
        billing.announced().result(PATIENCE)
        audit.announced().result(PATIENCE)
        code, out, err = run("events", "topics", url, "--json", *FAST)
        assert (code, err) == (0, "")
        assert json.loads(out) == [
            {"topic": "orders/**", "publishers": [], "consumers": ["audit"]},
            {"topic": "orders/placed", "publishers": ["billing"], "consumers": []},
        ]
        lines = [line.split() for line in run("events", "topics", url, *FAST)[1].splitlines()]
        assert lines == [
            ["topic", "publishers", "consumers"], ["orders/**", "-", "audit"], ["orders/placed", "billing", "-"]
        ]  # fmt: skip
        members = json.loads(run("events", "members", url, "--json", *FAST)[1])
        assert [(each["name"], each["state"]) for each in members] == [("audit", "live"), ("billing", "live")]
        assert (members[0]["interests"], members[1]["offers"]) == (["orders/**"], ["orders/placed"])
        assert "EXACTLY_ONCE" in members[0]["qos"]
        assert "orders/**" in run("events", "members", url, *FAST)[1]


def test_an_empty_network_lists_nothing(run: Run, here: Here) -> None:
    for command in ("topics", "members"):
        assert run("events", command, here[0], *FAST) == (0, "", "")
        assert run("events", command, here[0], "--json", *FAST) == (0, "[]\n", "")


def test_changes_of_members_are_written(own: Mosquitto) -> None:
    watching = ("events", "members", own.url, "--watch", "--json", *FAST)
    with messaging.connect(own.url) as m, admin_at(m), Program(*watching) as program:

        def until_change(name: str, change: str) -> dict[str, Any]:
            return json.loads(
                program.out.until(lambda line: (json.loads(line)["name"], json.loads(line)["change"]) == (name, change))
            )

        until_change("billing", "there")
        with messaging.connect(own.url) as other, admin_at(other, "audit") as audit:
            until_change("audit", "joined")
            audit.on("a", handler=lambda _: None)
            assert until_change("audit", "changed")["interests"] == ["a"]
        until_change("audit", "left")
        program.signal(signal.SIGINT)
        assert program.ended() == 130


@pytest.mark.parametrize("broker", ["mosquitto", "rabbitmq"])
def test_an_event_crosses_a_broker(run: Run, broker: str, request: pytest.FixtureRequest, topic: str) -> None:
    url = request.getfixturevalue(broker).url
    prefix = topic.replace("/", "-")
    with ready(
        "watching", "events", "watch", url, "orders/*", "--prefix", prefix, "-C", "1", "-F", "payload"
    ) as program:
        code, _, err = run("events", "publish", url, "orders/placed", '{"id": 7}', "--prefix", prefix, "--notify")
        assert (code, err.partition(":")[2].split(":")[0]) == (0, " notified 1 member")
        assert program.out.until(lambda _: True) == b'{"id":7}\n'
        assert program.ended() == 0


# --- history


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A journal with events as a durable history of a typed event bus has them, and a record that is none."""
    path = str(tmp_path / "history")
    with Journal.open(path) as journal:
        for number, topic in enumerate(("orders/placed", "orders/paid", "weather"), 11):
            event = WireEvent(topic, {"n": number}, time=number * 1_000_000)
            journal.append(topic, encode(event), message_id=str(number), timestamp=number)
        journal.append("orders/placed", b"\xff", message_id="14", timestamp=14)
        journal.append("events/a", encode(WireEvent("a", {"n": 15}, sequence=15)), timestamp=15)
    return path


def test_history_writes_past_events(run: Run, stored: str) -> None:
    code, out, err = run("events", "history", stored)
    assert code == 0
    assert out.splitlines() == [
        '11  1970-01-01T00:00:11.000+00:00  orders/placed  {"n":11}',
        '12  1970-01-01T00:00:12.000+00:00  orders/paid  {"n":12}',
        '13  1970-01-01T00:00:13.000+00:00  weather  {"n":13}',
        '15  1970-01-01T00:00:15.000+00:00  a  {"n":15}',
    ]
    assert "the record at offset 3 is no event: skipped" in err


@table(
    "arguments, numbers",
    [
        (("orders/*",), [11, 12]),
        (("orders/+", "weather"), [11, 12, 13]),
        (("--since", "13"), [13, 15]),
        (("--since", "1970-01-01T00:00:12Z"), [12, 13, 15]),
        (("--limit", "2"), [11, 12]),
        (("orders/**", "--grammar", "distributed"), [11, 12]),
    ],
)
def test_history_selects(run: Run, stored: str, arguments: tuple[str, ...], numbers: list[int]) -> None:
    code, out, _ = run("events", "history", stored, *arguments, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [each["sequence"] for each in found] == [each["data"]["n"] for each in found] == numbers


def test_history_follows(tmp_path: Path) -> None:
    path = str(tmp_path / "history")
    with Journal.open(path) as journal, Program("events", "history", path, "-f", "-F", "payload") as program:
        for number in (1, 2):
            journal.append("a", encode(WireEvent("a", number)), message_id=str(number))
            assert program.out.until(lambda _: True) == b"%d\n" % number
        program.signal(signal.SIGINT)
        assert program.ended() == 130


# --- wrong command lines

WATCH = ("events", "watch", "memory://usage")
PUBLISH = ("events", "publish", "memory://usage")


@table(
    "arguments, expected",
    [
        (("events",), "Missing command"),
        (("event",), "did you mean 'events'?"),
        (("events", "wach"), "Did you mean 'watch'?"),
        (("events", "watch"), "no broker URL"),
        (("events", "watch", "localhost"), "has no '://'"),
        ((*WATCH, "--url", "memory://other"), "two broker URLs"),
        ((*WATCH, "a/#"), "not a topic filter"),
        ((*WATCH, "a/+"), "not a topic filter"),
        ((*WATCH, "a/**", "--grammar", "typed"), "not a topic filter"),
        ((*WATCH, "--grammar", "type"), "--grammar"),
        ((*WATCH, "--heartbeat", "0"), "heartbeat must be seconds"),
        ((*WATCH, "--prefix", "a/#"), "wildcards are for subscriptions only"),
        ((*WATCH, "--prefix", "a-members"), "such channels are reserved"),
        ((*WATCH, "--type", "none"), "--type"),
        ((*WATCH, "--timeout", "0"), "--timeout must be"),
        ((*WATCH, "--count", "0"), "--count"),
        ((*WATCH, "--json", "-F", "text"), "give one of them"),
        ((*WATCH, "-F", "jsno"), "did you mean 'json'?"),
        ((*WATCH, "-F", "%q"), "events have no %q"),
        ((*WATCH, "-F", "%w"), "unknown sequence"),
        (PUBLISH, "no topic"),
        ((*PUBLISH, "a"), "exactly one of PAYLOAD"),
        ((*PUBLISH, "a", "1", "-f", "x"), "exactly one of PAYLOAD"),
        ((*PUBLISH, "a", "-f", "/no/such/file"), "cannot read '/no/such/file'"),
        ((*PUBLISH, "a/*", "1"), "not a topic"),
        ((*PUBLISH, "a", '{"x"'), "begins like JSON and is malformed"),
        ((*PUBLISH, "a", '{"$date": "x"}'), "'$date' must have"),
        ((*PUBLISH, "a", "null"), "the payload is null"),
        ((*PUBLISH, "a", "\udcff"), "not UTF-8"),
        ((*PUBLISH, "a", "1", "--grammar", "typed"), "are JSON objects"),
        ((*PUBLISH, "a", "1", "--reply-to", "b/*"), "not a topic"),
        ((*PUBLISH, "a", "1", "-q", "EXACTLY_ONC"), "did you mean 'EXACTLY_ONCE'?"),
        ((*PUBLISH, "a", "1", "-q", "PERSISTENT"), "does not support 'PERSISTENT'"),
        ((*PUBLISH, "a", "1", "-q", "IN_ORDER", "-q", "OUT_OF_ORDER"), "exclude each other"),
        ((*PUBLISH, "a", "1", "--timeout", "3"), "--timeout goes with --notify"),
        ((*PUBLISH, "a", "1", "--notify", "--timeout", "nan"), "--timeout must be"),
        (("events", "publish", "a", "b", "c", "--url", "memory://usage"), "one argument more"),
        (("events", "topics", "memory://usage", "extra"), "extra"),
        (("events", "history", "memory://usage"), "no broker URL"),
        (("events", "history", "/nonesuch", "a/b/#"), "not a topic filter"),
        (("events", "history", "/nonesuch", "--since", "soon"), "--since must be"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_why(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, *arguments)


def test_a_folder_without_a_history_is_a_failure(run: Run, tmp_path: Path) -> None:
    assert "there is no journal" in refused(run, "events", "history", str(tmp_path), code=1)


def test_secrets_are_not_shown(run: Run) -> None:
    for command in (("watch",), ("publish", "a", "1"), ("topics",), ("members",)):
        code, out, err = run("events", *command, "--url", "mqtt://joe:hunter2@127.0.0.1:1", "--debug")
        assert code == 1
        assert "hunter2" not in out + err
