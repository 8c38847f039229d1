"""Options: errors name the wrong option, and no secret; the page about Spark has all of them."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from messaging import MessagingError
from messaging.errors import InvalidOptionError
from messaging.testing.tables import table
from pyspark_messaging import errors
from pyspark_messaging.columns import MESSAGE
from pyspark_messaging.options import ReadOptions, WriteOptions
from pyspark_messaging.read.group import connection_settings

MQTT = {"url": "mqtt://broker", "channel": "a/#", "journalPath": "/j"}
AMQP = {**MQTT, "url": "amqp://broker"}


def read(given: dict[str, str], name: str = "messaging", **more: Any) -> ReadOptions:
    return ReadOptions.of(given, name, **more)


def refused(option: str, given: dict[str, str], name: str = "messaging", **more: Any) -> str:
    """Return the error about ``option``."""
    with pytest.raises(InvalidOptionError) as caught:
        read(given, name, **more)
    assert caught.value.option == option
    assert option in str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_absent_options_have_defaults() -> None:
    options = read(MQTT)
    assert options.channels == ("a/#",)
    assert (options.qos, options.receivers, options.prefetch, options.journal_bytes) == ("1", 1, 4096, 2**30)
    assert (options.starting, options.ending) == ("earliest", "latest")
    assert options.fail_on_data_loss
    assert options.deduplicate
    assert not options.adopt_journal
    assert not options.is_stream
    assert options.required_journal == "/j"
    assert options.required_broker.is_mqtt
    assert not read(AMQP).required_broker.is_mqtt


WRONG = [
    ("channel", ["", " ", "a//#b", "a+", "[", '["a", 1]', "[]", "a,a", "a,,b", "\0", "[" * 100_000, "$share/g/a"]),
    ("qos", ["3", "", "one", "-1", "1.0"]),
    ("group", ["", " ", "-a", "a b", "a" * 101, "a/b", "ä"]),
    ("journalPath", ["", "  "]),
    ("journalBytes", ["0", "-1", "1.5g", "many", "", "10x", "9" * 5000 + "q"]),
    ("adoptJournal", ["1", "yes", "", "tru"]),
    ("receivers", ["0", "65", "x", "", "1.0"]),
    ("prefetch", ["0", "-1", "65536000", "x"]),
    ("deduplicate", ["0", ""]),
    ("startingOffsets", ["newest", "{}", "[]", '{"0": -1}', '{"0": "1"}', '{"0": true}', '{"0"', '{"a":' * 99_999]),
    ("maxRowsPerBatch", ["0", "1e3", "", "9" * 5000]),
    ("maxBytesPerBatch", ["0", "m"]),
    ("minPartitions", ["0", "100001"]),
    ("failOnDataLoss", ["maybe"]),
    ("availableNowQuiet", ["0", "-1", "nan", "inf", "x", "1s"]),
    ("availableNowTimeout", ["0", "1e10"]),
    ("queueType", ["lazy", "Quorum"]),
    ("model", [" "]),
    ("connect_timeout", ["0", "soon", "nan"]),
    ("keepalive", ["x"]),
    ("client_id", ["\0"]),
]


@table("option, value", [(option, value) for option, values in WRONG for value in values])
def test_a_value_that_cannot_be_is_refused_by_name(option: str, value: str) -> None:
    refused(option, {**MQTT, option: value})
    if "_" not in option:
        refused(option, {key.upper(): each for key, each in {**MQTT, option: value}.items()})


def test_offsets_to_end_at_are_for_batch_reads() -> None:
    assert "stream has no end" in refused("endingOffsets", {**MQTT, "endingOffsets": "latest"})
    refused("endingOffsets", {**MQTT, "endingOffsets": "never"}, batch=True)
    assert read({"journalPath": "/j", "endingOffsets": '{"0": 3}'}, batch=True).ending == {"0": 3}


@table(
    "option, given, what",
    [
        ("url", {"channel": "a", "journalPath": "/j"}, "missing"),
        ("channel", {"url": "mqtt://b", "journalPath": "/j"}, "missing"),
        ("queue", {**MQTT, "queue": "q"}, "MQTT reads channels"),
        ("queueType", {**MQTT, "queueType": "quorum"}, "amqp://"),
        ("queueType", {**MQTT, "queueType": "stream"}, "RabbitMQ"),
        ("queue", {**AMQP, "queueType": "stream"}, "missing"),
        ("journalPath", {**AMQP, "queueType": "stream", "queue": "s"}, "needs no journal"),
        ("queue", {**AMQP, "channel": "a, b", "queue": "q"}, "1 queues for 2 channels"),
        ("qos", {**AMQP, "qos": "2"}, "AMQP has 0 and 1"),
        ("receivers", {**MQTT, "qos": "0", "receivers": "2"}, "use qos 1"),
        ("passwordFile", {**MQTT, "passwordFile": "/p", "password": "x"}, "already"),
        ("passwordFile", {**MQTT, "url": "mqtt://u:p@b", "passwordFile": "/p"}, "already"),
        ("connect_timeout", {**MQTT, "connect_timeout": "1", "connectTimeout": "2"}, "twice"),
    ],
)
def test_options_that_contradict_each_other_are_refused(option: str, given: dict[str, str], what: str) -> None:
    assert what in refused(option, given)


def test_a_journal_is_needed_unless_a_stream_is_read() -> None:
    with pytest.raises(InvalidOptionError, match="option 'journalPath' is missing"):
        _ = read({"url": "mqtt://b", "channel": "a"}).required_journal
    assert read({"url": "amqp://b", "queue": "s", "queueType": "stream"}).is_stream


@table(
    "given, near",
    [
        ("chanel", "channel"),
        ("journalpth", "journalPath"),
        ("MaxRowPerBatch", "maxRowsPerBatch"),
        ("passwrd", "password"),
        ("connecttimeot", "connect_timeout"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(given: str, near: str) -> None:
    text = refused(given.lower(), {**MQTT, given: "sEcReT"})
    assert f"did you mean {near!r}?" in text
    assert "sEcReT" not in text


def test_an_unknown_option_like_no_other_is_refused_with_all_there_are() -> None:
    text = refused("zzz", {**MQTT, "zzz": "1"})
    for name in ("channel", "journalPath", "keepalive", "url", "passwordFile"):
        assert name in text
    assert "mqtt://" in text


@table("name", ["messaging", "mqtt", "amqp"])
def test_a_path_is_no_option(name: str) -> None:
    url = {"mqtt": "mqtt://b"}.get(name, "amqp://b")
    assert "'journalPath'" in refused("path", {**MQTT, "url": url, "path": "/x"}, name)
    with pytest.raises(InvalidOptionError, match="option 'path'"):
        WriteOptions.of({"url": url, "path": "/x"}, name)


@table(
    "channels, pair",
    [
        ("a/#, a/b", "'a/#' and 'a/b'"),
        ("x, a/+/c, a/b/#", "'a/+/c' and 'a/b/#'"),
        ("#,b", "'#' and 'b'"),
        ("a/#,a", "'a/#' and 'a'"),
        ('["+", "a"]', "'+' and 'a'"),
    ],
)
@table("given", [MQTT, AMQP])
def test_channels_that_overlap_are_refused(given: dict[str, str], channels: str, pair: str) -> None:
    text = refused("channel", {**given, "channel": channels})
    assert f"{pair} overlap" in text
    assert "twice" in text


@table("channels", ["a/b, a/c", "a/+, a/b/c", "$SYS/a, #", "a, b/#"])
def test_channels_apart_from_each_other_are_read_together(channels: str) -> None:
    assert len(read({**MQTT, "channel": channels}).channels) == 2


def test_names_are_read_in_any_case_and_spaces_do_not_matter() -> None:
    options = read({"URL": "mqtt://b", "cHANNEL": " a , b ", "JOURNALPATH": "/j", "journalbytes": " 64 MB "})
    assert (options.channels, options.journal_bytes) == (("a", "b"), 2**26)
    assert read({**MQTT, "channel": '["a,b", " c"]'}).channels == ("a,b", " c")
    assert read({**MQTT, "failOnDataLoss": "FALSE", "startingOffsets": "LATEST"}).starting == "latest"
    for text, size in (("1", 1), ("1b", 1), ("2k", 2048), ("2 KB", 2048), ("1g", 2**30), ("1Gb", 2**30)):
        assert read({**MQTT, "maxBytesPerBatch": text}).max_bytes == size


# --- the broker


@table(
    "url, name, what",
    [
        ("memory://x", "messaging", "memory:// is within one process"),
        ("amqp://b", "mqtt", "format 'mqtt' reads and writes mqtt, mqtts, ws, wss, not amqp://"),
        ("mqtt://b", "amqp", "format 'amqp' reads and writes amqp, amqps, not mqtt://"),
        ("kafka://b", "messaging", "not kafka://"),
        ("broker:1883", "messaging", "no '://'"),
        ("mqtt://", "messaging", "no host"),
        ("mqtt://b:0", "messaging", "port"),
    ],
)
def test_a_url_that_is_not_for_the_format_is_refused(url: str, name: str, what: str) -> None:
    assert what in refused("url", {**MQTT, "url": url}, name)


@table("name", ["connect_timeout", "connectTimeout", "CONNECTTIMEOUT", "Connect_Timeout"])
def test_settings_of_the_adapter_are_options(name: str) -> None:
    assert read({**MQTT, name: "7"}).required_broker.keywords()["connect_timeout"] == "7"


def test_a_url_may_have_settings_too_and_unknown_ones_are_refused() -> None:
    assert read({**MQTT, "url": "mqtt://b?keepalive=9"}).required_broker.url.endswith("keepalive=9")
    assert "keepalive" in refused("keepaliv", {**MQTT, "url": "mqtt://b?keepaliv=9"})


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGING_URL", "amqp://elsewhere:1")
    assert read({"channel": "a", "journalPath": "/j"}).required_broker.address == "amqp://elsewhere:1"
    assert read(MQTT).required_broker.address == "mqtt://broker"
    several = read({**MQTT, "url": "mqtt://me:pw@a,b:1884,[::1]"})
    assert several.required_broker.address == "mqtt://a,b:1884,[::1]"


def test_a_password_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "password"
    broker = read({**MQTT, "passwordFile": str(file)}).required_broker
    for password in ("one", "two"):
        file.write_text(password + "\n")
        assert broker.keywords()["password"] == password
    file.unlink()
    with pytest.raises(InvalidOptionError, match=r"option 'passwordFile': cannot read .*FileNotFoundError") as caught:
        broker.keywords()
    assert caught.value.option == "passwordFile"


@table(
    "given",
    [
        {"url": "mqtt://me:sEcReT@b:x"},
        {"url": "mqtt://me:sEcReT@b:99999"},
        {"url": "mqtt://me:sE/cReT@b"},
        {"url": "mqtt://me:sE@cReT@b"},
        {"url": "mqtt://me:sE:cReT@b"},
        {"url": "mqtt://me:sEcReT%@b"},
        {"url": "mqtt://me:sEcReT@b#"},
        {"url": "mqtt://me:sEcReT@"},
        {"url": "memory://me:sEcReT@b"},
        {"url": "amqp://me:sEcReT@b?nosuch=1"},
        {"url": "mqtt://b?password=sEcReT&keepalive=x"},
        {"url": "mqtt://me:sEcReT@b", "passwordFile": "/x"},
        {"password": "sEcReT", "username": "me\0"},
        {"password": "sEcReT\0"},
        {"pasword": "sEcReT"},
    ],
)
def test_no_error_repeats_a_password(given: dict[str, str]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        read({**MQTT, **given}, "mqtt")
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    for part in ("sEcReT", "cReT"):
        assert part not in shown


def test_nothing_shows_a_password() -> None:
    for given in ({"url": "mqtt://me:sEcReT@b"}, {"username": "me", "password": "sEcReT"}):
        options = read({**MQTT, **given})
        for shown in (options, options.broker, options.required_broker.address):
            assert "sEcReT" not in repr(shown) + str(shown)
            assert "me" not in repr(options.required_broker.address)
        settings = connection_settings(options, "group", 0)
        assert "sEcReT" in repr((options.required_broker.url, settings))  # but it is there


def test_options_travel_between_processes() -> None:
    options = read({**MQTT, "keepalive": "9"})
    assert pickle.loads(pickle.dumps(options)) == options


def test_extensions_are_texts_or_json() -> None:
    found = read({**MQTT, "extension.bufferSize": "9", "extension.overflow": "block"}).extensions
    assert found == {"buffersize": 9, "overflow": "block"}


def test_options_of_spark_itself_are_ignored_by_a_write() -> None:
    given = {"url": "mqtt://h", "channel": "a", "checkpointLocation": "/x", "queryName": "q"}
    assert WriteOptions.of(given).channel == "a"


# --- the page about Spark

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
OPTIONS = {
    field.metadata["option"][0] for kind in (ReadOptions, WriteOptions) for field in fields(kind) if field.metadata
} | {"url", "passwordFile"}


def test_every_option_is_on_the_page() -> None:
    assert len(OPTIONS) > 20
    assert [name for name in sorted(OPTIONS | {"extension.NAME"}) if f"| `{name}`" not in PAGE] == []


def test_every_option_of_the_page_exists() -> None:
    named = {name for name in re.findall(r"^\| `([a-zA-Z]+)` \|", PAGE, re.MULTILINE) if not name.endswith("Error")}
    assert named - {field.name for field in MESSAGE} - {"availableNow", "once", "continuous"} - OPTIONS == set()


def test_every_column_and_error_is_on_the_page() -> None:
    assert [field.name for field in MESSAGE if f"`{field.name}`" not in PAGE] == []
    own = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, MessagingError) and kind.__module__ == errors.__name__
    ]
    assert [name for name in own if f"`{name}`" not in PAGE and name != "JournalError"] == []
