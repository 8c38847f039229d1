"""Requests over MQTT: what a session keeps, and reply channels of their own in 3.1.1."""

from __future__ import annotations

import pytest

from messaging import ArgumentError, UnroutableError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.mqtt.conftest import Connect


def test_a_session_keeps_no_subscription_to_replies(connect: Connect) -> None:
    """Reply channels are made up anew by each process: those of the last one would stay for ever."""
    other = connect()
    other.reply("c", lambda: b"here")
    for _ in range(3):
        m = connect(client_id="same", clean_start=False, session_expiry=3600)
        assert m.request("c", qos=1).result(PATIENCE).payload == b"here"
        own = m._requests.own
        assert own is not None
        m.close()
        with pytest.raises(UnroutableError):
            other.publish(own.reply_to, b"x", qos=1, mandatory=True).result(PATIENCE)


@table("correlation_id", ["a/b", "+", "a#", ""])
def test_without_properties_a_correlation_id_is_a_level(connect: Connect, correlation_id: str) -> None:
    m = connect(version="3.1.1", envelope=True)
    with pytest.raises(ArgumentError, match=r"level|empty"):
        m.request("c", correlation_id=correlation_id)
    assert m.runtime.get_runtime_dto().requests.pending == 0
