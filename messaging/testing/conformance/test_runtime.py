"""What an instance tells about itself, and what it never tells (RFC 7)."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from urllib.parse import urlsplit

import pytest

import messaging
from messaging import DuplicateNameError, Features, MessageServiceRuntime, Messaging
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import publish, receive, state, subscription_to
from messaging.testing.waiting import PATIENCE, eventually


def test_subscriptions_are_listed_while_they_last(backend: Backend, m: Messaging) -> None:
    """Scenarios 98 [S], 100 [S]."""
    a, b = backend.channel("a"), backend.channel("b")
    (service,) = backend.services.find(messaging.MessageSubscription)
    with m.subscribe(a):
        with m.subscribe(b):
            dto = m.runtime.get_runtime_dto()
            assert sorted(each.channel.name for each in dto.subscriptions) == sorted([a, b])
            assert all(each.channel.connected for each in dto.subscriptions)
            assert {each.service.id for each in dto.subscriptions} == {service.id}
            assert dto.reply_to_subscriptions == ()
        assert subscription_to(m, b) is None
        assert subscription_to(m, a) is not None
    assert m.runtime.get_runtime_dto().subscriptions == ()


def test_what_the_runtime_tells(backend: Backend, m: Messaging) -> None:
    """RFC 7.1, and MSG060; scenario 101 [S]: a DTO is a snapshot."""
    dto = m.runtime.get_runtime_dto()
    copy = dataclasses.asdict(dto)
    assert dto.instance_id == m.name
    assert dto.connection.state == "connected"
    assert dto.provider_name
    assert dto.protocols
    assert dto.connection_uri.startswith(urlsplit(backend.url).scheme + "://")
    (reference,) = backend.services.find(MessageServiceRuntime)
    assert dto.service.id == reference.id
    assert dto.service.properties["osgi.messaging.name"] == m.name
    m.close()
    assert state(m) == "closed"
    eventually(lambda: not backend.services.find(MessageServiceRuntime), "scenario 31 [S]: unregistered")
    assert dataclasses.asdict(dto) == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        dto.instance_id = "other"


def test_counters(backend: Backend, m: Messaging, channel: str) -> None:
    with m.subscribe(channel, **backend.reliable) as stream:
        publish(m, channel, [b"%d" % number for number in range(5)], **backend.reliable)
        assert receive(stream, 3) == [b"0", b"1", b"2"]
        eventually(lambda: stream.counters.received == 5, "everything arrived")
        dto = subscription_to(m, channel)
        assert dto is not None
        assert (dto.counters.received, dto.counters.delivered, dto.buffered) == (5, 3, 2)
        if Features.ACKNOWLEDGE in m.features:
            eventually(lambda: stream.counters.acknowledged == 2, "two acknowledged")
        publisher = m.runtime.get_runtime_dto().publisher
        assert (publisher.published, publisher.failed, publisher.pending) == (5, 0, 0)


def test_instances_are_told_apart_by_name(backend: Backend) -> None:
    """Scenario 102 [S]: two instances at one broker; a name is taken once, until it is given up."""
    name = backend.queue()
    m, other = backend.connect(name=name), backend.connect()
    assert m.runtime.get_runtime_dto().connection_uri == other.runtime.get_runtime_dto().connection_uri
    assert m.runtime.get_runtime_dto().instance_id == name != other.name
    with pytest.raises(DuplicateNameError, match=name):
        backend.connect(name=name)
    assert m.publish(backend.channel(), b"x").result(PATIENCE) is None
    m.close()
    again = eventually(lambda: _connect(backend, name), "the name is free")
    assert again is not None
    assert again.name == name


def _connect(backend: Backend, name: str) -> messaging.Messaging | None:
    try:
        return backend.connect(name=name)
    except DuplicateNameError:
        return None


def test_a_password_is_never_shown(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 103 [I]: not in a DTO, a repr, a log line or an error, whether the broker takes it or not."""
    secret = "pa55-0f-n0b0dy"
    parts = urlsplit(backend.url)
    url = parts._replace(netloc=f"guest:{secret}@{parts.netloc.rpartition('@')[2]}").geturl()
    caplog.set_level(logging.DEBUG)
    try:
        m = backend.connect(url, name=backend.queue())
    except messaging.MessagingError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    else:
        dto = m.runtime.get_runtime_dto()
        assert "guest:***@" in dto.connection_uri
        with m.subscribe(backend.channel()) as stream:
            shown = f"{m!r} {m.publisher!r} {stream!r} {dto!r} {dataclasses.asdict(dto)}"
    assert secret not in shown
    assert secret not in caplog.text
