"""``willDelay``: the will waits for its owner to come back (MQTT 5, 3.1.3.2.2)."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from messaging import Messaging
from messaging.errors import InvalidExtensionError, UnsupportedFeatureError
from messaging.testing.brokers import Mosquitto
from messaging.testing.conformance.helpers import nothing_more, online, publish, receive
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.mqtt.conftest import Connect
from tests.mqtt.peer import accept, farewell, session

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

_numbers = itertools.count(1)
#: seconds; mosquitto looks once a second
DELAY = 2.0


@pytest.fixture
def channel() -> str:
    return f"will/delay/{next(_numbers)}"


@pytest.fixture
def watcher(mosquitto: Mosquitto, connect: Connect) -> Messaging:
    return connect()


def test_the_will_is_sent_once_its_delay_has_passed_unless_its_client_reconnects_in_time(
    mosquitto: Mosquitto, connect: Connect, watcher: Messaging, channel: str
) -> None:
    with (
        Proxy(mosquitto.host, mosquitto.port) as proxy,
        Proxy(mosquitto.host, mosquitto.port) as other_proxy,
        watcher.subscribe(channel, qos=1) as stream,
        watcher.subscribe(f"{channel}/control", qos=1) as control,
    ):
        m = connect(f"mqtt://{proxy.host}:{proxy.port}", session_expiry=100)
        m.publish(channel, b"will", last_will=True, will_delay=DELAY, qos=1).result(PATIENCE)
        online(m)
        # one that has the same delay and does not come back: once its will is there, the other's time is up as well
        other = connect(f"mqtt://{other_proxy.host}:{other_proxy.port}", session_expiry=100)
        other.publish(f"{channel}/control", b"other", last_will=True, will_delay=DELAY, qos=1).result(PATIENCE)
        online(other)
        proxy.sever()
        eventually(lambda: m.runtime.get_runtime_dto().connection.cause is not None, "the loss is noticed")
        online(m)
        other_proxy.refuse()
        assert control.receive(PATIENCE).payload == b"other"
        nothing_more(watcher, channel, stream, qos=1)
        # and it is still registered
        proxy.refuse()
        start = time.monotonic()
        assert receive(stream, 1) == [b"will"]
        assert time.monotonic() - start >= DELAY - 1


@table("delay, seconds", [(0.2, 1), (1.0, 1), (1.5, 2), (86_400.0, 86_400)])
async def test_the_delay_travels_in_whole_seconds_and_is_never_cut_short(delay: float, seconds: int) -> None:
    async with session(session_expiry=100_000) as (core, peer, connection):
        setting = asyncio.create_task(core.adapter.set_will(core.out("w", b"", last_will=True, will_delay=delay)))
        await connection.expect(0xE0)
        connection.close()
        await setting
        await core.lost()
        connection, _ = await accept(core, peer)
        assert b"\x05\x18" + seconds.to_bytes(4, "big") + b"\x00\x01w" in connection.connect
        await farewell(core, connection)


def test_a_delay_needs_a_will_a_session_and_mqtt_5(connect: Connect, channel: str) -> None:
    m = connect(session_expiry=100)
    with pytest.raises(InvalidExtensionError, match="lastWill") as refusal:
        m.publish(channel, b"", will_delay=1.0)
    assert refusal.value.key == "willDelay"
    with pytest.raises(InvalidExtensionError, match="lastWill"):
        m.publish(channel, b"", will_delay=1.0, last_will=False)
    with pytest.raises(InvalidExtensionError, match="session_expiry"):
        connect().publish(channel, b"", will_delay=1.0, last_will=True)
    with pytest.raises(UnsupportedFeatureError):
        connect(version="3.1.1").publish(channel, b"", will_delay=1.0, last_will=True)
    for nonsense in (0, -1.0, "1", True, 2e9):
        with pytest.raises(InvalidExtensionError, match="seconds"):
            m.publish(channel, b"", will_delay=nonsense, last_will=True)
    with pytest.raises(InvalidExtensionError, match="for publishing"):
        m.subscribe(channel, will_delay=1.0)
    # none of this has registered anything, nor cost the connection
    with m.subscribe(channel, qos=1) as stream:
        publish(m, channel, [b"fine"], qos=1)
        assert receive(stream, 1) == [b"fine"]
    assert m.runtime.get_runtime_dto().connection.cause is None
