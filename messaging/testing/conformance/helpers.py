"""What the tests of the suite share: marks, messages and their verdicts, observers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest
from reactivex import operators as ops

from messaging import (
    AcknowledgeMessageContext,
    AcknowledgeType,
    Message,
    MessageContext,
    MessageStream,
    Messaging,
)
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results

if TYPE_CHECKING:
    from messaging.runtime import SubscriptionDTO

# Functions, since pytest may import this module before ``conftest.py`` has made these marks known.


def feature(*names: str) -> pytest.MarkDecorator:
    """``@feature("retain")``: for backends that announce it; a backend that announces it without effect fails."""
    return pytest.mark.feature(*names)


def wire(test: Callable[..., None]) -> Callable[..., None]:
    """For backends with a network that can be held back."""
    marked: Callable[..., None] = pytest.mark.wire(test)
    return marked


def restart(test: Callable[..., None]) -> Callable[..., None]:
    """For backends whose broker the tests can restart; they get one of their own."""
    marked: Callable[..., None] = pytest.mark.restart(test)
    return marked


def state(m: Messaging) -> str:
    """Return the state of the connection."""
    return m.runtime.get_runtime_dto().connection.state


def online(m: Messaging) -> None:
    """Wait until the instance is connected and has its subscriptions."""

    def ready() -> bool:
        dto = m.runtime.get_runtime_dto()
        return dto.connection.state == "connected" and all(each.channel.connected for each in dto.subscriptions)

    eventually(ready, "reconnected")


def subscription_to(m: Messaging, channel: str) -> SubscriptionDTO | None:
    """Return the DTO of the only subscription to ``channel``, if there is one."""
    found = [each for each in m.runtime.get_runtime_dto().subscriptions if each.channel.name == channel]
    if len(found) > 1:
        raise AssertionError(f"{len(found)} subscriptions to {channel}")
    return found[0] if found else None


def receive(stream: MessageStream, count: int) -> list[bytes]:
    """Return the payloads of the next ``count`` messages."""
    return [stream.receive(PATIENCE).payload for _ in range(count)]


def publish(m: Messaging, channel: str, payloads: Iterable[bytes], /, **context: Any) -> None:
    """Publish, and wait until every message is accepted."""
    results(m.publish(channel, payload, **context) for payload in payloads)


def nothing_more(m: Messaging, channel: str, stream: MessageStream, /, **context: Any) -> None:
    """Fail if a message arrives on ``stream`` before one that is published now."""
    publish(m, channel, [b"sentinel"], **context)
    payload = stream.receive(PATIENCE).payload
    if payload != b"sentinel":
        raise AssertionError(f"something arrived: {payload[:80]!r}")


def acknowledgement(message: Message) -> AcknowledgeMessageContext:
    """Return the context of a received message."""
    context = message.context
    if not isinstance(context, AcknowledgeMessageContext):
        raise AssertionError(f"a received message has a {type(context).__name__}")
    return context


def ack_state(message: Message) -> AcknowledgeType:
    """Return the acknowledge state of a received message."""
    return acknowledgement(message).acknowledge_state


def direct(
    m: Messaging,
    channel: str,
    /,
    *,
    filter: Any = None,  # noqa: A002  # the RFC's word
    handle: Any = None,
    post: Any = None,
    extensions: dict[str, Any] | None = None,
) -> MessageContext:
    """Return a context that subscribes with direct acknowledgement; without callbacks, with a manual one."""
    builder = m.acknowledge_context_builder()
    if filter is not None:
        builder.filter_acknowledge(filter)
    if handle is not None:
        builder.handle_acknowledge(handle)
    if post is not None:
        builder.post_acknowledge(post)
    return builder.message_context_builder().channel(channel).extensions(extensions or {}).build_context()


def manual(m: Messaging, channel: str, /, **extensions: object) -> MessageContext:
    """Return a context that leaves acknowledging to the consumer."""
    return direct(m, channel, extensions=extensions)


class Failing(Recorder[Message]):
    """An observer that raises when it gets ``payload``; if given, it waits for ``may_raise`` before."""

    def __init__(self, payload: bytes, may_raise: threading.Event | None = None) -> None:
        super().__init__()
        self._payload = payload
        self._may_raise = may_raise

    def append(self, message: Message, /) -> None:
        super().append(message)
        if message.payload == self._payload:
            if self._may_raise is not None:
                self._may_raise.wait(PATIENCE)
            raise ValueError("this one")


def in_form(handle: Callable[[Any], object], *, is_async: bool) -> Callable[[Any], Any]:
    """Return a handler as it is, or a coroutine function that calls it in a thread."""

    @functools.wraps(handle)
    async def handle_async(message: Any) -> None:
        await asyncio.to_thread(handle, message)

    return handle_async if is_async else handle


def retried(stream: MessageStream, failing: list[bytes]) -> Recorder[bytes]:
    """Observe ``stream`` with ``retry``, and fail once at each payload of ``failing``; return the payloads seen."""
    seen: Recorder[bytes] = Recorder()

    def fail(message: Message) -> Message:
        seen.append(message.payload)
        if message.payload in failing:
            failing.remove(message.payload)
            raise ValueError("this one")
        return message

    stream.pipe(ops.map(fail), ops.retry()).subscribe()
    return seen
