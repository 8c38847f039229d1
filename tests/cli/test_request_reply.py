"""``messaging request`` and ``messaging reply`` as processes that meet at a broker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Message, Messaging
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run
from tests.cli.program import Program, ready
from tests.processes import has_ended

Ask = Callable[..., tuple[int, str, str]]


def responder(*arguments: str, variables: dict[str, str] | None = None) -> Program:
    """Run ``messaging reply`` and wait until it is ready."""
    return ready("answering requests on", "reply", *arguments, variables=variables)


#: largest message of the responders below, bytes
LIMIT = 100_000
BOUND = ("--option", f"max_message_size={LIMIT}")


#: responders whose command is a shell, by channel: the payload is the script
SHELLS = {"shell/+": BOUND, "lines": ("--lines", *BOUND), "hasty": ("--timeout", "0.5")}


@pytest.fixture(scope="module")
def shells(url: str) -> Iterator[dict[str, Program]]:
    """Start the responders."""
    environment = {"REQUEST_METHOD": "GET"}
    with contextlib.ExitStack() as stack:
        yield {
            channel: stack.enter_context(
                responder(url, "-t", channel, "--exec", "exec sh", *options, variables=environment)
            )
            for channel, options in SHELLS.items()
        }


def asking(channel: str) -> Any:
    """Have a shell run a script: exit code of the request, stdout, stderr."""

    def ask(run: Run, url: str, shells: dict[str, Program]) -> Ask:
        return lambda script, *arguments: run("request", url, "-t", channel, "-m", script, "-W", "20", *arguments)

    return pytest.fixture(ask)


ask, ask_many, ask_hasty = asking("shell/a"), asking("lines"), asking("hasty")


@pytest.fixture
def shell(shells: dict[str, Program]) -> Program:
    return shells["shell/+"]


def written(file: Path) -> str:
    """Return the line of ``file`` when a command has written it."""
    eventually(lambda: file.exists() and file.read_text().endswith("\n"))
    return file.read_text().strip()


# --- one reply


def test_the_output_of_the_command_is_the_reply(run: Run, url: str, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_text("a\nb")
    with responder(url, "-t", topic, "--exec", "tr a-z A-Z", "-C", "3") as reply:
        with Program("request", url, "-t", topic, "-m", "hello") as request:
            assert request.ended() == 0
            assert request.out.rest() == b"HELLO\n"
            assert request.err.rest() == b""
        assert run("request", url, "-t", topic, "-f", str(file), "--no-newline") == (0, "A\nB", "")
        assert run("request", url, "-t", topic, "-n") == (0, "\n", "")
        assert reply.ended() == 0
        assert reply.out.rest() == b""
        ready = rf"messaging: answering requests on {topic} at {url} as reply\w+\n"
        assert re.fullmatch(ready, reply.err.rest().decode())


def test_any_bytes_go_there_and_back_unchanged(url: str, topic: str) -> None:
    binary = bytes(range(256)) * 3_000
    with (
        Program("request", url, "-t", topic, "-s", "-N", "-q", "1") as request,  # sends when its input ends
        responder(url, "-t", topic, "--exec", "cat") as reply,
    ):
        request.send(binary)
        request.end_input()
        assert request.out.rest() == binary
        reply.signal(signal.SIGTERM)
        assert reply.ended() == 130
        assert reply.err.rest().count(b"\n") == 1  # that it was ready


def test_json_has_every_property_of_a_reply(run: Run, url: str, topic: str) -> None:
    with responder(url, "-t", topic, "--exec", "cat", "--content-type", "application/json", "-C", "1"):
        arguments = ["-m", '{"a": 1}', "--json", "-q", "1", "--correlation-id", "c-7", "--reply-to", f"{topic}/replies"]
        code, out, err = run("request", url, "-t", topic, *arguments)
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert (found["channel"], found["correlation_id"]) == (f"{topic}/replies", "c-7")
    assert (found["payload"], found["value"], found["content_type"]) == ('{"a": 1}', {"a": 1}, "application/json")
    assert found["extensions"]["qos"] == "1"


def test_a_reply_has_no_content_type_by_default(ask: Ask) -> None:
    found = json.loads(ask("echo 17", "--json")[1])
    assert "content_type" not in found
    assert found["value"] == 17


def test_the_environment_describes_the_request(ask: Ask) -> None:
    script = "env | grep ^REQUEST_ | sort"
    code, out, _ = ask(
        script, "--content-type", "text/x", "--correlation-id", "c 7", "--reply-to", "shell-replies/a",
        *("-D", "tenant-id=a=b c", "-D", "user=joe", "-D", "User=root", "-D", "a.b=c", "-D", "path=/tmp"),
    )  # fmt: skip
    assert code == 0
    assert out.split("\n") == [
        "REQUEST_CHANNEL=shell/a",
        "REQUEST_CONTENT_TYPE=text/x",
        "REQUEST_CORRELATION_ID=c 7",
        # headers that map to the same variable, or to no valid name, are left out
        "REQUEST_HEADER_PATH=/tmp",
        "REQUEST_HEADER_TENANT_ID=a=b c",
        "REQUEST_REPLY_TO=shell-replies/a",
        "",
        "",
    ]
    code, out, _ = ask(script)
    # without REQUEST_METHOD of the responder's own environment
    names = [line.split("=")[0] for line in out.split()]
    assert names == ["REQUEST_CHANNEL", "REQUEST_CORRELATION_ID", "REQUEST_REPLY_TO"]


def test_nothing_of_a_request_is_part_of_the_command_line(run: Run, url: str, topic: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    evil = f"'; touch {victim}; $(touch {victim}) `touch {victim}`"
    with responder(url, "-t", f"{topic}/+", "--exec", 'printf %s "$REQUEST_HEADER_X"; cat', "-C", "1"):
        arguments = ["-t", f"{topic}/$(id)", "-m", evil, "-D", f"x={evil}", "-D", f"{evil}=x", "--correlation-id", evil]
        assert run("request", url, *arguments) == (0, f"{evil}{evil}\n", "")
    assert not victim.exists()


def test_a_command_need_not_read_its_stdin(ask: Ask) -> None:
    assert ask("echo read; exit\n" + "x" * 90_000) == (0, "read\n\n", "")


def test_requests_get_a_content_encoding_and_headers(run: Run, url: str, m: Messaging, topic: str) -> None:
    def handler(request: Message) -> str:
        context = request.context
        return f"{context.content_encoding} {request.value(str)} {dict(context.extensions['headers'])}"

    m.reply(topic, handler).ready.result(PATIENCE)
    arguments = ("--content-type", "text/plain", "--encoding", "gzip", "-D", "k=v", "-x", "timeToLive=5")
    found = run("request", url, "-i", topic[4:], "-t", topic, "-m", "grüße", *arguments)
    assert found == (0, "gzip grüße {'k': 'v'}\n", "")


# --- many replies


def test_each_line_is_a_reply(ask_many: Ask) -> None:
    assert ask_many("seq 3; echo; printf last", "--many") == (0, "1\n2\n3\n\nlast\n", "")
    assert ask_many("seq 2000", "--many", "-N") == (0, "".join(map(str, range(1, 2001))), "")
    assert ask_many("true", "--many") == (0, "", "")


def test_many_replies_as_json(ask_many: Ask) -> None:
    code, out, _ = ask_many("seq 3", "--many", "--json", "--count", "2")
    assert (code, [json.loads(line)["value"] for line in out.splitlines()]) == (0, [1, 2])


def test_a_request_for_one_reply_gets_the_first_line(ask_many: Ask, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert ask_many(f"echo $$ > {file}; echo first; sleep 1000") == (0, "first\n", "")
    eventually(lambda: has_ended(written(file)))


def test_a_request_for_many_replies_gets_a_single_one(ask: Ask) -> None:
    assert ask("seq 2", "--many") == (0, "1\n2\n\n", "")


def test_a_line_is_sent_and_written_at_once(url: str, shells: dict[str, Program], tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    script = f"echo one; cat {pipe}; echo three"
    with Program("request", url, "-t", "lines", "-m", script, "--many") as request:
        request.out.until(lambda line: line == b"one\n")
        pipe.write_text("two\n")
        assert request.ended() == 0
        assert request.out.rest() == b"one\ntwo\nthree\n"


def test_reaching_the_count_of_replies_ends_the_command(ask_many: Ask, tmp_path: Path) -> None:
    code, out, err = ask_many("echo $$; sleep 1000", "--many", "-C", "1")
    assert (code, err) == (0, "")
    eventually(lambda: has_ended(out.strip()))


@pytest.mark.parametrize("end", ["interrupt", "its reader ends"])
def test_a_request_that_ends_early_ends_the_command_quietly(url: str, shells: dict[str, Program], end: str) -> None:
    with Program("request", url, "-t", "lines", "-m", "echo $$; sleep 1000", "--many") as request:
        assert request.process.stdout is not None
        pid = request.process.stdout.readline().decode().strip()
        if end == "interrupt":
            request.signal(signal.SIGINT)
        else:
            request.process.stdout.close()
        assert request.ended() == (130 if end == "interrupt" else 0)
        assert request.err.rest() == b""
    eventually(lambda: has_ended(pid))


# --- what goes wrong with a command


@table(
    "script, reason",
    [
        ("echo lost; exit 3", "exit status 3"),
        ("nonesuch", "exit status 127"),
        ("kill -TERM $$", "ended by SIGTERM"),
        ("kill -40 $$", "ended by signal 40"),
        ("cat /dev/zero", "killed: output of more than 100000 bytes"),
    ],
)
def test_a_command_that_fails_makes_a_fault(ask: Ask, shell: Program, script: str, reason: str) -> None:
    assert ask(script) == (1, "", f"messaging: error: CommandFailedError: {reason}\n")
    shell.says(f"messaging: error: the handler of 'shell/a' failed: CommandFailedError: {reason}")


@table(
    "script, out, reason",
    [
        ("seq 3; printf partial; exit 3", "1\n2\n3\n", "exit status 3"),
        ("echo a; cat /dev/zero", "a\n", "killed: a line of more than 100000 bytes"),
    ],
)
def test_a_fault_comes_after_the_lines_before_it(ask_many: Ask, script: str, out: str, reason: str) -> None:
    assert ask_many(script, "--many") == (1, out, f"messaging: error: CommandFailedError: {reason}\n")


def test_a_reply_of_the_largest_size_is_sent_and_a_larger_one_refused(ask: Ask, ask_many: Ask) -> None:
    for one in (ask, ask_many):
        assert one(f"head -c {LIMIT} /dev/zero | tr '\\0' x") == (0, "x" * LIMIT + "\n", "")
        code, out, err = one(f"head -c {LIMIT + 1} /dev/zero | tr '\\0' x; echo; sleep 1000")
        assert (code, out) == (1, "")
        assert f"of more than {LIMIT} bytes" in err


@table("script", ["sleep 1000", "exec >&-; sleep 1000", "echo a; sleep 1000"])
def test_a_command_that_takes_too_long_is_killed(ask_hasty: Ask, script: str) -> None:
    assert ask_hasty(script) == (1, "", "messaging: error: CommandFailedError: killed after 0.5 s\n")


def test_the_processes_of_a_command_are_killed_with_it(ask_hasty: Ask, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code, _, err = ask_hasty(f"sleep 1000 & echo $$ $! > {file}; wait")
    assert (code, "killed after" in err) == (1, True)
    pids = written(file).split()
    eventually(lambda: all(map(has_ended, pids)))


def test_a_process_that_has_left_the_group_delays_no_reply(ask_hasty: Ask, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code, _, err = ask_hasty(f"setsid sh -c 'echo $$ > {file}; exec sleep 1000' & sleep 1000")
    assert (code, "killed after" in err) == (1, True)
    os.kill(int(written(file)), signal.SIGKILL)


def test_stderr_of_a_command_goes_to_stderr(ask: Ask, shell: Program) -> None:
    assert ask("echo odd >&2; echo even") == (0, "even\n\n", "")
    shell.says("odd")


def test_a_message_without_a_reply_channel_is_handled_and_not_answered(run: Run, url: str, shell: Program) -> None:
    assert run("pub", url, "-t", "shell/a", "-m", "echo done >&2; echo lost", "-q", "1")[0] == 0
    shell.says("done")
    shell.says("the request on 'shell/a' named no reply channel: the reply is dropped")


# --- how many, and when it ends


def test_one_command_runs_at_a_time_unless_told_otherwise(m: Messaging, url: str, topic: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    command = f"mkdir {lock} && sleep 0.02 && rmdir {lock}"
    with responder(url, "-t", f"{topic}/+", "-t", topic, "--exec", command, "-C", "4"):
        # of two independent subscriptions
        requests = [m.request(channel, qos=1) for channel in (f"{topic}/a", topic) * 2]
        assert [request.exception(PATIENCE) for request in requests] == [None] * 4


def test_concurrency_commands_run_at_the_same_time(m: Messaging, url: str, topic: str, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    # one waits for the other
    command = f'if [ "$(cat)" = in ]; then echo met > {pipe}; else cat {pipe}; fi'
    with responder(url, "-t", topic, "--exec", command, "--concurrency", "2", "--count", "2") as reply:
        reading, writing = m.request(topic, b"out"), m.request(topic, b"in")
        assert reading.result(PATIENCE).payload == b"met\n"
        assert writing.result(PATIENCE).payload == b""
        assert reply.ended() == 0


@pytest.mark.parametrize("kind", [[], ["--lines"]], ids=["whole", "lines"])
def test_requests_beyond_the_count_are_refused(
    m: Messaging, url: str, topic: str, tmp_path: Path, kind: list[str]
) -> None:
    """The commands wait until the broker has delivered all requests: one that comes after the end has no answer."""
    go = tmp_path / "go"
    command = f"until test -e {go}; do sleep 0.05; done; echo yes"
    with (
        responder(url, "-t", topic, "--exec", command, "-C", "2", "-q", "0", *kind) as reply,
        m.subscribe(topic, qos=0) as delivered,
    ):
        delivered.ready.result(PATIENCE)
        requests = [m.request(topic, qos=0) for _ in range(4)]
        for _ in requests:
            delivered.receive(PATIENCE)
        go.touch()
        started = time.monotonic()
        assert reply.ended() == 0
        assert time.monotonic() - started < 3
        assert [request.result(PATIENCE).payload.strip() for request in requests[:2]] == [b"yes"] * 2
        for request in requests[2:]:
            assert isinstance(request.exception(PATIENCE), messaging.ReplyError)


@pytest.mark.parametrize(
    ("number", "kind", "elsewhere"),
    [(signal.SIGINT, [], False), (signal.SIGTERM, ["--lines"], True)],
    ids=["main_thread-whole", "another_thread-lines"],
)
def test_a_signal_ends_reply_and_kills_running_commands(
    m: Messaging, url: str, topic: str, tmp_path: Path, number: signal.Signals, kind: list[str], elsewhere: bool
) -> None:
    file = tmp_path / "pid"
    command = f"sleep 1000 & echo $$ $! > {file}; wait"
    with responder(url, "-t", topic, "--exec", command, *kind) as reply:
        request = m.request(topic)
        pids = written(file).split()
        reply.signal(number, elsewhere=elsewhere)
        assert reply.ended() == 130
        error = request.exception(PATIENCE)
    assert isinstance(error, messaging.ReplyError)
    assert str(error) == "CommandFailedError: the responder ends"
    eventually(lambda: all(map(has_ended, pids)))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["main_thread", "another_thread"])
@pytest.mark.parametrize("many", [[], ["--many"]], ids=["one", "many"])
def test_an_interrupt_cancels_a_request(m: Messaging, url: str, topic: str, many: list[str], elsewhere: bool) -> None:
    with m.subscribe(topic) as stream, Program("request", url, "-t", topic, "-m", "x", *many) as request:
        stream.receive(PATIENCE)
        request.signal(signal.SIGINT, elsewhere=elsewhere)
        assert request.ended() == 130
        assert request.err.rest() + request.out.rest() == b""


# --- what goes wrong with a request


def test_a_fault_is_one_line_of_kind_and_text(run: Run, url: str, m: Messaging, topic: str) -> None:
    def handler() -> None:
        raise ValueError("no such\norder: mqtt://joe:hunter2@host")

    m.reply(topic, handler).ready.result(PATIENCE)
    for many in ([], ["--many"]):
        code, out, err = run("request", url, "-t", topic, "-n", *many, "--quiet")
        assert (code, out) == (1, "")
        assert err.splitlines()[-1] == "messaging: error: ValueError: no such order: mqtt://***@host"


@table("many", [[], ["--many"]])
def test_no_reply_before_the_deadline_has_its_exit_code(
    run: Run, url: str, m: Messaging, topic: str, many: list[str]
) -> None:
    with m.subscribe(topic):
        for deadline in (["-W", "0.5"], ["--option", "timeout=0.5"]):
            code, out, err = run("request", url, "-t", topic, "-m", "x", *deadline, *many)
            assert (code, out) == (3, "")
            assert err.startswith(f"messaging: error: request to '{topic}': no reply ")


def test_a_timeout_between_replies_keeps_the_written_ones(ask_many: Ask) -> None:
    code, out, err = ask_many("echo $$; sleep 1000", "--many", "-W", "0.3")
    assert code == 3
    assert err.count("\n") == 1
    eventually(lambda: has_ended(out.strip()))


@table("many", [[], ["--many"]])
def test_a_request_without_a_responder_is_a_failure(run: Run, url: str, topic: str, many: list[str]) -> None:
    code, out, err = run("request", url, "-t", topic, "-m", "x", "-q", "1", *many)
    assert (code, out) == (1, "")
    assert f"'{topic}'" in err


def test_a_lost_connection_is_a_failure(own: Mosquitto, topic: str) -> None:
    with (
        messaging.connect(own.url) as m,
        m.subscribe(topic) as stream,
        # with QoS 0 a request may not be known to have been sent, and waits for the next connection
        Program("request", own.url, "-t", topic, "-n", "-q", "1") as one,
        Program("request", own.url, "-t", topic, "-n", "-q", "1", "--many") as many,
    ):
        for _ in (one, many):
            stream.receive(PATIENCE)
        own.kill()
        for each in (one, many):
            assert each.ended() == 1
            assert b"the connection was lost before" in each.err.rest()


def test_requests_are_refused_where_the_protocol_has_none(run: Run, url: str, topic: str) -> None:
    old = f"{url}?version=3.1.1"
    for command in (("request", old, "-t", topic, "-n"), ("reply", old, "-t", topic, "--exec", "true")):
        code, out, err = run(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "does not support 'replyTo'" in err
    assert run("request", url, "-t", topic, "-n", "--routing-key", "k")[0] == 2


# --- RabbitMQ


def test_requests_stay_in_their_queue_until_a_responder_serves_them(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    url = rabbitmq.url
    code, _, err = run("request", url, "-t", topic, "-n")
    assert code == 1, "there is no responder"
    assert err.count("\n") == 1
    arguments = [url, "-t", topic, "--queue", topic.replace("/", "-"), "--exec", "cat"]
    # two at a time, so the first responder receives one too many and requeues it
    with responder(*arguments, "-C", "3", "--concurrency", "2") as first, messaging.connect(url) as m:
        requests = [m.request(topic, str(number)) for number in range(5)]
        assert first.ended() == 0
        assert [request.result(PATIENCE).payload for request in requests[:3]] == [b"0", b"1", b"2"]
        with responder(*arguments, "--count", "2") as second:
            assert second.ended() == 0
        assert [request.result(PATIENCE).payload for request in requests[3:]] == [b"3", b"4"]
