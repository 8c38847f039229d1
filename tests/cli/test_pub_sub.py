"""``messaging pub`` and ``messaging sub`` as processes that meet at a broker."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging import Messaging
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.conftest import Run
from tests.cli.program import Program, subscriber


def published(run: Run, *arguments: str) -> str:
    """Publish successfully; return stderr."""
    code, out, err = run("pub", *arguments)
    assert (code, out) == (0, "")
    return err


# --- payloads


def test_sub_writes_the_payloads_of_pub_line_by_line(run: Run, url: str, topic: str) -> None:
    with subscriber(url, "-t", f"{topic}/#", "-C", "2") as sub:
        published(run, url, "-t", f"{topic}/a", "-m", "hello")
        with Program("pub", url, "-t", f"{topic}/b", "-m", "grüße") as pub:
            assert pub.ended() == 0
            assert pub.err.rest() + pub.out.rest() == b""
        assert sub.ended() == 0
        assert sub.out.rest() == "hello\ngrüße\n".encode()


BINARY = bytes(range(256)) * 300


def test_any_bytes_go_through_unchanged(run: Run, url: str, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(BINARY)
    with subscriber(url, "-t", topic, "-N", "-C", "2", "-q", "1") as sub:
        published(run, url, "-t", topic, "-q", "1", "-f", str(file))
        with Program("pub", url, "-t", topic, "-q", "1", "-s") as pub:
            pub.send(BINARY)
            pub.end_input()
            assert pub.ended() == 0
        assert sub.out.rest() == BINARY + BINARY
        assert sub.ended() == 0


def test_bytes_on_the_command_line_that_are_not_utf_8_go_through_unchanged(run: Run, url: str, topic: str) -> None:
    with subscriber(url, "-t", topic, "-C", "1") as sub:
        published(run, url, "-t", topic, "-m", os.fsdecode(b"\xff\xfe ok"))
        assert sub.out.rest() == b"\xff\xfe ok\n"


def test_each_line_of_stdin_is_a_message_in_order(url: str, topic: str) -> None:
    count = 3_000
    with subscriber(url, "-t", topic, "-q", "1", "-C", str(count + 2)) as sub:
        with Program("pub", url, "-t", topic, "-q", "1", "-l") as pub:
            pub.send(b"".join(b"%d\n" % number for number in range(count)))
            pub.send(b"\nlast, without newline")
            pub.end_input()
            assert pub.ended() == 0
            assert re.fullmatch(rb"messaging: published 3002 messages in [\d.]+ s \(\d+/s\)\n", pub.err.rest())
        assert sub.out.rest().split(b"\n") == [*(b"%d" % n for n in range(count)), b"", b"last, without newline", b""]


def test_repeat_publishes_the_same_message_so_many_times(run: Run, url: str, topic: str) -> None:
    with subscriber(url, "-t", topic, "-q", "2", "-C", "500", "-N") as sub:
        err = published(run, url, "-t", topic, "-m", "x", "-q", "2", "--repeat", "500")
        assert (err.count("\n"), "published 500 messages" in err) == (1, True), "no progress bar without a terminal"
        assert sub.out.rest() == b"x" * 500


def test_rate_spaces_messages_out(run: Run) -> None:
    err = published(run, "memory://cli", "-t", "a", "-m", "x", "--repeat", "11", "--rate", "50")
    seconds = re.search(r"published 11 messages in ([\d.]+) s", err)
    assert seconds is not None
    assert 0.2 <= float(seconds[1]) < 2.0


def test_progress_goes_to_stderr(run: Run, url: str, topic: str) -> None:
    assert "300/300" in published(run, url, "-t", topic, "-m", "x", "-q", "1", "--repeat", "300", "--progress")


def test_retain_keeps_a_message_and_a_null_one_clears_it(run: Run, url: str, topic: str) -> None:
    published(run, url, "-t", topic, "-m", "kept", "-r")
    assert run("sub", url, "-t", topic, "-C", "1", "-W", "20", "--quiet") == (0, "kept\n", "")
    published(run, url, "-t", topic, "-n", "-r")
    assert run("sub", url, "-t", topic, "-C", "1", "-W", "0.3", "--quiet") == (3, "", "")


# --- what sub writes


def test_verbose_writes_the_channel_before_each_payload_of_several_patterns(run: Run, url: str, topic: str) -> None:
    with subscriber(url, "-t", f"{topic}/a", "-t", f"{topic}/b/#", "-C", "3", "-v") as sub:
        for name in ("a", "b", "c", "b/d"):
            published(run, url, "-t", f"{topic}/{name}", "-m", name)
        assert sorted(sub.out.rest().decode().splitlines()) == [f"{topic}/{n} {n}" for n in ("a", "b", "b/d")]


@pytest.fixture
def objects(url: str, topic: str, run: Run) -> Callable[..., dict[str, Any]]:
    """Publish with these arguments; return the object that ``sub --json`` writes."""

    def objects(*arguments: str, at: str = url) -> dict[str, Any]:
        with subscriber(at, "-t", topic, "--json", "-C", "1", "-q", "1") as sub:
            published(run, at, "-t", topic, "-q", "1", *arguments)
            line = sub.out.rest()
        assert line.count(b"\n") == 1
        found: dict[str, Any] = json.loads(line)
        return found

    return objects


def test_json_has_every_property_of_a_message(objects: Callable[..., dict[str, Any]], topic: str) -> None:
    found = objects(
        *("-m", '{"x": [1, 2.5]}', "--content-type", "application/json", "--correlation-id", "c-7"),
        *("--reply-to", "answers/c", "-D", "colour=blue", "-D", "size=a=b", "-x", "timeToLive=60"),
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", found.pop("received"))
    extensions = found.pop("extensions")
    assert found == {
        "channel": topic,
        "content_type": "application/json",
        "correlation_id": "c-7",
        "reply_to": "answers/c",
        "payload": '{"x": [1, 2.5]}',
        "value": {"x": [1, 2.5]},
    }
    assert extensions["headers"] == {"colour": "blue", "size": "a=b"}
    assert extensions["qos"] == "1"
    assert 0 < extensions["timeToLive"] <= 60


def test_json_has_payload_and_value_in_a_form_that_fits(run: Run, url: str, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"\x00\xff\n")
    strange = tmp_path / "strange"
    strange.write_bytes(b"\xa1\xd9\x01\x02\x81\x01\x02")  # {{1}: 2}, a set as a key
    cases: list[tuple[list[str], Any]] = [
        (["-m", '{"a": null}'], {"a": None}),
        (["-m", "17"], 17),
        (["-m", "hello"], None),
        (["-m", "17", "--content-type", "text/plain"], None),
        (["-m", "{", "--content-type", "application/json"], None),
        (["-m", "[" * 100_000], None),
        (["-m", "x", "--content-type", "application/nonesuch"], None),
        (["-n"], None),
        (["-f", str(strange), "--content-type", "application/cbor"], None),
        (["-f", str(file)], None),
        (["-m", '{"a": 1}', "--content-type", "application/json", "--encoding", "gzip"], {"a": 1}),
    ]
    with subscriber(url, "-t", topic, "--json", "-C", str(len(cases)), "-q", "1") as sub:
        for arguments, _ in cases:
            published(run, url, "-t", topic, "-q", "1", *arguments)
        found = [json.loads(line) for line in sub.out.rest().splitlines()]
    assert [each.get("value") for each in found] == [value for _, value in cases]
    assert [each["payload"] for each in found[1:3]] == ["17", "hello"]
    *_, binary, compressed = found
    assert base64.b64decode(binary["payload_base64"]) == b"\x00\xff\n"
    assert "payload" not in binary
    assert base64.b64decode(compressed["payload_base64"])[:2] == b"\x1f\x8b"
    assert compressed["content_encoding"] == "gzip"


def test_mqtt_3_has_json_values_without_content_types(objects: Callable[..., dict[str, Any]], url: str) -> None:
    found = objects("-m", '{"a": 1}', at=f"{url}?version=3.1.1")
    assert found["value"] == {"a": 1}
    assert "content_type" not in found


def test_a_property_that_the_protocol_lacks_is_refused(run: Run, url: str, topic: str) -> None:
    code, out, err = run("pub", f"{url}?version=3.1.1", "-t", topic, "-m", "x", "-D", "a=b")
    assert (code, out) == (2, "")
    assert "does not support 'headers'" in err


# --- how it ends


def test_a_timeout_before_the_count_is_reached_has_an_exit_code_of_its_own(run: Run, url: str, topic: str) -> None:
    published(run, url, "-t", topic, "-m", "only one", "-q", "1", "-r")  # there with the subscription
    with subscriber(url, "-t", topic, "-C", "2", "-W", "1") as sub:
        assert sub.ended() == 3
        assert sub.out.rest() == b"only one\n"
        assert sub.err.rest().endswith(b"messaging: warning: timeout: 1 of 2 messages within 1 s\n")


@pytest.mark.parametrize(("number", "elsewhere"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_ends_sub_properly(run: Run, url: str, topic: str, number: signal.Signals, elsewhere: bool) -> None:
    with subscriber(url, "-t", topic) as sub:
        published(run, url, "-t", topic, "-m", "x")
        assert sub.out.until(bool) == b"x\n"
        sub.signal(number, elsewhere=elsewhere)
        assert sub.ended() == 130
        assert sub.out.rest() == b"x\n"
        assert sub.err.rest().count(b"\n") == 1  # that it had subscribed


def test_an_interrupted_pub_loses_nothing_that_was_accepted(url: str, topic: str) -> None:
    with subscriber(url, "-t", topic, "-q", "1") as sub, Program("pub", url, "-t", topic, "-q", "1", "-l") as pub:
        pub.send(b"".join(b"%d\n" % number for number in range(500)))
        sub.out.until(lambda line: line == b"499\n")  # all were read, and stdin stays open
        pub.signal(signal.SIGINT)
        assert pub.ended() == 130
        assert b"published 500 messages" in pub.err.rest()


@pytest.mark.parametrize("another", [True, False], ids=["at_the_next_message", "without_another_message"])
def test_sub_ends_quietly_when_its_reader_does(run: Run, url: str, topic: str, another: bool) -> None:
    with subscriber(url, "-t", topic) as sub:
        published(run, url, "-t", topic, "-m", "first")
        assert sub.process.stdout is not None
        assert sub.process.stdout.readline() == b"first\n"
        sub.process.stdout.close()
        if another:
            published(run, url, "-t", topic, "-m", "second")
        assert sub.ended() == 0
        assert sub.err.rest().count(b"\n") == 1  # that it had subscribed


def test_a_full_disk_is_an_error(run: Run, url: str, topic: str) -> None:
    with Path("/dev/full").open("wb") as full, subscriber(url, "-t", topic, stdout=full) as sub:
        published(run, url, "-t", topic, "-m", "x")
        assert sub.ended() == 1
        assert sub.err.rest().endswith(b"messaging: error: No space left on device\n")


def test_messages_that_were_not_written_are_redelivered_after_a_kill(m: Messaging, url: str, topic: str) -> None:
    # far more than a pipe without a reader holds, so that sub blocks in the middle
    count, size = 40, 20_000
    session = ["-i", f"cli-{topic[4:]}", "--option", "clean_start=false", "--option", "session_expiry=60"]
    arguments = [url, "-t", topic, "-q", "1", *session]
    with subscriber(*arguments) as sub:
        for number in range(count):
            m.publish(topic, f"{number:02}".ljust(size, "."), qos=1).result(PATIENCE)
        sub.signal(signal.SIGKILL)
        assert sub.ended() == -signal.SIGKILL
        first = {line[:2] for line in sub.out.rest().splitlines(keepends=True) if len(line) == size + 1}
    assert len(first) < count, "sub did not block, so this shows nothing"
    with subscriber(*arguments) as again:
        m.publish(topic, "end", qos=1).result(PATIENCE)  # redelivered messages arrive before it
        again.out.until(lambda line: line == b"end\n")
        second = {line[:2] for line in again.out.seen[:-1]}
    assert first | second == {b"%02d" % number for number in range(count)}
    assert len(second) < count, "written messages are acknowledged"


# --- queues


def test_messages_stay_in_their_queue_until_acknowledged(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    arguments = ["sub", rabbitmq.url, "-t", topic, "--queue", topic.replace("/", "-"), "-C", "3", "-W", "20", "--quiet"]
    assert run(*arguments[:6], "-C", "1", "-W", "0.1", "--quiet")[0] == 3  # the queue is there now
    with messaging.connect(rabbitmq.url) as m:
        for number in range(6):
            m.publish(topic, str(number)).result(PATIENCE)
    assert run(*arguments, "--ack", "never") == (0, "0\n1\n2\n", "")
    # what came beyond the count was not written, so it is still there, too
    assert run(*arguments) == (0, "0\n1\n2\n", "")
    assert run(*arguments) == (0, "3\n4\n5\n", "")
    assert run(*arguments[:6], "-C", "1", "-W", "0.1", "--quiet") == (3, "", "")


def test_amqp_headers_and_routing_keys_go_through(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    exchange = topic.replace("/", "-")
    with subscriber(rabbitmq.url, "-t", exchange, "--routing-key", "a.#", "--json", "-C", "1") as sub:
        for key in ("b.c", "a.b.c"):
            published(
                run, rabbitmq.url, "-t", exchange, "--routing-key", key, "-m", "17", "-D", "k=v", "-x", "priority=3"
            )
        found = json.loads(sub.out.rest())
    assert (found["channel"], found["channel_extension"], found["value"]) == (exchange, "a.b.c", 17)
    assert found["extensions"]["headers"] == {"k": "v"}
    assert found["extensions"]["priority"] == 3


# --- when the broker fails


def test_partial_failure_says_how_many(topic: str) -> None:
    require("mosquitto")
    arguments = ["-t", topic, "-q", "1", "-l", "--option", "timeout=0.5"]
    with Mosquitto(["log_type all"]) as own, Program("pub", own.url, *arguments) as pub:
        pub.send(b"1\n2\n")
        eventually(lambda: own.log().count("Sending PUBACK to") == 2)
        messaging.connect(own.url).close()  # the broker writes to its log before it sends
        own.kill()
        pub.says("connection lost")
        pub.send(b"3\n4\n5\n")
        pub.end_input()
        assert pub.ended() == 1
        rest = pub.err.rest().decode()
    assert "published 2 messages" in rest
    assert rest.splitlines()[-1].startswith("messaging: error: 3 of 5 messages failed: publish to ")


def test_credentials_come_from_url_or_environment(
    run: Run, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("mosquitto")
    passwords = tmp_path / "passwords"
    passwords.write_text("")
    passwords.chmod(0o600)
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "joe", "hunter2"], check=True, timeout=PATIENCE)
    with Mosquitto(["allow_anonymous false", f"password_file {passwords}"]) as broker:
        where = f"{broker.host}:{broker.port}"
        published(run, f"mqtt://joe:hunter2@{where}", "-t", topic, "-m", "x")
        code, out, err = run("pub", f"mqtt://joe:hunter3@{where}", "-t", topic, "-m", "x", "--debug")
        assert (code, out) == (1, "")
        assert "messaging: error: " in err
        assert "hunter" not in err
        monkeypatch.setenv("MESSAGING_URL", f"mqtt://joe@{where}")
        monkeypatch.setenv("MESSAGING_PASSWORD", "hunter2")
        published(run, "-t", topic, "-m", "x")
        code, out, err = run("info")
        assert code == 0
        assert "hunter" not in out + err
