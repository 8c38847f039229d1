"""Settings of the toolkit in a file of the gateway: each does what it does there, or the page says why not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

import messaging
from messaging.gateway import GatewaySettings, Severity, check, read
from messaging.gateway.settings import PATH_OPTIONS
from messaging.instance import find_adapter
from messaging.instance.contexts import extension_key
from messaging.model import parse_url
from messaging.model.keywords import PublishKeywords, SubscribeKeywords
from messaging.model.settings import is_secret, load_settings
from messaging.testing.tables import table

PAGE: Final = (Path(__file__).parents[2] / "docs" / "gateway-settings.md").read_text()

URLS: Final = {
    "memory": "memory://x", "mqtt": "mqtt://h", "mqtts": "mqtts://h", "wss": "wss://h", "amqp": "amqp://h",
    "amqps": "amqps://h",
}  # fmt: skip
#: setting -> schemes that have it, a value, and what it needs beside it
COMMON: Final = ("mqtt",)
NETWORK: Final = ("amqp",)
TLS: Final = ("mqtts",)
SETTINGS: Final[dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]]] = {
    "name": (COMMON, "plant", {}),
    "client_id": (COMMON, "me", {}),
    "username": (COMMON, "u", {"password_file": "file"}),
    "password": (COMMON, "hunter2", {"username": "u"}),
    "password_command": (COMMON, ["cat", "token"], {"username": "u"}),
    "password_file": (COMMON, "file", {"username": "u"}),
    "timeout": (COMMON, 3.5, {}),
    "connect_timeout": (COMMON, 3.5, {}),
    "host_order": (COMMON, "shuffled", {}),
    "close_timeout": (COMMON, 1.5, {}),
    "retry_connect": (COMMON, True, {}),
    "start_offline": (COMMON, False, {}),
    "keep_session": (COMMON, False, {}),
    "reconnect_min": (COMMON, 0.5, {}),
    "reconnect_max": (COMMON, 5.5, {}),
    "outbox_size": (COMMON, 7, {}),
    "outbox_bytes": (COMMON, 7, {}),
    "outbox_path": (COMMON, "folder", {}),
    "outbox_fsync": (COMMON, "never", {"outbox_path": "folder"}),
    "outbox_disk_bytes": (COMMON, 2**20, {"outbox_path": "folder"}),
    "outbox_full": (COMMON, "reject", {"outbox_path": "folder"}),
    "inbox_path": (COMMON, "folder", {}),
    "inbox_size": (COMMON, 7, {}),
    "buffer_size": (COMMON, 7, {}),
    "prefetch": (COMMON, 7, {}),
    "overflow": (COMMON, "drop_oldest", {}),
    "max_pending_requests": (COMMON, 7, {}),
    "generate_correlation_id": (COMMON, False, {}),
    "generate_reply_channel": (COMMON, False, {}),
    "reply_channels": (COMMON, "a/#", {}),
    "max_message_size": (COMMON, 7, {}),
    "default_content_type": (COMMON, "text/plain", {}),
    "proxy": (NETWORK, "http://u:hunter2@proxy:1", {}),
    "cafile": (TLS, "file", {}),
    "capath": (TLS, "folder", {}),
    "cadata": (TLS, "-----BEGIN CERTIFICATE-----", {}),
    "certfile": (TLS, "file", {}),
    "keyfile": (TLS, "file", {"certfile": "file"}),
    "keyfile_password": (TLS, "hunter2", {"certfile": "file"}),
    "server_name": (TLS, "broker", {}),
    "check_hostname": (TLS, False, {}),
    "alpn": (TLS, "mqtt", {}),
    "ciphers": (TLS, "ECDHE+AESGCM", {}),
    "tls_min_version": (TLS, "1.3", {}),
    "allow_insecure": (TLS, True, {}),
    "version": (("mqtt",), "3.1.1", {}),
    "keepalive": (("mqtt",), 7, {}),
    "clean_start": (("mqtt",), True, {}),
    "session_expiry": (("mqtt",), 7, {}),
    "receive_maximum": (("mqtt",), 7, {}),
    "max_packet_size": (("mqtt",), 700, {}),
    "topic_alias_maximum": (("mqtt",), 7, {}),
    "max_inflight": (("mqtt",), 7, {}),
    "auth_method": (("mqtt",), "TOKEN", {"password_file": "file"}),
    "follow_redirects": (("mqtt",), False, {}),
    "ws_headers": (("wss",), {"Authorization": "hunter2"}, {}),
    "ws_query": (("wss",), "token=hunter2", {}),
    "envelope": (("mqtt",), True, {"version": "3.1.1"}),
    "heartbeat": (("amqp",), 7, {}),
    "sasl": (("amqps",), "external", {"certfile": "file"}),
    "exchange": (("amqp",), "plant", {}),
    "publish_window": (("amqp",), 7, {}),
    "blocked_timeout": (("amqp",), 7.5, {}),
    "max_priority": (("amqp", "memory"), 7, {}),
    "max_queue_length": (("memory",), 7, {}),
    "like": (("memory",), "amqp", {}),
}
#: objects of Python, and arguments of ``connect()`` that are no settings: no file can hold them
OF_PYTHON: Final[dict[str, Any]] = {
    "credentials": "x", "ssl_context": "x", "services": "x", "interceptors": [], "will": {}, "birth": {},
}  # fmt: skip
#: keywords of ``publish`` that a gateway sets itself, and those of ``subscribe``
NOT_PUBLISHED: Final = (
    "last_will", "will_delay", "message_id", "timeout", "store_and_forward", "reply_to", "correlation_id",
    "content_encoding", "channel_extension",
)  # fmt: skip
NOT_SUBSCRIBED: Final = ("auto_acknowledge", "buffer_size", "channel_extension")
#: keywords with a key of their own in a target, and in a source
TARGET_KEYS: Final[dict[str, Any]] = {
    "qos": 1, "retain": "always", "content_type": "a/b", "headers": {"a": "b"}, "time_to_live": "5 s", "priority": 7,
}  # fmt: skip
SOURCE_KEYS: Final[dict[str, Any]] = {"qos": 1, "queue": "q", "prefetch": 7, "deduplicate": True}
#: other extensions: a value; both sides have those that say how exchanges are declared
EXTENSIONS: Final[dict[str, Any]] = {
    "guaranteed_delivery": True, "guaranteed_ordering": True, "autocreate": False, "exchange_type": "topic",
    "exchange_durable": True, "exchange_auto_delete": True, "alternate_exchange": "e", "exchange_arguments": {"a": 1},
    "declare": "passive", "queue_overflow": "drop-head", "mandatory": True, "app_id": "me", "envelope": True,
    "type": "t", "overflow": "drop_oldest", "dead_letter_channel": "dead", "max_deliveries": 3, "retain_handling": 1,
    "retain_as_published": True, "no_local": True, "packet_id": True, "exchange_internal": False, "bindings": ["a.b"],
    "binding_arguments": {"a": 1}, "queue_arguments": {"a": 1}, "queue_type": "quorum", "durable": True,
    "exclusive": True, "auto_delete": True, "single_active_consumer": True, "consumer_priority": 1,
    "delivery_limit": 3, "max_priority": 3, "message_time_to_live": 5.0, "queue_expires": 5.0, "max_length": 3,
    "max_length_bytes": 3, "dead_letter_exchange": "e", "dead_letter_routing_key": "k", "max_age": 60.0,
    "stream_segment_bytes": 500, "stream_offset": "first", "redelivery_delay": 1.0, "redelivery_delay_max": 2.0,
}  # fmt: skip
#: extensions that need others beside them
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "delivery_limit": {"queue_type": "quorum"}, "max_age": {"queue_type": "stream"}, "queue_type": {},
    "stream_segment_bytes": {"queue_type": "stream"}, "stream_offset": {"queue_type": "stream"},
    "max_length": {"queue_type": "quorum"}, "redelivery_delay_max": {"redelivery_delay": 1.0},
    "dead_letter_routing_key": {"dead_letter_exchange": "e"},
}  # fmt: skip


def configuration(tmp_path: Path, instance: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "gw",
        "data": str(tmp_path / "data"),
        "instances": {"a": instance, "b": {"url": "memory://b"}},
        "routes": {
            "r": {
                "from": {"instance": "b", "channel": "in", "queue": "q"},
                "to": {"instance": "a", "channel": "out"},
                "buffer": {"full": "block"},
                **changes,
            }
        },
    }


def errors(document: dict[str, Any]) -> list[str]:
    found = check(GatewaySettings.model_validate(document))
    return [str(each) for each in found if each.severity is Severity.ERROR]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("hunter2")
    (tmp_path / "folder").mkdir()
    return tmp_path


def written(folder: Path, instance: dict[str, Any]) -> Path:
    import yaml

    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(configuration(folder, instance)))
    return file


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_setting_of_the_toolkit_is_looked_at() -> None:
    kinds = [find_adapter(scheme).settings_type for scheme in URLS]
    assert {name for kind in kinds for name in kind.model_fields} == {*SETTINGS, "credentials", "ssl_context"}
    assert {name for kind in kinds for name, each in kind.model_fields.items() if "Path" in str(each.annotation)} == {
        *PATH_OPTIONS
    }
    arguments = {each.name for each in inspect.signature(messaging.connect).parameters.values()} - {"url", "settings"}
    assert arguments <= OF_PYTHON.keys()
    assert {*PublishKeywords.__annotations__} == {*NOT_PUBLISHED, *TARGET_KEYS} | (
        {*PublishKeywords.__annotations__} & EXTENSIONS.keys()
    )
    assert {*SubscribeKeywords.__annotations__} == {*NOT_SUBSCRIBED, *SOURCE_KEYS} | (
        {*SubscribeKeywords.__annotations__} & EXTENSIONS.keys()
    )


@table("name, scheme", [(name, scheme) for name, (schemes, _, _) in SETTINGS.items() for scheme in schemes])
def test_a_setting_in_a_file_does_what_it_does_in_the_toolkit(name: str, scheme: str, folder: Path) -> None:
    _, value, beside = SETTINGS[name]
    kind = find_adapter(scheme).settings_type

    def loaded(instance: dict[str, Any]) -> Any:
        found = read(written(folder, instance))
        assert found.settings is not None, found.problems
        shown = f"{found.settings!r}{[str(each) for each in found.problems]}"
        assert "hunter2" not in shown
        is_plain = name == "ws_headers" or (is_secret(kind, name) and isinstance(value, str))
        assert any("the file holds a" in str(each) for each in found.problems) == is_plain
        made = found.settings.instances["a"]
        return getattr(load_settings(kind, parse_url(made.url), made.keywords("gw-a")), name)

    absolute = {option: str(folder / each) for option, each in beside.items() if option in PATH_OPTIONS}
    given = {**beside, **absolute, name: str(folder / value) if name in PATH_OPTIONS else value}
    url = URLS[scheme]
    wanted = getattr(load_settings(kind, parse_url(url), given), name)
    found = loaded({"url": url, **beside, name: value})
    assert found == wanted or (name == "ws_headers" and found is not None)  # headers cannot be compared
    if not kind.model_fields[name].exclude:
        option = quote(as_text(value), safe="/")
        assert loaded({"url": f"{url}?{name}={option}", **beside}) == wanted


@table("name", [*OF_PYTHON])
def test_what_only_python_can_say_is_refused_and_the_page_says_so(name: str, folder: Path) -> None:
    found = read(written(folder, {"url": "mqtts://h", name: OF_PYTHON[name]}))
    assert [each.key for each in found.problems] == [f"instances.a.{name}"]
    assert f"`{name}`" in PAGE


@table("name", sorted({*PublishKeywords.__annotations__}))
def test_a_target_takes_what_publish_takes(name: str, tmp_path: Path) -> None:
    found = {url: errors(target_of(tmp_path, url, name)) for url in ("mqtt://h", "amqp://h", "memory://x")}
    if name in NOT_PUBLISHED:
        assert all(found.values())
        assert re.search(rf"`({name}|{extension_key(name)})`", PAGE)
    else:
        assert not all(found.values()), found


def target_of(tmp_path: Path, url: str, name: str) -> dict[str, Any]:
    if name in TARGET_KEYS:
        to = {name: TARGET_KEYS[name]}
    else:
        to = {"extensions": {extension_key(name): EXTENSIONS.get(name, True)}}
    return configuration(tmp_path, {"url": url}, to={"instance": "a", "channel": "out", **to})


@table("name", sorted({*SubscribeKeywords.__annotations__}))
def test_a_source_takes_what_subscribe_takes(name: str, tmp_path: Path) -> None:
    found = {url: errors(source_of(tmp_path, url, name)) for url in ("mqtt://h", "amqp://h", "memory://x")}
    if name in NOT_SUBSCRIBED:
        assert all(found.values())
        assert re.search(rf"`({name}|{extension_key(name)})`", PAGE)
    else:
        assert not all(found.values()), found


def source_of(tmp_path: Path, url: str, name: str) -> dict[str, Any]:
    if name in SOURCE_KEYS:
        source = {name: SOURCE_KEYS[name]}
    else:
        given = {**BESIDE.get(name, {}), name: EXTENSIONS.get(name, True)}
        source = {"queue": "q", "extensions": {extension_key(each): value for each, value in given.items()}}
    document = configuration(tmp_path, {"url": url})
    document["routes"]["r"]["from"] = {"instance": "a", "channel": "in", **source}
    document["routes"]["r"]["to"] = {"instance": "b", "channel": "out"}
    return document
