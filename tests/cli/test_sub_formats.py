"""``messaging sub``: the formats and filters of ``mosquitto_sub``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import messaging
from messaging import Message, MessageContext, Messaging
from messaging.cli.formats import UnformattableError, compiled
from messaging.errors import ArgumentError
from messaging.testing.brokers import Mosquitto, RabbitMQ, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.cli.conftest import Run, refused
from tests.cli.program import subscriber

Retained = Callable[..., None]


@pytest.fixture
def retained(m: Messaging, topic: str) -> Iterator[Retained]:
    """Publish retained messages to channels below the topic, and remove them after the test."""
    names: set[str] = set()

    def retained(**texts: str) -> None:
        names.update(texts)
        for name, text in texts.items():
            m.publish(f"{topic}/{name}", text, retain=True, qos=1).result(PATIENCE)

    yield retained
    for name in names:
        m.publish(f"{topic}/{name}", b"", retain=True, qos=1).result(PATIENCE)


# --- formats


@pytest.fixture
def message() -> Message:
    extensions = {"qos": "1", "retain": True, "timeToLive": 59.7, "headers": {"a": "1", "b": ["x", "y"]}, "packetId": 7}
    return Message(b"p\xff", MessageContext("a/b", None, "text/x", None, "c-7", "back", extensions))


PLAIN = Message(b'{"x": 1}', MessageContext("a/b"))


@table(
    "text, expected",
    [
        ("%t %p", b"a/b p\xff"),
        ("%%|%C|%D|%E|%R", b"%|text/x|c-7|60|back"),
        ("%l %m %q %r", b"2 7 1 1"),
        ("%x %X", b"70ff 70FF"),
        ("%P", b"a:1 b:x b:y"),
        ("[%6t|%-6t|%2.1t|%06l|%6l|%-06l|%6x|%06x]", b"[   a/b|a/b   | a|000002|     2|2     |  70ff|0070ff]"),
        ("a\\tb\\\\c\\n\\0\\e\\a\\r\\v", b"a\tb\\c\n\0\x1b\a\r\v"),
        ("@@ grüße", "@ grüße".encode()),
        ("", b""),
    ],
)
def test_a_format_writes_the_parts_of_a_message(message: Message, text: str, expected: bytes) -> None:
    assert compiled(text)[0](message) == expected


def test_a_missing_property_is_empty() -> None:
    assert compiled("[%C%D%E%R%P] %m %q %r")[0](PLAIN) == b"[] 0 0 0"


def test_a_format_writes_the_time(message: Message) -> None:
    before = time.time_ns()
    line = compiled("%U|%I|@Y-@m-@dT@H:@M:@S|@N|@s")[0](PLAIN).decode()
    after = time.time_ns()
    unix, iso, parts, nano, seconds = line.split("|")
    assert before <= int(unix.replace(".", "")) <= after
    assert unix == f"{seconds}.{nano}"
    local = time.localtime(int(seconds))
    assert iso == time.strftime("%Y-%m-%dT%H:%M:%S%z", local)
    assert parts == time.strftime("%Y-%m-%dT%H:%M:%S", local)


def test_json_has_bytes_that_are_not_text_in_base_64(message: Message) -> None:
    found = json.loads(compiled("%j")[0](message))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d{4}", found.pop("tst"))
    assert found.pop("properties") == {
        "content-type": "text/x",
        "correlation-data": "c-7",
        "message-expiry-interval": 60,
        "response-topic": "back",
        "user-properties": {"a": "1", "b": ["x", "y"]},
    }
    assert found == {
        "topic": "a/b", "qos": 1, "retain": 1, "payloadlen": 2, "mid": 7, "payload_base64": "cP8="
    }  # fmt: skip


def test_json_as_value_keeps_the_digits_of_the_payload(message: Message) -> None:
    number = Message(b" 1.10000000000000000001 ", MessageContext("a"))
    assert compiled("%J")[0](number).endswith(b',"payload":1.10000000000000000001}')
    with pytest.raises(UnformattableError, match="its payload is not JSON"):
        compiled("%J")[0](message)


@table(
    "text, expected",
    [
        ("%k", "unknown sequence '%k'"),
        ("%S", "unknown sequence '%S'"),
        ("%5.3z", "unknown sequence '%5.3z'"),
        ("%", "incomplete sequence '%'"),
        ("%t %-5", "incomplete sequence '%-5'"),
        ("@", "incomplete sequence '@'"),
        ("@Q", "unknown sequence '@Q'"),
        ("\\", "incomplete sequence '\\\\'"),
        ("\\q", "unknown escape '\\\\q'"),
        ("%99999t", "incomplete sequence"),
    ],
)
def test_an_unknown_or_incomplete_sequence_is_an_error(run: Run, text: str, expected: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        compiled(text)
    assert expected in str(caught.value)
    assert expected in refused(run, "sub", "memory://formats", "-t", "a", "-F", text)


@table(
    "text",
    [
        "%t|%p|%q|%r|%l|%C|%D|%R|%P",
        "[%30t][%-30t][%5.5t][%05l][%-5l][%x][%X][%12C][%-12C][%3.3C]",
        "a\\tb@@%%",
        "%j",
        "%J",
    ],
)
def test_formats_agree_with_mosquitto_sub(
    run: Run, m: Messaging, url: str, topic: str, retained: Retained, text: str
) -> None:
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("mosquitto_sub is not installed")
    m.publish(  # a message of QoS 1 has a user property of its own
        f"{topic}/a", b'{"x": [1, 2.5]}', qos=0, retain=True, content_type="text/json", correlation_id="c",
        reply_to="back", headers={"k": "v"},
    )  # fmt: skip
    retained(z="the broker has what came before")
    arguments = ["-t", f"{topic}/a", "-C", "1", "-q", "1", "-F", text]
    wanted = subprocess.run(
        ["mosquitto_sub", "-p", url.rpartition(":")[2], "-V", "5", "-W", "10", *arguments],
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    ).stdout  # fmt: skip
    code, found, _ = run("sub", url, *arguments, "-W", "10")
    assert code == 0
    if text not in ("%j", "%J"):
        assert found == wanted
        return
    objects = [json.loads(found), json.loads(wanted)]
    for each in objects:
        assert re.fullmatch(r"\S{26}Z?[+-]\d{4}", each.pop("tst"))
        each.pop("mid", None)  # theirs has it always, ours when the format has %m
        each["properties"].pop("user-properties")  # theirs is an object or a list, by its version
    assert objects[0] == objects[1]


def test_a_message_without_a_form_is_skipped_with_a_warning(m: Messaging, url: str, topic: str) -> None:
    with subscriber(url, "-t", topic, "-C", "1", "-F", "%J") as sub:
        m.publish(topic, "no JSON").result(PATIENCE)
        m.publish(topic, "17").result(PATIENCE)
        assert json.loads(sub.out.rest())["payload"] == 17
        assert b"warning: message on '" + topic.encode() + b"': %J: its payload is not JSON" in sub.err.rest()


def test_a_format_may_tell_the_packet_id(m: Messaging, url: str, topic: str) -> None:
    with subscriber(url, "-t", topic, "-C", "1", "-F", "%m", "-q", "1", "-N") as sub:
        m.publish(topic, "x", qos=1).result(PATIENCE)
        assert int(sub.out.rest()) > 0


def test_a_packet_id_where_there_is_none_is_refused(run: Run) -> None:
    assert "packetId" in refused(run, "sub", "memory://formats", "-t", "a", "-F", "%m")


def test_formats_work_on_amqp(rabbitmq: RabbitMQ, topic: str) -> None:
    with subscriber(rabbitmq.url, "-t", topic, "-C", "1", "-F", "%t|%C|%P|%p") as sub:
        with messaging.connect(rabbitmq.url) as m:
            m.publish(topic, b"\xff", content_type="x/y", headers={"k": "v"}).result(PATIENCE)
        assert sub.out.rest() == f"{topic}|x/y|k:v|".encode() + b"\xff\n"


@table("other", [("--format", "%p"), ("--verbose",)])
def test_json_excludes_other_formats(run: Run, other: tuple[str, ...]) -> None:
    assert f"--json and {other[0]}" in refused(run, "sub", "memory://formats", "-t", "a", "--json", *other)


# --- filters


def seen(run: Run, url: str, *arguments: str, code: int = 0) -> list[str]:
    found, out, _ = run("sub", url, *arguments, "-W", "0.3")
    assert found == code
    return sorted(out.splitlines())


def test_filtered_channels_are_not_written_and_not_counted(m: Messaging, url: str, topic: str) -> None:
    arguments = ("-t", f"{topic}/#", "-T", f"{topic}/a/+", "-T", f"{topic}/c", "-C", "2", "-q", "1")
    with subscriber(url, *arguments) as sub:
        for name in ("a/x", "b", "c", "a", "d"):
            m.publish(f"{topic}/{name}", name, qos=1).result(PATIENCE)
        assert sub.out.rest() == b"b\na\n"
        assert sub.ended() == 0


def test_filtered_messages_are_acknowledged(run: Run, rabbitmq: RabbitMQ, topic: str) -> None:
    queue = ("--queue", topic.replace("/", "-"), "-t", f"{topic}/#")
    assert run("sub", rabbitmq.url, *queue, "-W", "0.1", "--quiet")[0] == 0  # the queue is there now
    with messaging.connect(rabbitmq.url) as m:
        for name in ("no", "yes"):
            m.publish(f"{topic}/{name}", name).result(PATIENCE)
    assert run("sub", rabbitmq.url, *queue, "-T", f"{topic}/no", "-C", "1", "-W", "20", "--quiet")[1] == "yes\n"
    assert run("sub", rabbitmq.url, *queue, "-W", "0.2", "--quiet") == (0, "", "")


def test_no_retained_writes_only_live_messages(m: Messaging, url: str, topic: str, retained: Retained) -> None:
    retained(old="old")
    with subscriber(url, "-t", f"{topic}/#", "-R", "-C", "1") as sub:
        m.publish(f"{topic}/old", "new", qos=1).result(PATIENCE)
        assert sub.out.rest() == b"new\n"


def test_retained_only_ends_at_the_first_other_message(m: Messaging, url: str, topic: str, retained: Retained) -> None:
    retained(a="1", b="2")
    with subscriber(url, "-t", f"{topic}/#", "--retained-only", "-C", "5") as sub:
        m.publish(f"{topic}/c", "live", qos=1).result(PATIENCE)
        assert sorted(sub.out.rest().split()) == [b"1", b"2"]
        assert sub.ended() == 0


def test_remove_retained_spares_filtered_channels(run: Run, url: str, topic: str, retained: Retained) -> None:
    retained(a="1", b="2", kept="3")
    code, out, err = run(
        "sub", url, "-t", f"{topic}/#", "-T", f"{topic}/kept", "--remove-retained", "--retained-only", "-W", "0.5"
    )
    assert (code, sorted(out.splitlines())) == (0, ["1", "2"])
    assert "messaging: removed 2 retained messages\n" in err
    assert seen(run, url, "-t", f"{topic}/#") == ["3"]


def test_retained_messages_of_several_patterns_are_removed(
    m: Messaging, run: Run, url: str, topic: str, retained: Retained
) -> None:
    retained(a="1", b="2", c="3")
    patterns = [word for name in "abc" for word in ("-t", f"{topic}/{name}")]
    with subscriber(url, *patterns, "-t", f"{topic}/end", "--remove-retained", "--retained-only") as sub:
        assert sorted(sub.out.until(bool) for _ in "abc") == [b"1\n", b"2\n", b"3\n"]
        m.publish(f"{topic}/end", "x", qos=1).result(PATIENCE)
        assert (sub.ended(), sub.out.rest().count(b"\n")) == (0, 3)
    assert seen(run, url, "-t", f"{topic}/#") == []


def test_remove_retained_works_without_writing_them(run: Run, url: str, topic: str, retained: Retained) -> None:
    retained(a="1")
    assert seen(run, url, "-t", f"{topic}/#", "--remove-retained", "-R") == []
    assert seen(run, url, "-t", f"{topic}/#") == []


def test_a_removal_that_the_broker_refuses_is_a_failure(run: Run, tmp_path: Path) -> None:
    require("mosquitto")
    rules = tmp_path / "acl"
    rules.write_text("topic read #\nuser writer\ntopic readwrite #\n")
    with Mosquitto([f"acl_file {rules}"]) as broker:
        with messaging.connect(broker.url.replace("//", "//writer@")) as m:
            m.publish("a", "x", retain=True, qos=1).result(PATIENCE)
        code, out, err = run("sub", broker.url, "-t", "a", "--remove-retained", "-W", "0.3", "--option", "timeout=0.5")
    assert code == 1
    assert out.startswith("x\n")
    assert "messaging: error: " in err
    assert "removed 0 retained messages" in err


@table("option", ["--retained-only", "--remove-retained"])
def test_options_about_retained_messages_need_some(run: Run, rabbitmq: RabbitMQ, option: str) -> None:
    assert "does not support 'retain'" in refused(run, "sub", rabbitmq.url, "-t", "a", option)
    found = refused(run, "sub", "memory://formats", "-t", "a", "--queue", "q", option)
    assert "does not go with --queue" in found


@table(
    "arguments, expected",
    [
        (("-R", "--retained-only"), "--no-retained and --retained-only"),
        (("-T", "a/#/b"), "'#' must be the whole of the last level"),
        (("-T", ""), "is empty"),
    ],
)
def test_wrong_filters_are_refused(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, "sub", "memory://formats", "-t", "a", *arguments)
