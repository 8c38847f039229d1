"""What MQTT 3.1.1 lacks: the error names the setting that brings it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from messaging import Messaging
from messaging.errors import UnsupportedFeatureError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.mqtt.conftest import Connect

ENVELOPE = "set version=5, or envelope=true on both sides"

#: attempt -> the feature it needs, and the way out
CASES: dict[str, tuple[Callable[[Messaging], Any], str, str]] = {
    "headers": (lambda m: m.publish("a", b"x", headers={"k": "v"}), "headers", ENVELOPE),
    "timeToLive": (lambda m: m.publish("a", b"x", time_to_live=1.0), "timeToLive", ENVELOPE),
    "messageId": (lambda m: m.publish("a", b"x", message_id="1"), "messageId", ENVELOPE),
    "content type": (lambda m: m.publish("a", b"x", content_type="a/b"), "messageProperties", ENVELOPE),
    "correlation id": (lambda m: m.publish("a", b"x", correlation_id="1"), "messageProperties", ENVELOPE),
    "request": (lambda m: m.request("a", b"x", timeout=5), "replyTo", ENVELOPE),
    "reply": (lambda m: m.reply("a")(lambda request: request), "replyTo", ENVELOPE),
    "many": (
        lambda m: m.reply_to_many.publish_with_reply_many(m.context_builder().channel("a").build_message()),
        "replyTo",
        ENVELOPE,
    ),
    "mandatory": (lambda m: m.publish("a", b"x", mandatory=True), "mandatory", "set version=5"),
    "noLocal": (lambda m: m.subscribe("a", no_local=True), "noLocal", "set version=5"),
    "retainHandling": (lambda m: m.subscribe("a", retain_handling=1), "retainHandling", "set version=5"),
}


@table("attempt, feature, way_out", CASES)
def test_the_error_names_the_way_out(
    connect: Connect, attempt: Callable[[Messaging], Any], feature: str, way_out: str
) -> None:
    with connect(version="3.1.1") as m, pytest.raises(UnsupportedFeatureError) as caught:
        attempt(m)
    assert caught.value.feature == feature
    assert way_out in str(caught.value)


@table("case", [case for case in CASES if CASES[case][2] == ENVELOPE and case not in ("reply", "many")])
def test_the_envelope_is_a_way_out(connect: Connect, case: str) -> None:
    m = connect(version="3.1.1", envelope=True)
    if case == "request":
        m.reply("a")(lambda request: request)
    CASES[case][0](m).result(PATIENCE)


def test_a_feature_that_no_setting_brings_names_none(connect: Connect) -> None:
    m = connect(version="3.1.1")
    with pytest.raises(UnsupportedFeatureError) as caught:
        m.publish("a", b"x", priority=3)
    assert "set " not in str(caught.value)
