"""Warnings of the check, and settings that come from no file; errors are in ``test_broken_configurations``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ArgumentError
from messaging.gateway import GatewaySettings, Severity, check, read
from messaging.testing.tables import table


def settings(tmp_path: Path, **changes: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "name": "gw",
            "data": str(tmp_path / "data"),
            "instances": {"a": {"url": "mqtt://a"}, "b": {"url": "amqp://b"}},
            "routes": {"r": route()},
            **changes,
        }
    )


def route(**changes: Any) -> dict[str, Any]:
    return {
        "from": {"instance": "a", "channel": "in/{x}"},
        "to": {"instance": "b", "channel": "out/{x}"},
        "buffer": {"full": "block"},
        **changes,
    }


def warnings(found: GatewaySettings) -> list[tuple[str, str]]:
    problems = check(found)
    assert not [each for each in problems if each.severity is Severity.ERROR], problems
    return [(each.key, each.text) for each in problems]


def test_right_settings_have_no_problems(tmp_path: Path) -> None:
    assert check(settings(tmp_path)) == []


@table("value", [None, {}, "gateway.toml"])
def test_only_settings_are_checked(value: object) -> None:
    with pytest.raises(ArgumentError, match="settings must be a GatewaySettings"):
        check(value)  # type: ignore[arg-type]


@table(
    "changes, key, text",
    [
        ({"routes": {}}, "", "nothing to do"),
        ({"instances": {"a": {"url": "mqtt://a"}, "b": {"url": "amqp://b"}, "c": {"url": "memory://c"}}}, "instances.c",
         "no route, request or status uses"),
        ({"routes": {"r": route(key="{x}")}}, "routes.r.key", "no effect"),
        ({"routes": {"r": route(**{"from": {"instance": "a", "channel": "in/{x}", "qos": 0}})}},
         "routes.r.buffer.full", "QoS 0 cannot be held back"),
        ({"routes": {"r": route(
            **{"from": {"instance": "a", "channel": "in/{x}", "extensions": {"qos": "0"}}})}},
         "routes.r.buffer.full", "QoS 0 cannot be held back"),
        ({"routes": {"r": route(to={"instance": "b", "channel": "out/{x}", "extensions": {"qos": "0"}})}},
         "routes.r.to.extensions", "a loss of the connection"),
        ({"routes": {"r": route(buffer={"full": "drop_newest", "order": "newest_first"})}}, "routes.r.buffer.order",
         "drops the live messages"),
        ({"routes": {"r": route(buffer={"full": "block", "fsync": "never"})}}, "routes.r.buffer.fsync",
         "a loss of power loses messages"),
        ({"instances": {"a": {"url": "mqtt://u:p@a"}, "b": {"url": "amqp://b"}}}, "instances.a.url",
         "the file holds a password"),
        ({"instances": {"a": {"url": "mqtt://u@a", "password": "p"}, "b": {"url": "amqp://b"}}},
         "instances.a.password", "the file holds a password"),
        ({"routes": {name: route(**{"from": {"instance": "a", "channel": "in/{x}", "queue": "q"}}) for name in "rs"}},
         "routes.s.from.queue", "routes.r takes from the same queue"),
        ({"status": {"instance": "a", "channel": "in/state"}}, "status.channel", "takes the messages of this channel"),
    ],
)  # fmt: skip
def test_what_may_be_meant_is_a_warning(tmp_path: Path, changes: dict[str, Any], key: str, text: str) -> None:
    found = warnings(settings(tmp_path, **changes))
    assert len(found) == 1, found
    assert found[0][0] == key
    assert text in found[0][1]


@table(
    "instances, key, text",
    [
        ({"a": {"url": "memory://a", "name": "x"}, "b": {"url": "memory://b?name=x"}}, "instances.b.url",
         "have the same name"),
        ({"a": {"url": "mqtt://h?client_id=x"}, "b": {"url": "mqtt://h", "client_id": "x"}}, "instances.b.client_id",
         "have the same client_id"),
        ({"a": {"url": "mqtt://h"}, "b": {"url": "mqtt://h", "client_id": "gw-a"}}, "instances.b.client_id",
         "'a' and 'b' have the same client_id"),
        ({"a": {"url": "mqtt://h?client_id=gw-b"}, "b": {"url": "mqtts://h"}}, "instances.a.url",
         "'b' and 'a' have the same client_id"),
        ({"a": {"url": "mqtt://h?name=x"}, "b": {"url": "mqtt://h", "client_id": "x"}}, "instances.b.client_id",
         "'a' and 'b' have the same client_id"),
        ({"a": {"url": "memory://a"}, "b": {"url": "mqtt://u@b", "credential": "c", "password": "p"}},
         "instances.b.password", "'password' and option 'credential' exclude each other"),
        ({"a": {"url": "memory://a"}, "b": {"url": "mqtts://b", "capath": "/nowhere"}}, "instances.b.capath",
         "cannot read the folder /nowhere"),
    ],
)  # fmt: skip
def test_instances_that_cannot_run_beside_each_other_are_errors(
    tmp_path: Path, instances: dict[str, Any], key: str, text: str
) -> None:
    (found,) = check(settings(tmp_path, instances=instances, routes={}, requests={}, status={"instance": "a"}))[:1]
    assert (found.key, found.severity) == (key, Severity.ERROR)
    assert text in found.text


def test_each_argument_that_is_no_setting_is_reported(tmp_path: Path) -> None:
    given = {"birth": {}, "interceptors": [], "will": {}, "services": "x"}
    instances = {"a": {"url": "memory://a", **given}, "b": {"url": "memory://b"}}
    found = [each for each in check(settings(tmp_path, instances=instances)) if "is no setting" in each.text]
    assert [each.key for each in found] == [
        f"instances.a.{name}" for name in ("services", "interceptors", "will", "birth")
    ]


def test_a_secret_from_the_environment_is_no_secret_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RX_SECRET", "hunter2")
    url = "mqtts://u:{0}@h?keyfile_password={0}&certfile=c.pem"
    (tmp_path / "c.pem").touch()
    for secret, warned in (("hunter2", 1), ("${RX_SECRET}", 0), ("hunter$$2", 1)):
        file = tmp_path / "gateway.yaml"
        file.write_text(
            f"name: gw\ndata: data\ninstances: {{a: {{url: '{url.format(secret)}'}}}}\nstatus: {{instance: a}}\n"
        )
        assert sum("the file holds a" in each.text for each in read(file).problems) == warned, secret


def test_a_circle_over_several_routes_is_found(tmp_path: Path) -> None:
    routes = {
        "up": route(**{"from": {"instance": "a", "channel": "x/#"}, "to": {"instance": "b", "channel": "{channel}"}}),
        "down": route(**{"from": {"instance": "b", "channel": "x/+"}, "to": {"instance": "a", "channel": "{channel}"}}),
    }
    found = warnings(settings(tmp_path, routes=routes))
    assert [key for key, _ in found] == ["routes.up.to.channel"]
    assert "routes.up -> routes.down -> routes.up" in found[0][1]


def test_two_instances_of_one_broker_make_a_circle(tmp_path: Path) -> None:
    instances = {"a": {"url": "mqtt://HOST:1883"}, "b": {"url": "mqtt://host:1883"}}
    routes = {"r": route(to={"instance": "b", "channel": "in/{x}"})}
    assert "circle" in warnings(settings(tmp_path, instances=instances, routes=routes))[0][1]


def test_routes_there_and_back_on_other_channels_are_no_circle(tmp_path: Path) -> None:
    routes = {
        "up": route(**{"from": {"instance": "a", "channel": "up/#"}, "to": {"instance": "b", "channel": "{channel}"}}),
        "down": route(
            **{"from": {"instance": "b", "channel": "down/#"}, "to": {"instance": "a", "channel": "{channel}"}}
        ),
    }
    assert warnings(settings(tmp_path, routes=routes)) == []


@table("version, is_told", [("3.1.1", True), ("5", False)])
def test_a_source_that_does_not_tell_what_is_retained_is_warned_of(tmp_path: Path, version: str, is_told: bool) -> None:
    instances = {"a": {"url": f"mqtt://a?version={version}"}, "b": {"url": "mqtt://b"}}
    mirror = route(to={"instance": "b", "channel": "out/{x}", "retain": "keep"})
    found = warnings(settings(tmp_path, instances=instances, routes={"r": mirror}))
    assert [key for key, _ in found] == (["routes.r.to.retain"] if is_told else [])


def source(channel: str = "in/{x}", instance: str = "a", **changes: Any) -> dict[str, Any]:
    return {"instance": instance, "channel": channel, **changes}


def target(retain: str = "never") -> dict[str, Any]:
    return {"instance": "b", "channel": "out/{x}", "retain": retain}


MIRROR = route(to=target("keep"))
PLAIN = route(to=target())
UNFLAGGED = source(extensions={"retainAsPublished": False})
FLAGGED = source(extensions={"retainAsPublished": True})
NOT_LOCAL = source(extensions={"noLocal": True})


def parts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"routes": {"one": first, "two": second}}


@table(
    "changes, key, first",
    {
        "both keep": (parts(MIRROR, MIRROR), "routes.two", "routes.one"),
        "one keeps": (parts(MIRROR, PLAIN), "routes.two", "routes.one"),
        "the other keeps": (parts(route(to=target("always")), MIRROR), "routes.two", "routes.one"),
        "captures of other names": (
            parts(MIRROR, route(**{"from": source("in/{y}")}, to={"instance": "b", "channel": "out/{y}"})),
            "routes.two",
            "routes.one",
        ),
        "one queue": (
            parts(route(**{"from": source(queue="q")}), route(**{"from": source(queue="q")}, to=target("keep"))),
            "routes.two",
            "routes.one",
        ),
        "extension": (parts(route(**{"from": FLAGGED}), MIRROR), "routes.two", "routes.one"),
        "noLocal": (parts(route(**{"from": NOT_LOCAL}), PLAIN), "routes.two", "routes.one"),
        "requests": (
            {
                "routes": {"one": MIRROR},
                "requests": {"two": {"from": source(), "to": {"instance": "b", "channel": "out/{x}"}}},
            },
            "requests.two",
            "routes.one",
        ),
        "devices": (
            {"routes": {"one": MIRROR}, "devices": {"two": {"from": source(), "to": target(), "offline": "gone"}}},
            "devices.two",
            "routes.one",
        ),
        "the last of three": (
            {"routes": {"one": PLAIN, "other": PLAIN, "two": MIRROR}},
            "routes.two",
            "routes.one",
        ),
    },
)
def test_parts_of_which_the_source_refuses_one_are_an_error(
    tmp_path: Path, changes: dict[str, Any], key: str, first: str
) -> None:
    instances = {"a": {"url": "mqtt://a"}, "b": {"url": "mqtt://b"}}
    problems = check(settings(tmp_path, instances=instances, **changes))
    (error,) = [each for each in problems if each.severity is Severity.ERROR]
    assert error.key == f"{key}.from.channel"
    assert f"{first} and {key} both subscribe to 'in/+' at the instance 'a'" in error.text
    assert "another instance" in error.text


@table(
    "url, changes",
    {
        "no options": ("mqtt://a", parts(PLAIN, route(to=target("always")))),
        "keep without the option": (
            "mqtt://a",
            parts(PLAIN, route(**{"from": UNFLAGGED}, to=target("keep"))),
        ),
        "other channels": ("mqtt://a", parts(MIRROR, route(**{"from": source("in/{x}/#")}, to=target("keep")))),
        "other instances": ("mqtt://a", parts(MIRROR, route(**{"from": source(instance="c")}, to=target("keep")))),
        "one in a queue": ("mqtt://a", parts(MIRROR, route(**{"from": source(queue="q")}))),
        "other queues": (
            "mqtt://a",
            parts(route(**{"from": source(queue="q")}), route(**{"from": source(queue="p")}, to=target("keep"))),
        ),
        "one queue": ("mqtt://a", parts(*[route(**{"from": source(queue="q")}, to=target("keep"))] * 2)),
        "one is disabled": ("mqtt://a", parts(MIRROR, {**PLAIN, "enabled": False})),
        "MQTT 3.1.1": ("mqtt://a?version=3.1.1", parts(MIRROR, PLAIN)),
        "MQTT 3.1.1, both keep": ("mqtt://a?version=3.1.1", parts(MIRROR, MIRROR)),
        "AMQP": ("amqp://a", parts(MIRROR, PLAIN)),
        "memory": ("memory://a", parts(MIRROR, MIRROR)),
    },
)
def test_parts_that_share_a_source_are_no_error(tmp_path: Path, url: str, changes: dict[str, Any]) -> None:
    instances = {"a": {"url": url}, "b": {"url": "mqtt://b"}, "c": {"url": "mqtt://a"}}
    warnings(settings(tmp_path, instances=instances, **changes))
