"""The control socket of a gateway: who may use it, and what it makes of clients that misbehave."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messaging.errors import ArgumentError, ConfigurationError, ConnectFailedError, MessagingError
from messaging.gateway import Gateway
from messaging.gateway import control as module
from messaging.gateway.control import FILE, MAX_CONNECTIONS, Calls, ControlServer, call
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway import kit


def fail(error: Exception) -> Any:
    raise error


CALLS: Calls = {
    "echo": lambda arguments: arguments,
    "refuse": lambda _: fail(ConfigurationError("there is no route 'x'")),
    "break": lambda _: fail(ZeroDivisionError("a defect")),
    "fill": lambda arguments: "x" * arguments["bytes"],
}


@contextmanager
def serving(folder: Path, calls: Calls = CALLS) -> Iterator[ControlServer]:
    server = ControlServer(folder, calls)
    try:
        yield server
    finally:
        server.close()


def raw(folder: Path, data: bytes) -> bytes:
    """Send bytes, and return all that comes back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE)
        client.connect(str(folder / FILE))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        found = b""
        while part := client.recv(65_536):
            found += part
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    """The folder of a control socket that serves ``CALLS``."""
    with serving(tmp_path):
        yield tmp_path


def test_a_request_gets_its_result(served: Path) -> None:
    assert call(served, "echo", {"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}


def test_only_the_owner_may_connect_and_the_mask_of_the_process_stays(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with serving(tmp_path):
            mode = (tmp_path / FILE).lstat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_the_socket_has_its_mode_from_the_first_moment_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    chmod = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda path, mode: (modes.append(path.lstat().st_mode), chmod(path, mode)))
    with serving(tmp_path):
        assert [stat.S_IMODE(each) for each in modes] == [0o600]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_client_of_another_user_gets_no_answer(served: Path) -> None:
    for folder in (served, *served.parents[:3]):
        folder.chmod(0o755)
    (served / FILE).chmod(0o666)  # as a careless program might have it
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            os.write(write, raw(served, b'{"call": "echo"}\n') or b"nothing")
        except OSError:
            os.write(write, b"nothing")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1000) == b"nothing"
    os.close(read)


def test_errors_keep_their_class_where_it_is_one_of_arguments_or_configuration(served: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no route 'x'"):
        call(served, "refuse")
    with pytest.raises(MessagingError, match="ZeroDivisionError: a defect"):
        call(served, "break")
    with pytest.raises(ArgumentError, match=r"there is no request 'ecco'; did you mean 'echo'\?"):
        call(served, "ecco")
    assert call(served, "echo") == {}


@table(
    "line",
    [
        b"", b"{", b"null", b"[]", b"1e999", b'"echo"', b'{"call": 1}', b'{"call": ["echo"]}', b"\xff\xfe",
        b'{"call": "echo", "arguments": []}', b'{"call": "echo", "arguments": null}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_junk_is_answered_with_an_argument_error(line: bytes, served: Path) -> None:
    kind, text = json.loads(raw(served, line + b"\n"))["error"]
    assert kind == "ArgumentError"
    assert text
    assert call(served, "echo") == {}


@settings(max_examples=30)
@given(line=st.binary(max_size=200).filter(lambda line: b"\n" not in line))
def test_whatever_bytes_come_the_next_client_is_served(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    folder = tmp_path_factory.mktemp("control")
    with serving(folder):
        assert json.loads(raw(folder, line + b"\n"))["error"][0] == "ArgumentError"
        assert call(folder, "echo") == {}


def test_what_follows_the_line_is_ignored(served: Path) -> None:
    assert json.loads(raw(served, b'{"call": "echo"}\n{"call": "break"}')) == {"result": {}}


def test_a_client_that_leaves_within_a_line_is_no_problem(served: Path) -> None:
    assert raw(served, b'{"call": "ec') == b""
    assert call(served, "echo") == {}


def test_a_request_that_is_too_long_is_cut(served: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE)
        client.connect(str(served / FILE))
        sent = 0
        with pytest.raises(OSError):  # noqa: PT012
            while sent < 2**23:
                sent += client.send(b"x" * 65_536)
    assert sent < 2**22
    assert call(served, "echo") == {}


def test_a_long_answer_arrives_and_a_longer_one_is_an_error(monkeypatch: pytest.MonkeyPatch, served: Path) -> None:
    assert len(call(served, "fill", {"bytes": 3_000_000})) == 3_000_000
    monkeypatch.setattr(module, "_MAX_ANSWER", 1000)
    with pytest.raises(MessagingError, match="the answer is too long: 2015 bytes"):
        call(served, "fill", {"bytes": 2000})


def test_a_client_that_dribbles_is_cut_and_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLIENT_TIMEOUT", 0.6)
    with serving(tmp_path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.connect(str(tmp_path / FILE))
        begun = time.monotonic()

        def is_cut() -> bool:
            assert call(tmp_path, "echo") == {}
            try:
                slow.send(b"x")
            except OSError:
                return True
            return False

        eventually(is_cut)
        assert time.monotonic() - begun > 0.5


def test_a_request_that_lasts_does_not_hold_up_others_and_their_number_is_bounded(tmp_path: Path) -> None:
    release = threading.Event()
    waiting: Recorder[object] = Recorder()

    def wait(arguments: Mapping[str, Any]) -> str:
        waiting.append(arguments)
        assert release.wait(PATIENCE)
        return "released"

    with serving(tmp_path, {**CALLS, "wait": wait}):
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda: results.append(call(tmp_path, "wait"))) for _ in range(MAX_CONNECTIONS)
        ]
        for number, thread in enumerate(threads):
            thread.start()
            waiting.wait_for(number + 1)
            if number == 0:
                assert call(tmp_path, "echo") == {}
        with pytest.raises(MessagingError, match=f"busy with {MAX_CONNECTIONS} requests"):
            call(tmp_path, "echo")
        release.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert results == ["released"] * MAX_CONNECTIONS
        eventually(lambda: _is_served(tmp_path))


def _is_served(folder: Path) -> bool:
    try:
        return bool(call(folder, "echo", {"a": 1}))
    except MessagingError:
        return False


def test_a_socket_of_a_killed_gateway_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(tmp_path / FILE))
    left.close()
    with serving(tmp_path):
        with pytest.raises(ConfigurationError, match="another gateway runs with this data folder"):
            ControlServer(tmp_path, CALLS)
        assert call(tmp_path, "echo") == {}
    assert not (tmp_path / FILE).exists()


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    with pytest.raises(ConfigurationError, match="control socket"):
        ControlServer(tmp_path, CALLS)
    assert (tmp_path / FILE).read_text() == "mine"


def test_closing_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    first = ControlServer(tmp_path, CALLS)
    (tmp_path / FILE).unlink()
    with serving(tmp_path):
        first.close()
        first.close()
        assert call(tmp_path, "echo") == {}


def test_a_long_path_is_no_problem(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with serving(folder):
        assert call(folder, "echo", {"a": 1}) == {"a": 1}


def test_without_a_gateway_the_error_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConnectFailedError, match=f"no gateway runs with the data folder {tmp_path}"):
        call(tmp_path, "status")


def test_an_answer_that_is_no_answer_is_an_error(tmp_path: Path) -> None:
    for answer in (b"", b"{}\n", b"[1]\n", b'{"error": "x"}\n', b"junk\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(tmp_path / FILE))
            server.listen(1)

            def serve(server: socket.socket = server, answer: bytes = answer) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(MessagingError, match="the gateway did not answer"):
                call(tmp_path, "status", timeout=PATIENCE)
            thread.join(PATIENCE)
        (tmp_path / FILE).unlink()


def test_a_gateway_tells_its_state_and_refuses_a_second_one_without_routes(tmp_path: Path) -> None:
    requests = {"r": {"from": {"instance": "a", "channel": "x"}, "to": {"instance": "a", "channel": "y"}}}
    given = kit.settings(tmp_path, routes={}, requests=requests)
    with Gateway(given):
        eventually(lambda: call(tmp_path, "status")["problems"] == [], "connected")
        found = call(tmp_path, "status")
        assert (found["name"], found["state"]) == ("gw", "running")
        with pytest.raises(ConfigurationError, match="another gateway"):
            Gateway(given.model_copy(update={"name": "other"})).start()
        with pytest.raises(ConfigurationError, match="no route 'x'"):
            call(tmp_path, "drop", {"route": "x"})
        with pytest.raises(ConfigurationError, match="not started from a file"):
            call(tmp_path, "reload")
        assert call(tmp_path, "status")["state"] == "running"
