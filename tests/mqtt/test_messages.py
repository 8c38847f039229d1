"""Publishing and subscribing against mosquitto."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import Any

import pytest

from messaging.errors import InvalidChannelError
from messaging.model import envelope
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import eventually_async, within
from messaging_adapters.mqtt import packets
from tests.mqtt.conftest import both_versions
from tests.mqtt.harness import Sink, connected, settled
from tests.mqtt.peer import farewell, session, subscribed

pytestmark = pytest.mark.usefixtures("needs_mosquitto")


async def test_qos_0_is_confirmed_once_the_socket_has_the_bytes_and_a_stalled_broker_holds_publishers_back() -> None:
    with Mosquitto() as broker:
        async with connected(broker.url) as core:
            outs = [core.out("stalled", bytes(64 * 1024)) for _ in range(400)]
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                sending = asyncio.create_task(core.adapter.publish(outs))
                # no more is taken: what was taken is the same at two looks, a while apart
                taken, before = 0, -1
                while taken == 0 or taken > before:
                    before = taken
                    await asyncio.wait([sending], timeout=0.1)
                    taken = sum(out.settled for out in outs)
                assert not sending.done()
                assert taken < 400
                assert sum(out.was_sent for out in outs) - taken <= 256 // 64 + 2  # bounded
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            await sending
            await settled(*(out.done for out in outs))
            assert all(out.error is None for out in outs)


async def test_instances_with_and_without_an_envelope_understand_plain_payloads_of_each_other(
    mosquitto: Mosquitto,
) -> None:
    options = {"version": "3.1.1", "envelope": True}
    async with connected(mosquitto.url, **options) as core, connected(mosquitto.url, version="3.1.1") as plain:
        sink, _ = await core.subscribe("env", qos="1")
        raw, _ = await plain.subscribe("env")
        await core.publish("env", b"plain", qos="1")
        await core.publish("env", envelope.MAGIC + b"?", qos="1")
        await plain.publish("env", envelope.MAGIC + b"!", qos="1")
        await sink.count(3)
        assert sink.payloads == [b"plain", envelope.MAGIC + b"?", envelope.MAGIC + b"!"]
        assert (await raw.count(3))[0].payload == b"plain"
        core.acknowledge(*sink.arrived)


@both_versions
async def test_overlapping_filters_with_and_without_acknowledgement_are_warned_of(
    mosquitto: Mosquitto, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without identifiers the broker chooses the QoS of the one packet it sends."""
    async with connected(mosquitto.url, version=version) as core:
        await core.subscribe("warn/a/+", qos="1")
        await core.subscribe("warn/b/#", qos="0")
        assert "overlap" not in caplog.text
        await core.subscribe("warn/a/#", qos="0")
    assert ("'warn/a/#' (QoS 0) and 'warn/a/+' (QoS 1) overlap" in caplog.text) == (version == "3.1.1")


async def test_the_broker_hears_of_an_unsubscription_once_when_the_last_stream_goes() -> None:
    with Mosquitto(["log_type all"]) as broker:
        async with connected(broker.url) as core:
            first, second = [(await core.subscribe("gone"))[1] for _ in range(2)]
            await core.adapter.unsubscribe(first)
            assert "Received UNSUBSCRIBE" not in broker.log()
            await core.adapter.unsubscribe(second)
            await eventually_async(lambda: broker.log().count("Received UNSUBSCRIBE") == 1)


@both_versions
async def test_retained_messages_reach_all_streams_that_subscribe_at_once(mosquitto: Mosquitto, version: str) -> None:
    async with connected(mosquitto.url, version=version) as core:
        base = f"at-once/{version}"
        await core.publish(f"{base}/a", b"kept", qos="1", retain=True)
        results = await asyncio.gather(*(core.subscribe(f"{base}/{name}") for name in ("#", "a", "+", "#", "a")))
        for sink, _ in results:
            await sink.count(1)
        await core.publish(f"{base}/a", b"end")
        for sink, _ in results:
            await sink.count(2)
            assert sink.payloads == [b"kept", b"end"]


async def test_a_message_that_is_acknowledged_twice_is_answered_once() -> None:
    """Another answer would settle a later message with the same packet identifier."""
    async with session() as (core, _, connection):
        sink, _ = await subscribed(core, connection, qos="1")
        for number in (1, 2):
            connection.deliver("t", b"x", packet_id=number, qos=1)
            message = (await sink.count(number))[-1]
            core.acknowledge(message, message)
            core.acknowledge(message)
        for number in (1, 2):
            assert await connection.expect(packets.PUBACK) == number.to_bytes(2)
        await farewell(core, connection)


@table("qos", ["1", "2"])
@both_versions
async def test_unacknowledged_messages_hold_the_broker_back(version: str, qos: str) -> None:
    with Mosquitto(["max_inflight_messages 7"]) as broker:
        url = broker.url
        async with connected(url, version=version, receive_maximum=7) as core, connected(url) as other:
            sink, handle = await core.subscribe("held", qos=qos)
            witness, _ = await other.subscribe("held")
            for number in range(30):
                await core.publish("held", b"%d" % number, qos=qos)
            await witness.count(30)
            await sink.count(7)
            await core.publish("held/mark", b"", qos="1")  # its answer comes after what the broker sends before
            assert len(sink.arrived) == 7
            for number in (3, 0, 1, 2, *range(4, 16)):  # any order
                core.acknowledge(sink.arrived[number], sink.arrived[number])
                await sink.count(number + 2)
            assert len(handle.unsettled) == len(sink.arrived) - 16
            assert not core.adapter.is_stale(sink.arrived[-1].token)
            await core.adapter.unsubscribe(handle)
            # no stream is left to take them: they are settled, and their slots are free again
            assert core.adapter.is_stale(sink.arrived[-1].token)
            core.acknowledge(*sink.arrived)
            again, _ = await core.subscribe("held/2", qos=qos)
            for number in range(7):
                await core.publish("held/2", b"%d" % number, qos=qos)
            await again.count(7)
            assert not core.losses


async def test_a_message_for_several_streams_is_acknowledged_when_all_have(mosquitto: Mosquitto) -> None:
    async with connected(mosquitto.url, receive_maximum=1) as core:
        one, _ = await core.subscribe("copies", qos="1")
        two, two_handle = await core.subscribe("copies", qos="1")
        for payload in (b"1", b"2", b"3"):
            await core.publish("copies", payload, qos="1")
        await two.count(1)
        core.acknowledge(*one.arrived)
        await core.publish("copies/mark", b"", qos="1")  # what it answers comes after the acknowledgement
        assert one.payloads == two.payloads == [b"1"]
        core.acknowledge(*two.arrived)
        await two.count(2)
        core.acknowledge(one.arrived[1])
        await core.adapter.unsubscribe(two_handle)
        await one.count(3)
        assert two.payloads == [b"1", b"2"]


@table("channel", ["$SYS/x", "$SYS", "$share/q/x", "$sharex"])
@both_versions
async def test_channels_that_brokers_keep_for_themselves_are_refused(
    mosquitto: Mosquitto, version: str, channel: str
) -> None:
    async with connected(mosquitto.url, version=version) as core:
        with pytest.raises(InvalidChannelError, match=re.escape(repr(channel))):
            core.out(channel)
        with pytest.raises(InvalidChannelError, match=re.escape(repr(channel))):
            core.spec("x", dead_letter_channel=channel)
        await core.publish("$other/x", b"", qos="1")
        await core.subscribe("$SYS/#")  # to be read they are
        assert not core.losses


async def test_a_filter_must_fit_with_its_queue(mosquitto: Mosquitto) -> None:
    async with connected(mosquitto.url) as core:
        core.spec("x" * 65_535)
        with pytest.raises(InvalidChannelError):
            core.spec("x" * 65_535, queue="q")


@both_versions
async def test_a_round_trip_takes_no_nagle_delay(mosquitto: Mosquitto, version: str) -> None:
    async with connected(mosquitto.url, version=version) as core:
        arrived = asyncio.Event()

        class Echo(Sink):
            def deliver(self, batch: Any) -> None:
                arrived.set()

        await core.subscribe("rtt", Echo(), qos="1")
        took = []
        for _ in range(40):
            arrived.clear()
            start = time.perf_counter()
            await core.publish("rtt", b"x", qos="0")
            await within(arrived.wait())
            took.append(time.perf_counter() - start)
        assert min(took) < 0.02  # with Nagle's algorithm it is 0.04 each time


async def test_a_failing_sink_does_not_cost_other_streams_their_messages(
    mosquitto: Mosquitto, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Sink):
        def deliver(self, batch: Any) -> None:
            raise RuntimeError("no")

    async with connected(mosquitto.url) as core:
        await core.subscribe("broken", Broken())
        good, _ = await core.subscribe("broken")
        await core.publish("broken", b"x")
        await good.count(1)
        assert not core.losses
    assert "RuntimeError" in caplog.text


async def test_messages_on_their_way_to_an_ended_subscription_are_not_for_the_next_one() -> None:
    """Scenario 30: without identifiers (all of 3.1.1) only the answer to UNSUBSCRIBE tells the two apart."""
    async with session(b"\x29\x00") as (core, _, connection):
        first, handle = await subscribed(core, connection)
        ending = asyncio.create_task(core.adapter.unsubscribe(handle))
        unsubscribe = await connection.expect(0xA0)
        second = Sink()
        subscribing = asyncio.create_task(core.subscribe("t", second))
        connection.deliver("t", b"late")
        connection.send(0xB0, unsubscribe[:2] + b"\0\0")
        await connection.suback()
        await ending
        await subscribing
        assert first.payloads == []
        connection.deliver("t", b"new")
        await second.count(1)
        assert second.payloads == [b"new"]
