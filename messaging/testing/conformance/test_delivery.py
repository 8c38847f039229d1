"""How the broker treats a message: qos, retain, time-to-live, priority."""

from __future__ import annotations

import time

import pytest

from messaging import AcknowledgeType, Features, InvalidExtensionError, Messaging, UnsupportedFeatureError
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import ack_state, feature, nothing_more, publish, receive
from messaging.testing.waiting import PATIENCE, eventually

# --- qos


@feature(Features.EXTENSION_QOS)
def test_qos_levels_are_used_or_refused(backend: Backend, m: Messaging) -> None:
    """Scenarios 91 [S], 95 [S]: as text or number; a level the protocol lacks is refused both ways.

    Scenario 27 [S]: guaranteed delivery is at least QoS 1, so QoS 0 with it is an error.
    """
    if Features.EXTENSION_GUARANTEED_DELIVERY in m.features:
        for call in (m.publish, m.subscribe):
            with pytest.raises(InvalidExtensionError, match="qos"):
                call(backend.channel(), qos="0", guaranteed_delivery=True)
    levels = []
    for level in ("0", "1", "2"):
        channel = backend.channel(level)
        try:
            stream = m.subscribe(channel, qos=level)
        except UnsupportedFeatureError:
            with pytest.raises(UnsupportedFeatureError):
                m.publish(channel, b"x", qos=level)
            continue
        levels.append(level)
        with stream:
            publish(m, channel, [b"1"], qos=level)
            publish(m, channel, [b"2"], qos=int(level))
            for payload in (b"1", b"2"):
                message = stream.receive(PATIENCE)
                assert message.payload == payload
                assert message.context.extensions.get("qos", level) == level
                expected = AcknowledgeType.UNSUPPORTED if level == "0" else AcknowledgeType.RECEIVED
                assert ack_state(message) is expected
            nothing_more(m, channel, stream, qos=level)
    assert levels[:2] == ["0", "1"]


# --- retain


@feature(Features.EXTENSION_RETAIN)
def test_a_retained_message_is_there_for_later_subscribers(backend: Backend, channel: str) -> None:
    """Each of them gets it once, marked; who was there already got it unmarked."""
    m, other = backend.connect(), backend.connect()
    with m.subscribe(channel) as early:
        publish(m, channel, [b"not kept", b"kept"], retain=True)
        publish(m, channel, [b"not retained"])
        for payload in (b"not kept", b"kept", b"not retained"):
            message = early.receive(PATIENCE)
            assert message.payload == payload
            assert not message.context.extensions.get("retain")
        for instance in (m, m, other):
            with instance.subscribe(channel) as late:
                message = late.receive(PATIENCE)
                assert (message.payload, message.context.channel) == (b"kept", channel)
                assert message.context.extensions["retain"] is True
                nothing_more(m, channel, late)
                assert receive(early, 1) == [b"sentinel"]
    publish(m, channel, [b""], retain=True)


@feature(Features.EXTENSION_RETAIN)
def test_a_retained_message_keeps_its_context_until_it_is_cleared(backend: Backend, m: Messaging, channel: str) -> None:
    context = backend.full_context(m)
    publish(m, channel, [b"1"], retain=True, **context)
    with m.subscribe(channel, **backend.reliable) as stream:
        found = stream.receive(PATIENCE).context
        assert found.content_type == context.get("content_type")
        assert found.correlation_id == context.get("correlation_id")
    publish(m, channel, [b""], retain=True, **backend.reliable)
    with m.subscribe(channel, **backend.reliable) as stream:
        nothing_more(m, channel, stream, **backend.reliable)


@feature(Features.EXTENSION_RETAIN, Features.WILDCARDS)
def test_retained_messages_of_a_pattern(backend: Backend, m: Messaging) -> None:
    base = backend.channel("r")
    names = [f"{base}/a", f"{base}/b", f"{base}/c/d"]
    for name in names:
        publish(m, name, [name.encode()], retain=True)
    with m.subscribe(f"{base}/#") as everything, m.subscribe(f"{base}/+") as one_level:
        found = {message.context.channel: message.payload for message in [everything.receive(PATIENCE) for _ in names]}
        assert found == {name: name.encode() for name in names}
        assert set(receive(one_level, 2)) == {name.encode() for name in names[:2]}
        nothing_more(m, f"{base}/z", one_level)
        assert receive(everything, 1) == [b"sentinel"]
    for name in names:
        publish(m, name, [b""], retain=True)


@feature(Features.EXTENSION_RETAIN, Features.WILDCARDS)
def test_a_retained_message_is_for_the_newcomer_only(backend: Backend, m: Messaging) -> None:
    """Also where the newcomer's pattern overlaps with that of a stream which has it, or is the same."""
    base = backend.channel("r")
    publish(m, f"{base}/a", [b"kept"], retain=True)
    with m.subscribe(f"{base}/#") as first:
        assert receive(first, 1) == [b"kept"]
        for pattern in (f"{base}/a", f"{base}/+", f"{base}/#"):
            with m.subscribe(pattern) as newcomer:
                assert receive(newcomer, 1) == [b"kept"]
                nothing_more(m, f"{base}/a", newcomer)
            assert receive(first, 1) == [b"sentinel"]
    publish(m, f"{base}/a", [b""], retain=True)


@feature(Features.EXTENSION_RETAIN, Features.ROUTING_KEY)
def test_a_channel_with_a_routing_key_retains_for_itself(m: Messaging, channel: str) -> None:
    keys = ("a", "b", None)
    for key in keys:
        publish(m, channel, [str(key).encode()], channel_extension=key, retain=True)
    publish(m, channel, [b""], channel_extension="a", retain=True)
    for key in keys:
        with m.subscribe(channel, channel_extension=key) as stream:
            if key != "a":
                assert receive(stream, 1) == [str(key).encode()]
            publish(m, channel, [b"end"], channel_extension=key)
            assert receive(stream, 1) == [b"end"]


@feature(Features.EXTENSION_RETAIN, Features.EXTENSION_QUEUE)
def test_a_queue_gets_no_retained_messages(backend: Backend, m: Messaging) -> None:
    """Each consumer that joins would have the queue process them again (MQTT 5, 4.8.2)."""
    channel, queue = backend.channel(), backend.queue()
    publish(m, channel, [b"kept"], retain=True)
    with m.subscribe(channel, queue=queue) as stream:
        nothing_more(m, channel, stream)
    publish(m, channel, [b""], retain=True)


# --- time-to-live


@pytest.mark.envelope
@feature(Features.EXTENSION_TIME_TO_LIVE)
def test_a_message_in_time_is_delivered(m: Messaging, channel: str) -> None:
    """MSG230: and tells its remaining time."""
    with m.subscribe(channel) as stream:
        publish(m, channel, [b"1"], time_to_live=30.0)
        message = stream.receive(PATIENCE)
        assert message.payload == b"1"
        # a protocol may round up to its own unit
        assert 15 < message.context.extensions["timeToLive"] <= 31
        publish(m, channel, [b"2"])
        assert "timeToLive" not in stream.receive(PATIENCE).context.extensions


@pytest.mark.envelope
@feature(Features.EXTENSION_TIME_TO_LIVE, Features.EXTENSION_RETAIN)
def test_an_expired_retained_message_is_not_delivered(backend: Backend, m: Messaging) -> None:
    """MSG230."""
    lasting, mortal = backend.channel("lasting"), backend.channel("mortal")
    publish(m, lasting, [b"lasting"], retain=True)
    start = time.monotonic()
    # long enough for brokers that count in whole seconds
    publish(m, mortal, [b"mortal"], retain=True, time_to_live=2.0)

    def is_there() -> bool:
        with m.subscribe(mortal) as stream:
            publish(m, mortal, [b"sentinel"])
            first = stream.receive(PATIENCE)
            return first.payload == b"mortal"

    assert is_there()
    eventually(lambda: not is_there(), "it expires")
    assert time.monotonic() - start >= 0.9
    with m.subscribe(lasting) as stream:
        assert receive(stream, 1) == [b"lasting"]
    publish(m, lasting, [b""], retain=True)


@feature(Features.EXTENSION_TIME_TO_LIVE, Features.QUEUE_RETENTION, Features.EXTENSION_QUEUE)
def test_an_expired_message_in_a_queue_is_not_delivered(backend: Backend, m: Messaging) -> None:
    """MSG230: it leaves the queue; those without a time, and with more of it, stay."""
    channel, queue = backend.channel(), backend.queue()
    with m.subscribe(channel, queue=queue):
        pass
    for waiting in (0.25, 2.5, PATIENCE):
        publish(m, channel, [b"mortal"], time_to_live=0.2)
        published = time.monotonic()
        publish(m, channel, [b"longer"], time_to_live=60.0)
        publish(m, channel, [b"lasting"])
        eventually(lambda until=published + waiting: time.monotonic() > until, patience=2 * waiting)  # type: ignore[misc]
        with m.subscribe(channel, queue=queue) as stream:
            found = receive(stream, 2)
            is_gone = found[0] != b"mortal"
            if not is_gone:  # the timer of a busy broker is late
                found = [*found[1:], *receive(stream, 1)]
            assert found == [b"longer", b"lasting"]
            nothing_more(m, channel, stream)
        if is_gone:
            return
    pytest.fail("it is delivered however long it waits")


# --- priority


@feature(Features.EXTENSION_PRIORITY, Features.EXTENSION_PREFETCH)
def test_what_has_priority_overtakes_what_waits(backend: Backend, channel: str) -> None:
    """Within a priority the order is that of publishing; without one it is the lowest."""
    m = backend.connect(**backend.prioritising)
    with m.subscribe(channel, prefetch=1, **backend.reliable) as stream:
        publish(m, channel, [b"in hand"], **backend.reliable)
        message = stream.receive(PATIENCE)
        assert "priority" not in message.context.extensions
        waiting = [(None, b"a"), (1, b"b"), (9, b"c"), (5, b"d"), (9, b"e"), (None, b"f"), (1, b"g")]
        for priority, payload in waiting:
            more = {} if priority is None else {"priority": priority}
            publish(m, channel, [payload], **more, **backend.reliable)
        seen = [stream.receive(PATIENCE) for _ in waiting]
        assert [message.payload for message in seen] == [b"c", b"e", b"d", b"b", b"g", b"a", b"f"]
        assert [message.context.extensions.get("priority") for message in seen] == [9, 9, 5, 1, 1, None, None]
