"""Credentials that change: asked for before each connection and before they expire; providers that fail."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.connection import renewal
from messaging.connection.credentials import run
from messaging.errors import (
    AuthenticationError,
    CredentialsError,
    InvalidOptionError,
    MessagingError,
)
from messaging.execution import clock, engine
from messaging.model.credentials import Credentials
from messaging.testing.clock import VirtualClock
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results
from tests.connection.test_state import observe, start
from tests.doubles.fake import FakeBroker, brokers, settle_loop
from tests.doubles.fixtures import Connect
from tests.instance import test_secrets
from tests.processes import has_ended

SECRET = "hunter2-pl4nted"

#: everything that an error shows of the frames below this file
told = functools.partial(test_secrets.told, application=__file__)


@pytest.fixture
def login() -> Iterator[FakeBroker]:
    """A broker whose adapter takes credentials that change."""
    broker = FakeBroker("login")
    yield broker
    brokers.pop(broker.name, None)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> float:
    """Has password files looked at more often; seconds."""
    monkeypatch.setattr(renewal, "LOOK", 0.05)
    return 0.05


def passwords(given: list[Credentials]) -> list[str]:
    return [each.password.get_secret_value() for each in given]


class Counting:
    """A provider whose passwords are counted: ``p1``, ``p2``, ..."""

    def __init__(self, *, valid_for: float | None = None) -> None:
        self.asked = 0
        self.valid_for = valid_for
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def __call__(self) -> Credentials:
        self.threads.append(threading.current_thread())
        self.asked += 1
        if self.errors:
            raise self.errors[0]
        return Credentials("me", f"p{self.asked}", valid_for=self.valid_for)


# --- before each connection


def test_a_callable_is_asked_before_each_connection_on_a_worker_thread(login: FakeBroker, connect: Connect) -> None:
    provider = Counting()
    connect(login, credentials=provider)
    assert passwords(login.logins) == ["p1"]
    login.lose_and_reconnect()
    login.lose_and_reconnect()
    assert passwords(login.logins) == ["p1", "p2", "p3"]
    assert {each.name for each in provider.threads} == {"messaging-worker"}
    assert login.renewals == []  # nothing expires


def test_a_coroutine_function_runs_on_the_loop_that_was_running(login: FakeBroker) -> None:
    seen: list[Any] = []

    async def ask() -> str:
        seen.append(asyncio.get_running_loop())
        return "p1"

    async def main() -> None:
        async with messaging.connect(login.url, credentials=ask):
            assert seen == [asyncio.get_running_loop()]

    asyncio.run(main())
    assert passwords(login.logins) == ["p1"]


def test_without_a_running_loop_it_runs_on_that_of_the_handlers(login: FakeBroker, connect: Connect) -> None:
    seen: list[str] = []

    class Asking:
        async def __call__(self) -> tuple[str, str]:
            seen.append(threading.current_thread().name)
            return "me", "p1"

    connect(login, credentials=Asking())
    assert seen == ["messaging-handlers"]
    assert [each.username for each in login.logins] == ["me"]


def test_a_loop_that_is_closed_is_an_error_of_the_attempt(login: FakeBroker, connect: Connect) -> None:
    async def ask() -> str:
        return "p1"

    async def main() -> messaging.Messaging:
        return await connect(login, credentials=ask)

    m = asyncio.run(main())
    login.lose()
    eventually(lambda: "the event loop that was running at connect() is closed" in str(m.connection_state.value.cause))
    m.close()


@table(
    "answer, expected",
    [
        ("p", (None, "p")),
        (("me", "p"), ("me", "p")),
        (["me", "p"], ("me", "p")),
        ((None, "p"), (None, "p")),
        (Credentials("me", "p"), ("me", "p")),
        (Credentials(password="p"), (None, "p")),
    ],
    ids=["password", "pair", "list", "pair without name", "credentials", "credentials without name"],
)
@table("kind", ["callable", "coroutine function", "callable that returns a coroutine"])
def test_what_a_provider_may_return(
    connect: Connect, kind: str, answer: object, expected: tuple[str | None, str]
) -> None:
    login = FakeBroker("login")

    async def ask() -> object:
        return answer

    provider: Callable[[], Any] = {"callable": lambda: answer, "coroutine function": ask}.get(kind, lambda: ask())
    connect(login, credentials=provider)
    (given,) = login.logins
    assert (given.username, given.password.get_secret_value()) == expected


@table(
    "answer",
    [None, 7, b"bytes", "", ("me",), ("me", "p", "q"), {"password": SECRET}, (7, SECRET), f"{SECRET}\nmore", object()],
    ids=["none", "number", "bytes", "empty", "one", "three", "mapping", "name", "line end", "object"],
)
def test_anything_else_is_an_error_that_does_not_show_it(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture, answer: object
) -> None:
    with pytest.raises(CredentialsError, match="option 'credentials': the provider returned") as caught:
        connect(login, credentials=lambda: answer)
    assert SECRET not in told(caught.value) + caplog.text
    assert login.opened == 0


# --- providers that fail


def failing() -> str:
    secret = SECRET
    try:
        raise KeyError(secret)
    except KeyError as error:
        raise ValueError(f"no token: {secret}") from error


async def failing_coroutine() -> str:
    return failing()


@table("provider", [failing, failing_coroutine, lambda: failing_coroutine()], ids=["f", "c", "fc"])
def test_the_error_of_a_provider_is_named_by_its_type_and_place_alone(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture, provider: Callable[[], Any]
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(CredentialsError) as caught:
        connect(login, credentials=provider)
    line = failing.__code__.co_firstlineno + 5
    assert str(caught.value) == f"option 'credentials': the provider raised ValueError ({__file__}, line {line})"
    assert SECRET not in told(caught.value) + caplog.text
    gc.collect()
    assert SECRET not in caplog.text


class ForeignError(CredentialsError):
    pass


@table("kind", [CredentialsError, ForeignError, MessagingError, SystemExit, KeyboardInterrupt])
def test_errors_of_this_library_and_exits_are_no_exception(
    login: FakeBroker, connect: Connect, kind: type[BaseException]
) -> None:
    def raising() -> str:
        raise kind(SECRET)

    with pytest.raises(CredentialsError, match=f"the provider raised {kind.__name__}") as caught:
        connect(login, credentials=raising)
    assert SECRET not in told(caught.value)


def test_a_first_attempt_without_credentials_is_repeated_if_that_is_wanted(login: FakeBroker, connect: Connect) -> None:
    provider = Counting()
    provider.errors.append(OSError("no network"))
    m = start(connect, login, credentials=provider, retry_connect=True)
    eventually(lambda: provider.asked >= 3)
    provider.errors.clear()
    m.ready.result(PATIENCE)
    assert len(login.logins) == 1


def test_a_provider_that_fails_does_not_end_an_instance_that_was_connected(login: FakeBroker, connect: Connect) -> None:
    provider = Counting()
    m = connect(login, credentials=provider)
    provider.errors.append(OSError(SECRET))
    login.lose()
    eventually(lambda: provider.asked >= 4)
    promise = m.publish("a", b"1")
    assert m.connection_state.value.name == "reconnecting"
    assert isinstance(m.connection_state.value.cause, CredentialsError)
    provider.errors.clear()
    promise.result(PATIENCE)
    eventually(lambda: m.connection_state.value.name == "connected")


@table("kind", ["callable", "coroutine function", "callable that returns a coroutine"])
def test_a_provider_that_hangs_fails_the_attempt_in_time(login: FakeBroker, connect: Connect, kind: str) -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(PATIENCE)
        return "late"

    cancelled: Recorder[None] = Recorder()

    async def hang_async() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(None)
        return "late"

    provider: Callable[[], Any] = {
        "callable": hang, "coroutine function": hang_async, "callable that returns a coroutine": lambda: hang_async()
    }[kind]  # fmt: skip
    with pytest.raises(CredentialsError, match=r"option 'credentials': no credentials within 0\.2 s"):
        connect(login, credentials=provider, connect_timeout=0.2)
    release.set()
    if kind != "callable":
        cancelled.wait_for(1)


def test_a_provider_that_hangs_is_overdue_also_if_the_loop_is_late(login: FakeBroker, connect: Connect) -> None:
    async def hang() -> str:
        await asyncio.Event().wait()
        return "late"

    def ask() -> Coroutine[Any, Any, str]:
        engine().call(time.sleep, 0.5)  # sleeps: the thread that asked notices the deadline first
        return hang()

    with pytest.raises(CredentialsError, match=r"option 'credentials': no credentials within 0\.2 s"):
        connect(login, credentials=ask, connect_timeout=0.2)


def test_a_callable_that_hangs_takes_one_thread_however_often_it_is_needed(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    asked = 0

    def ask() -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            release.wait(PATIENCE)
        return f"p{asked}"

    connect(login, credentials=ask, connect_timeout=0.4)
    login.lose()
    eventually(lambda: caplog.text.count("no credentials within") >= 3, "attempts that fail")
    assert asked == 2
    release.set()
    login.wait_open(2)
    assert passwords(login.logins) in (["p1", "p2"], ["p1", "p3"])  # no attempt may have waited for the late answer


def test_closing_does_not_wait_for_a_provider_that_hangs(login: FakeBroker, connect: Connect) -> None:
    release = threading.Event()
    provider = Counting()
    m = connect(login, credentials=provider)
    hangs: Recorder[None] = Recorder()

    def hang() -> Credentials:
        hangs.append(None)
        release.wait(PATIENCE)
        return Credentials("me", "p")

    provider.__class__ = type("Hanging", (Counting,), {"__call__": lambda _: hang()})
    login.lose()
    hangs.wait_for(1)
    m.close()  # long before the release
    release.set()
    settle_loop()


# --- before they expire


@pytest.mark.usefixtures("virtual_clock")
def test_credentials_are_renewed_on_the_same_connection_after_a_random_part_of_their_lifetime(
    login: FakeBroker, connect: Connect
) -> None:
    times: Recorder[float] = Recorder()

    def ask() -> Credentials:
        times.append(clock.monotonic())
        return Credentials("me", f"p{len(times)}", valid_for=4.0)

    m = connect(login, credentials=ask)
    eventually(lambda: len(login.renewals) >= 3)
    assert passwords(login.renewals)[:3] == ["p2", "p3", "p4"]
    assert login.renewals[-1].remaining > 0
    assert (login.opened, m.connection_state.value.name) == (1, "connected")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(4.0 * 0.55 < gap < 4.0 for gap in gaps), gaps
    assert len({round(gap, 3) for gap in gaps}) > 1


def test_where_that_is_impossible_a_planned_reconnect_loses_nothing_and_is_no_problem(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    login.renews_in_place = False
    provider = Counting(valid_for=0.4)
    m = connect(login, credentials=provider, reconnect_min=30.0, reconnect_max=30.0)
    promises: list[Any] = []
    states = observe(m)

    def publish() -> bool:
        promises.append(m.publish("a", b"%d" % len(promises)))
        return login.opened >= 4

    eventually(publish)
    results(promises)
    assert sorted(set(login.payloads), key=int) == [b"%d" % number for number in range(len(promises))]
    # those of the renewal served the connection: it was not asked again
    assert passwords(login.logins)[:4] == ["p1", "p2", "p3", "p4"]
    assert passwords(login.renewals)[:3] == ["p2", "p3", "p4"]
    assert {state.cause for state in states} == {None}
    assert m.runtime.get_runtime_dto().connection.cause is None
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert "connecting anew, as planned" in caplog.text


def test_the_same_password_again_is_not_handed_over(login: FakeBroker, connect: Connect) -> None:
    asked = 0

    def ask() -> Credentials:
        nonlocal asked
        asked += 1
        return Credentials("me", "same" if asked < 4 else "other", valid_for=0.4)

    connect(login, credentials=ask)
    eventually(lambda: login.renewals)
    assert passwords(login.renewals) == ["other"]
    assert asked == 4


def test_a_provider_that_fails_before_the_expiry_is_asked_again_while_the_connection_lasts(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Counting(valid_for=1.0)
    m = connect(login, credentials=provider)
    provider.errors.append(OSError(SECRET))
    eventually(lambda: provider.asked >= 4)
    assert (login.opened, m.connection_state.value.name) == (1, "connected")
    m.publish("a", b"1").result(PATIENCE)
    provider.errors.clear()
    eventually(lambda: login.renewals)
    assert login.opened == 1
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "cannot renew the credentials: option 'credentials': the provider raised OSError" in warnings[0]
    assert "they expire in" in warnings[0]
    assert SECRET not in caplog.text
    eventually(lambda: "the credentials are renewed again" in caplog.text)


def test_credentials_that_have_expired_when_they_come_are_tried_and_reported(
    virtual_clock: VirtualClock, login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def ask() -> Credentials:
        nonlocal asked
        asked += 1
        return Credentials("me", "old", expires_at=clock.wall() - 100)

    connect(login, credentials=ask)
    assert passwords(login.logins) == ["old"]  # the clock of this machine may be wrong
    assert "the provider returned credentials that expired 100 s ago" in caplog.text
    virtual_clock.advance(0.9)
    assert asked == 1


@pytest.mark.usefixtures("virtual_clock")
def test_a_defect_of_the_adapter_does_not_end_the_renewals(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    login.errors["renew"].append(ZeroDivisionError("oops"))
    login.errors["renew"].append(MessagingError("not now"))
    connect(login, credentials=Counting(valid_for=0.5))
    eventually(lambda: len(login.renewals) >= 4)
    assert login.opened == 1
    assert "the adapter failed to renew the credentials" in caplog.text
    assert "the new credentials are not in use: not now" in caplog.text


@pytest.mark.usefixtures("virtual_clock")
def test_a_loss_while_they_are_renewed_is_a_loss_like_any_other(login: FakeBroker, connect: Connect) -> None:
    provider = Counting(valid_for=0.5)
    m = connect(login, credentials=provider)
    login.gates["renew"].close()
    eventually(lambda: login.gates["renew"].waiting)
    login.lose()
    login.wait_open(2)
    assert login.gates["renew"].waiting == 0
    login.gates["renew"].open()
    eventually(lambda: len(login.renewals) >= 2)  # those of the new connection are renewed, too
    eventually(lambda: m.connection_state.value.name == "connected")


@pytest.mark.usefixtures("virtual_clock")
def test_closing_while_they_are_renewed_ends_both(login: FakeBroker, connect: Connect) -> None:
    m = connect(login, credentials=Counting(valid_for=0.3))
    login.gates["renew"].close()
    eventually(lambda: login.gates["renew"].waiting)
    m.close()
    assert login.gates["renew"].waiting == 0


def test_closing_ends_the_renewals(virtual_clock: VirtualClock, login: FakeBroker, connect: Connect) -> None:
    provider = Counting(valid_for=0.3)
    m = connect(login, credentials=provider)
    eventually(lambda: login.renewals)
    m.close()
    asked = provider.asked
    virtual_clock.advance(60.0)
    assert provider.asked == asked


def test_a_refused_log_in_is_tried_again_soon_since_the_next_credentials_may_be_right(
    login: FakeBroker, connect: Connect
) -> None:
    provider = Counting()
    m = connect(login, credentials=provider, reconnect_max=20.0)
    for _ in range(3):
        login.errors["open"].append(AuthenticationError("expired"))
    login.lose()
    login.wait_open(2)
    assert passwords(login.logins) == ["p1", "p2", "p3", "p4", "p5"]
    eventually(lambda: m.connection_state.value.name == "connected")


# --- commands


def script(folder: Path, body: str) -> list[str]:
    file = folder / "ask.py"
    file.write_text(f"import os, sys, time\n{body}\n")
    return [sys.executable, str(file)]


def test_a_command_is_run_before_each_connection(login: FakeBroker, connect: Connect, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    command = script(
        tmp_path, f"with open({str(counter)!r}, 'a+') as f: f.write('x'); f.seek(0); print('p%d' % len(f.read()))"
    )
    connect(login, password_command=command)
    login.lose_and_reconnect()
    assert passwords(login.logins) == ["p1", "p2"]


def test_only_line_ends_are_cut_off_the_output(tmp_path: Path) -> None:
    assert run(("printf", " a b \r\n"), 5) == " a b "
    assert run(("printf", "é"), 5) == "é"


@table(
    "body, reason",
    [
        (
            f"print({SECRET!r}); print({SECRET!r}, file=sys.stderr); sys.exit(3)",
            "failed: exit status 3; run it by hand",
        ),
        ("os.kill(os.getpid(), 9)", "failed: signal 9"),
        ("pass", "no password from .*: it is empty"),
        ("print()", "no password from .*: it is empty"),
        (rf"sys.stdout.buffer.write(b'\xff{SECRET}')", "it is not UTF-8"),
        (f"print({SECRET!r} * 100_000)", "more than 65536 bytes"),
        ("print('a'); print('b')", "no valid credentials: password holds U"),
    ],
    ids=["exit", "signal", "nothing", "empty line", "binary", "endless", "two lines"],
)
def test_a_command_that_fails_says_how_and_shows_no_output(
    login: FakeBroker, connect: Connect, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, body: str, reason: str,
) -> None:  # fmt: skip
    with pytest.raises(CredentialsError, match=f"option 'password_command': .*{reason}") as caught:
        connect(login, password_command=script(tmp_path, body))
    assert SECRET not in told(caught.value) + caplog.text + "".join(capfd.readouterr())


def test_a_command_that_is_not_there_is_named(login: FakeBroker, connect: Connect, tmp_path: Path) -> None:
    for command in (["/nowhere/ask", SECRET], [str(tmp_path), SECRET]):
        with pytest.raises(CredentialsError, match=f"cannot run '{command[0]}': ") as caught:
            connect(login, password_command=command)
        assert SECRET not in str(caught.value)


def test_a_command_that_hangs_is_killed_with_the_processes_that_it_started(
    login: FakeBroker, connect: Connect, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    body = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "__import__('signal').pause()"
    )
    with pytest.raises(CredentialsError, match=r"within 1 s|it took longer than 1 s"):
        connect(login, password_command=script(tmp_path, body), connect_timeout=1.0)
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    for pid in map(int, pids.read_text().split()):
        eventually(functools.partial(has_ended, pid), f"the end of {pid}")


def test_a_process_that_leaves_the_group_of_a_command_does_not_hold_up_its_deadline(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('p')"
    )
    started = time.monotonic()
    with pytest.raises(CredentialsError, match="took longer than 1 s"):
        run(tuple(script(tmp_path, body)), 1.0)
    assert time.monotonic() - started < PATIENCE
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_command_does_not_see_the_terminal_nor_its_interrupts(tmp_path: Path) -> None:
    command = script(tmp_path, "print(sys.stdin.read() + str(os.getpgid(0) == os.getpid()))")
    assert run(tuple(command), 10) == "True"
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


# --- files


@table("option", {"the option": True, "the environment": False})
def test_a_file_is_read_for_each_connection(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: bool
) -> None:
    login = FakeBroker("login")
    file = tmp_path / "password"
    file.write_text("p1\n")
    if not option:
        monkeypatch.setenv("MESSAGING_PASSWORD_FILE", str(file))
    connect(login, **({"password_file": str(file), "username": "me"} if option else {}))
    file.write_text("p2\n")
    login.lose_and_reconnect()
    assert (passwords(login.logins)[0], passwords(login.logins)[-1]) == ("p1", "p2")


def replaced_by_rename(file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_text("p2\n")
    new.rename(file)


def written_in_place(file: Path) -> None:
    file.write_text("p2, longer\n")


def removed_and_made_again(file: Path) -> None:
    file.unlink()
    time.sleep(renewal.LOOK * 2)  # sleeps: until it was looked for
    file.write_text("p2\n")


@table("change", [replaced_by_rename, written_in_place, removed_and_made_again])
def test_a_file_that_changes_is_handed_over_without_a_loss(
    connect: Connect, tmp_path: Path, look: float, change: Callable[[Path], None]
) -> None:
    login = FakeBroker("login")
    file = tmp_path / "password"
    file.write_text("p1\n")
    connect(login, password_file=file)
    change(file)
    eventually(lambda: login.renewals)
    assert passwords(login.renewals)[0].startswith("p2")
    assert login.opened == 1


def test_links_that_are_swapped_as_kubernetes_does_are_a_change(
    login: FakeBroker, connect: Connect, tmp_path: Path, look: float
) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "password").write_text(f"p{version}\n")
    data = tmp_path / "..data"
    data.symlink_to("1")
    file = tmp_path / "password"
    file.symlink_to("..data/password")
    connect(login, password_file=file)
    new = tmp_path / "..new"
    new.symlink_to("2")
    new.rename(data)
    eventually(lambda: login.renewals)
    assert (passwords(login.logins), passwords(login.renewals)) == (["p1"], ["p2"])


def test_a_file_that_was_touched_only_is_not_handed_over(
    login: FakeBroker, connect: Connect, tmp_path: Path, look: float
) -> None:
    file = tmp_path / "password"
    file.write_text("p1\n")
    connect(login, password_file=file)
    os.utime(file, (1, 1))
    time.sleep(look * 3)  # sleeps: until it was looked at
    assert login.renewals == []
    file.write_text("p2\n")
    eventually(lambda: login.renewals)


@table("kind", ["missing", "directory", "empty", "binary"])
def test_a_file_without_a_password_says_why(login: FakeBroker, connect: Connect, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "password"
    if kind == "directory":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes(b"\n" if kind == "empty" else b"\xff" + SECRET.encode())
    with pytest.raises(CredentialsError, match=rf"option 'password_file': .*'{file}': ") as caught:
        connect(login, password_file=file)
    assert SECRET not in told(caught.value)


def test_an_adapter_without_credentials_refuses_them(broker: FakeBroker, connect: Connect) -> None:
    for option, value in {"credentials": Counting(), "password_command": "true", "password_file": "/x"}.items():
        with pytest.raises(InvalidOptionError, match=f"option '{option}': fake:// takes no such credentials") as caught:
            connect(broker, name="one", **{option: value})
        assert caught.value.option == option
    connect(broker, name="one")  # the name is free again


def test_no_secret_is_shown_by_a_working_connection(
    login: FakeBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    count = 0

    def ask(prefix: str) -> Credentials:
        nonlocal count
        count += 1
        return Credentials("me", f"{prefix}{count}", valid_for=0.4)

    m = connect(login, credentials=functools.partial(ask, SECRET))
    eventually(lambda: len(login.renewals) >= 2)
    login.lose_and_reconnect()
    adapter = login.adapter
    shown = [repr(m), repr(m.runtime.get_runtime_dto()), repr(adapter), repr(adapter.settings), repr(login.renewals)]
    shown += [repr(vars(m._connection._renewal)), repr(vars(m._connection)), caplog.text]
    assert [text for text in shown if SECRET in text] == []
    assert math.isfinite(login.renewals[-1].remaining)
