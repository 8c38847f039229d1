"""Waiting with deadlines, and observers that keep what they are given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

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

if TYPE_CHECKING:
    from reactivex import Observable

    from messaging.runtime import SubscriptionDTO

T = TypeVar("T")

#: seconds any wait in a test may take
PATIENCE: Final = 10.0


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


def eventually(condition: Callable[[], T], what: str = "condition") -> T:
    """Wait until ``condition()`` is true and return what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE:g} s in vain: {what}")
        time.sleep(0.005)
    return found


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
    for promise in [m.publish(channel, payload, **context) for payload in payloads]:
        promise.result(PATIENCE)


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


class Inbox:
    """Observes a stream and keeps its messages.

    Args:
        source: the stream.
        act: called with each message before it counts as received; may raise.
    """

    def __init__(self, source: Observable[Message], act: Callable[[Message], object] | None = None) -> None:
        self.messages: list[Message] = []
        self.error: Exception | None = None
        self.completed = False
        self._act = act
        self._changed = threading.Condition()
        self.disposable = source.subscribe(self._on_next, self._on_error, self._on_completed)

    def _on_next(self, message: Message) -> None:
        if self._act is not None:
            self._act(message)
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _on_completed(self) -> None:
        with self._changed:
            self.completed = True
            self._changed.notify_all()

    @property
    def payloads(self) -> list[bytes]:
        """Return the payloads of the messages so far."""
        return [message.payload for message in self.messages]

    def wait(self, count: int) -> list[bytes]:
        """Wait for ``count`` messages, and return the payloads so far."""
        self._wait(lambda: len(self.messages) >= count, f"{count} messages")
        return self.payloads

    def wait_for(self, payload: bytes) -> list[bytes]:
        """Wait for ``payload``, and return the payloads so far."""
        self._wait(lambda: payload in self.payloads, f"{payload!r}")
        return self.payloads

    def wait_error(self) -> Exception:
        """Wait for ``on_error``, and return its exception."""
        self._wait(lambda: self.error is not None, "an error")
        assert self.error is not None
        return self.error

    def wait_completed(self) -> None:
        """Wait for ``on_completed``."""
        self._wait(lambda: self.completed, "the end")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, PATIENCE):
                raise AssertionError(
                    f"waited {PATIENCE:g} s in vain for {what}; received {self.payloads[:20]}, error {self.error!r}"
                )


class Failing:
    """An observer that raises when it gets ``payload``; if given, it waits for ``may_raise`` before."""

    def __init__(self, payload: bytes, may_raise: threading.Event | None = None) -> None:
        self._payload = payload
        self._may_raise = may_raise
        self.seen: list[bytes] = []
        self.error: Exception | None = None
        self.over = threading.Event()

    def on_next(self, message: Message) -> None:
        self.seen.append(message.payload)
        if message.payload == self._payload:
            if self._may_raise is not None:
                self._may_raise.wait(PATIENCE)
            raise ValueError("this one")

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.over.set()

    def on_completed(self) -> None:
        self.over.set()


def retried(stream: MessageStream, failing: list[bytes]) -> list[bytes]:
    """Observe ``stream`` with ``retry``, and fail once at each payload of ``failing``; return the payloads seen."""
    seen: list[bytes] = []

    def fail(message: Message) -> Message:
        seen.append(message.payload)
        if message.payload in failing:
            failing.remove(message.payload)
            raise ValueError("this one")
        return message

    stream.pipe(ops.map(fail), ops.retry()).subscribe()
    return seen
