"""``messaging mailbox``: running a mailbox, registering, listing, draining, cancelling."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import messaging
from messaging import Messaging
from messaging.remoteevent import EventGenerator, EventMailbox, EventServer, MailboxServer, RemoteEvent
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run, refused
from tests.cli.program import Program, ready


@pytest.fixture
def mailbox(m: Messaging, topic: str, tmp_path: Path) -> Iterator[EventMailbox]:
    """A mailbox of this process, at the channel ``topic``."""
    with EventMailbox(tmp_path / "mailbox", messaging=m) as made, MailboxServer(m, topic, made) as server:
        server.ready.result(PATIENCE)
        yield made


def store(mailbox: EventMailbox, name: str, first: int, last: int) -> None:
    listener = mailbox.registration(name).listener
    given = [RemoteEvent("boiler", "hot", number, None) for number in range(first, last + 1)]
    assert listener.deliver(given).result(PATIENCE) == [None] * len(given)


def numbers(out: str) -> list[int]:
    return [json.loads(line)["sequence"] for line in out.splitlines()]


def registered(run: Run, url: str, topic: str, *arguments: str) -> str:
    code, out, err = run("mailbox", "register", url, topic, *arguments)
    assert (code, err) == (0, "")
    return out.strip()


# --- running


def test_sigterm_ends_a_mailbox_in_good_order_with_0(url: str, topic: str, tmp_path: Path) -> None:
    with ready(f"mailbox {topic}", "mailbox", "run", url, topic, str(tmp_path / "box")) as program:
        program.signal(signal.SIGTERM)
        assert program.ended() == 0


def test_a_mailbox_ends_when_interrupted_and_goes_on_after_a_restart(
    run: Run, url: str, topic: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "folder")
    with ready("0 registrations in", "mailbox", "run", url, topic, folder, "--max-bytes", "100000") as program:
        name = registered(run, url, topic, "--full", "drop_oldest", "--max-events", "5", "--duration", "604800")
        code, out, _ = run("mailbox", "list", url, topic)
        assert (code, name in out, "6 d 23 h" in out) == (0, True, True)
        program.signal(signal.SIGINT)
        assert program.ended() == 130
    with ready("1 registrations in", "mailbox", "run", url, topic, folder):
        code, out, _ = run("mailbox", "list", url, topic, "--json")
        assert [each["id"] for each in json.loads(out)] == [name]


def test_a_channel_has_one_mailbox(run: Run, url: str, topic: str, mailbox: EventMailbox, tmp_path: Path) -> None:
    mailbox.register(50.0)
    folder = tmp_path / "other"
    error = refused(run, "mailbox", "run", url, topic, str(folder), code=1)
    assert error == (f"another mailbox answers at '{topic}', with 1 registrations: stop it, or choose another channel")
    assert not folder.exists()


def test_a_folder_has_one_mailbox(run: Run, url: str, topic: str, mailbox: EventMailbox, tmp_path: Path) -> None:
    assert len(mailbox) == 0
    error = refused(run, "mailbox", "run", url, f"{topic}/other", str(tmp_path / "mailbox"), code=1)
    assert "another mailbox uses the folder" in error


@table(
    "channel, path, options, text",
    [
        ("a/#", "PATH", [], "a/#"),
        ("", "PATH", [], "channel"),
        ("a", "", [], "PATH"),
        ("a", "PATH", ["--max-duration", "0"], "--max-duration"),
        ("a", "PATH", ["--max-duration", "nan"], "--max-duration"),
    ],
)
def test_a_command_line_that_is_wrong_leaves_nothing_behind(
    run: Run, url: str, tmp_path: Path, channel: str, path: str, options: list[str], text: str
) -> None:
    folder = tmp_path / "folder"
    error = refused(run, "mailbox", "run", url, channel, path and str(folder), *options)
    assert text in error
    assert not folder.exists()


# --- without a mailbox


@table("command", [["register"], ["list"], ["drain", "ID"], ["cancel", "ID"]])
def test_a_command_says_that_no_mailbox_answers(
    run: Run, url: str, topic: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messaging.cli.mailbox._ANSWER", 0.2)
    name, *rest = command
    error = refused(run, "mailbox", name, url, topic, *rest, code=1)
    assert error == f"no mailbox answers at '{topic}'; is `messaging mailbox run` running?"


def test_another_object_is_no_mailbox(run: Run, url: str, topic: str, m: Messaging, tmp_path: Path) -> None:
    with EventGenerator("boiler", events=["hot"]) as boiler, EventServer(m, topic, boiler) as server:
        server.ready.result(PATIENCE)
        assert "is no mailbox" in refused(run, "mailbox", "list", url, topic)
        assert "is no mailbox" in refused(run, "mailbox", "run", url, topic, str(tmp_path / "folder"))


@table("duration", ["0", "-1", "-5", "nan"])
def test_an_error_names_the_option(run: Run, url: str, topic: str, duration: str) -> None:
    error = refused(run, "mailbox", "register", url, topic, "--duration", duration)
    assert error.startswith("--duration must be a number of seconds above 0")


# --- draining


def test_drain_writes_the_events_and_removes_them(run: Run, url: str, topic: str, mailbox: EventMailbox) -> None:
    name = registered(run, url, topic)
    store(mailbox, name, 1, 10)
    code, out, err = run("mailbox", "drain", url, topic, name, "--count", "4")
    assert (code, numbers(out), err) == (0, [1, 2, 3, 4], "")
    assert len(mailbox.registration(name)) == 6
    code, out, err = run("mailbox", "drain", url, topic, name)
    assert (code, numbers(out), err) == (0, [5, 6, 7, 8, 9, 10], "")
    assert run("mailbox", "drain", url, topic, name) == (0, "", "")


def test_fewer_events_than_wanted_end_with_exit_code_3(run: Run, url: str, topic: str, mailbox: EventMailbox) -> None:
    name = registered(run, url, topic)
    for timeout, text in (([], "only 0 of 5 events"), (["--timeout", "0.1"], "0 of 5 events within 0.1 s")):
        code, out, err = run("mailbox", "drain", url, topic, name, "--count", "5", *timeout)
        assert (code, out, err.count("\n"), text in err) == (3, "", 1, True)
    store(mailbox, name, 1, 3)
    code, out, err = run("mailbox", "drain", url, topic, name, "--count", "5")
    assert (code, numbers(out), "only 3 of 5 events" in err) == (3, [1, 2, 3], True)
    assert len(mailbox.registration(name)) == 0


def test_an_interrupted_drain_writes_no_further_line(run: Run, url: str, topic: str, mailbox: EventMailbox) -> None:
    name = registered(run, url, topic)
    store(mailbox, name, 1, 2)
    with Program("mailbox", "drain", url, topic, name, "--timeout", "60") as program:
        program.out.until(lambda line: b'"sequence":2' in line)
        program.signal(signal.SIGINT)
        assert program.ended() == 130
        assert program.err.rest() == b""


def test_a_drain_goes_on_after_a_restart_of_the_broker(run: Run, own: Mosquitto, topic: str, tmp_path: Path) -> None:
    with (
        messaging.connect(own.url) as m,
        EventMailbox(tmp_path / "mailbox", messaging=m) as mailbox,
        MailboxServer(m, topic, mailbox) as server,
        Proxy(own.host, own.port) as proxy,
    ):
        server.ready.result(PATIENCE)
        name = registered(run, own.url, topic)
        store(mailbox, name, 1, 2)
        url = f"mqtt://{proxy.host}:{proxy.port}"
        with Program("mailbox", "drain", url, topic, name, "--timeout", "60", "--count", "4") as program:
            program.out.until(lambda line: b'"sequence":2' in line)
            proxy.refuse()
            own.stop()
            program.says("connection lost")
            own.start()
            # a request that comes before the mailbox is subscribed again is answered after its timeout only
            eventually(lambda: name in run("mailbox", "list", own.url, topic, "--option", "timeout=1")[1])
            proxy.accept()
            store(mailbox, name, 3, 4)
            assert program.ended() == 0
            assert numbers(program.out.rest().decode()) == [1, 2, 3, 4]
        assert len(mailbox.registration(name)) == 0


# --- cancelling


def test_cancel_ends_a_registration(run: Run, url: str, topic: str, mailbox: EventMailbox) -> None:
    name = registered(run, url, topic)
    assert run("mailbox", "cancel", url, topic, name) == (0, "", "")
    assert mailbox.registrations() == []
    assert "no lease" in refused(run, "mailbox", "cancel", url, topic, name, code=1)
    assert "no registration" in refused(run, "mailbox", "drain", url, topic, name, code=1)
