"""What a broker grants is compared with what was asked for."""

from __future__ import annotations

import asyncio
import logging

import pytest

from messaging.errors import ConnectFailedError, SubscriptionRefusedError
from messaging.testing.tables import table
from messaging_adapters.mqtt import packets
from tests.mqtt.harness import Core
from tests.mqtt.peer import Connection, Peer, accept, reconnect, session

#: Session Expiry Interval of CONNACK, four bytes
EXPIRY = b"\x11"
#: Server Keep Alive, two bytes
KEEPALIVE = b"\x13"


def seconds(identifier: bytes, value: int) -> bytes:
    return identifier + value.to_bytes(4 if identifier == EXPIRY else 2, "big")


async def test_a_session_that_the_broker_does_not_keep_is_an_error() -> None:
    async with Peer() as peer:
        core = Core(peer.url, client_id="x", session_expiry=600)
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        connection.connack(seconds(EXPIRY, 0))
        assert await connection.expect(packets.DISCONNECT) == b""  # in good order: no will is sent
        connection.close()
        with pytest.raises(ConnectFailedError, match=r"keeps no session.*600 s were asked for.*keep_session"):
            await opening
        assert core.adapter.session.connection is None


@table(
    "asked, granted, words",
    {
        "a shorter session": ({"session_expiry": 600}, seconds(EXPIRY, 60), "for 60 s, not for 600 s"),
        "a longer session": ({"session_expiry": 600}, seconds(EXPIRY, 6000), ""),
        "a session that was not asked for": ({}, seconds(EXPIRY, 60), ""),
        "a longer keepalive": ({"keepalive": 10}, seconds(KEEPALIVE, 60), "after up to 90 s"),
        "no keepalive": ({"keepalive": 10}, seconds(KEEPALIVE, 0), "never"),
        "a shorter keepalive": ({"keepalive": 60}, seconds(KEEPALIVE, 10), ""),
        "a keepalive that was not asked for": ({"keepalive": 0}, seconds(KEEPALIVE, 10), ""),
    },
)
async def test_less_than_was_asked_for_is_one_warning(
    caplog: pytest.LogCaptureFixture, asked: dict[str, int], granted: bytes, words: str
) -> None:
    async with session(granted, **asked) as (core, peer, connection):
        for _ in range(2):
            connection, _ = await reconnect(core, peer, connection, present=True, properties=granted)
        warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warnings) == bool(words)
        assert words in "".join(warnings)


@table("granted", [0, 60])
async def test_a_broker_does_not_lengthen_the_interval_of_pings(granted: int) -> None:
    async with session(seconds(KEEPALIVE, granted), keepalive=1) as (_, _, connection):
        await connection.expect(packets.PINGREQ)


async def subscribing(core: Core, connection: Connection, asked: int, granted: int) -> None:
    task = asyncio.create_task(core.subscribe("t", qos=str(asked)))
    await connection.suback(granted, v5=core.adapter.settings.v5)
    await task


@table("version", ["5", "3.1.1"])
@table(
    "asked, granted, is_refused, warnings",
    [(0, 0, False, 0), (1, 0, True, 0), (2, 0, True, 0), (2, 1, False, 1), (1, 1, False, 0), (1, 2, False, 0)],
)
async def test_a_subscription_with_acknowledgement_is_not_made_without(
    caplog: pytest.LogCaptureFixture, version: str, asked: int, granted: int, is_refused: bool, warnings: int
) -> None:
    async with Peer() as peer:
        core = Core(peer.url, version=version)
        connection, _ = await accept(core, peer)
        if is_refused:
            with pytest.raises(SubscriptionRefusedError, match=f"grants QoS 0.*QoS {asked} was asked for"):
                await subscribing(core, connection, asked, granted)
            await connection.unsuback(v5=core.adapter.settings.v5)
        else:
            for _ in range(2):
                await subscribing(core, connection, asked, granted)
        assert caplog.text.count("messages may come twice") == warnings
        connection.close()
        await core.adapter.close()


@table("present", [True, False])
async def test_a_session_that_the_broker_has_lost_is_reported(caplog: pytest.LogCaptureFixture, present: bool) -> None:
    async with session(session_expiry=600) as (core, peer, connection):
        await reconnect(core, peer, connection, present=present)
        assert ("no longer has the session" in caplog.text) is not present
