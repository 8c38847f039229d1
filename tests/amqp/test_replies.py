"""Where replies may go on AMQP: by exchange and routing key, or to a queue by its name."""

from __future__ import annotations

import asyncio
import secrets
import threading
from typing import TYPE_CHECKING, Any

import pytest

import messaging
from messaging import ReplyError
from messaging.execution import engine
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.amqp.conftest import Connect


@pytest.fixture
def token() -> str:
    return secrets.token_hex(4)


@table("way", ["exchange and routing key", "name of the queue", "unserved queue"])
def test_a_reply_never_gets_into_the_queue_of_a_handler(connect: Connect, way: str) -> None:
    """Whatever address leads there: the handler is called once, and the requester is told."""
    token = secrets.token_hex(4)
    channel, queue = f"served/{token}", f"served-queue-{token}"
    calls: list[bytes] = []

    def handler(request: messaging.Message) -> messaging.Message:
        calls.append(request.payload)
        address = {
            "exchange and routing key": ("amq.topic", f"served.{token}"),
            "name of the queue": ("amq.default", queue),
            "unserved queue": ("amq.default", f"not-{queue}"),
        }[way]
        return messaging.MessageContextBuilder().channel(*address).content(b"!").reply_to(channel).build_message()

    m = connect(timeout=PATIENCE)
    m.reply(channel, handler, queue=queue, auto_delete=True)
    options: dict[str, Any] = {} if way != "unserved queue" else {"timeout": 1.0}
    with pytest.raises(messaging.MessagingError) as caught:
        m.request(channel, b"?", **options).result(PATIENCE)
    if way == "unserved queue":
        assert isinstance(caught.value, messaging.OutcomeUnknownError)  # sent, to a queue that is not there
    else:
        assert isinstance(caught.value, ReplyError)
        assert caught.value.kind == "InvalidChannelError"
    assert calls == [b"?"]


def test_a_request_that_names_the_queue_of_a_handler_for_its_reply_gets_none_there(
    connect: Connect, token: str
) -> None:
    """By AMQP's custom a reply channel is the name of a queue: that of the handler itself is left out."""
    channel, queue = f"served/{token}", f"served-queue-{token}"
    calls: list[bytes] = []

    def handler(request: bytes) -> bytes:
        calls.append(request)
        return b"!"

    m = connect(timeout=PATIENCE)
    m.reply(channel, handler, queue=queue, auto_delete=True, concurrency=1)
    m.publish(channel, b"1", reply_to=queue, correlation_id="c").result(PATIENCE)
    assert m.request(channel, b"2").result(PATIENCE).payload == b"!"
    assert m.request(channel, b"3").result(PATIENCE).payload == b"!"
    assert calls == [b"1", b"2", b"3"]


def test_a_request_that_two_handlers_hear_by_further_bindings_is_handled_once(connect: Connect, token: str) -> None:
    """The extension ``bindings`` adds channels to a subscription: they overlap with others as well."""
    calls: list[str] = []

    def handler(name: str) -> Callable[[], str]:
        def handle() -> str:
            calls.append(name)
            return name

        return handle

    m = connect(timeout=PATIENCE)
    m.reply(f"a/{token}", handler("low"), bindings=[f"b/{token}", f"c/{token}/+"])
    m.reply(f"b/{token}", handler("high"), ranking=1)
    m.reply(f"c/+/{token}", handler("higher"), ranking=2)
    for channel, name in {f"a/{token}": "low", f"b/{token}": "high", f"c/{token}/{token}": "higher"}.items():
        calls.clear()
        for _ in range(5):
            assert m.request(channel).result(PATIENCE).value() == name
        assert calls == [name] * 5


def test_replies_to_earlier_requests_arrive_after_publishing_has_moved_to_another_channel(
    connect: Connect, token: str
) -> None:
    """Direct replies belong to the channel that the request was published on; see ``publisher``."""
    channel = f"served/{token}"
    gate = threading.Event()

    def handler(request: bytes) -> bytes:
        gate.wait(PATIENCE)
        return request

    served, m = connect(timeout=PATIENCE), connect(timeout=PATIENCE)
    served.reply(channel, handler, concurrency=20)
    channels = m._adapter._connector.link.publisher.channels  # type: ignore[attr-defined]
    requests = []
    for number in range(4):
        requests.append(m.request(channel, b"%d" % number))
        m.publish(channel + "/elsewhere", b"", qos=1).result(PATIENCE)  # confirmed, and the request before it
        asyncio.run_coroutine_threadsafe(channels.renew(), engine().loop).result(PATIENCE)
    requests.append(m.request(channel, b"4"))
    gate.set()
    assert [request.result(PATIENCE).payload for request in requests] == [b"0", b"1", b"2", b"3", b"4"]
    assert m.request(channel, b"5").result(PATIENCE).payload == b"5"
