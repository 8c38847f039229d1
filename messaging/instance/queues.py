"""Administration of the queues at the broker, without consuming them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from messaging.adapter import AdministersQueues
from messaging.connection import Connection
from messaging.errors import (
    ArgumentError,
    ClosedError,
    ConnectionLostError,
    DeadlineError,
    InvalidExtensionError,
)
from messaging.execution import Promise, clock, of_library
from messaging.instance.contexts import Contexts, checked
from messaging.model import CHECKS, AcknowledgeType, Features, SubscribeKeywords, boolean, integer, maker
from messaging.receiving import MessageSubscription

if TYPE_CHECKING:
    from messaging.model import ReceivedMessage

T = TypeVar("T")

#: most messages of one peek
MAX_PEEK: Final = 1000
#: stands for the channel of a queue that is not bound to one
_UNBOUND: Final = "any"


class Queues:
    """Declares, peeks at, purges and deletes queues at the broker. Thread safe; get it as ``Messaging.queues``.

    It needs the feature ``queueAdministration``. Each method checks its arguments at once and returns a promise, which
    waits for the first connection, and fails after the setting ``timeout``. A lost connection fails it at once: a
    request is never repeated.

    Every method raises:
        UnsupportedFeatureError: the instance does not announce ``queueAdministration``: MQTT has no queues.
        InvalidExtensionError: the name of the queue is malformed.
        ClosedError: the instance is closed.

    Every promise fails with:
        QueueRefusedError: the broker refused the request: it has no such queue, say. ``code`` and ``detail`` say why.
        ConnectFailedError, ConnectionLostError, DeadlineError: as they say.
    """

    def __init__(self, connection: Connection, contexts: Contexts, subscription: MessageSubscription) -> None:
        self._connection = connection
        self._contexts = contexts
        self._subscription = subscription

    def declare(self, name: str, /, *channels: str, **context: Unpack[SubscribeKeywords]) -> Promise[None]:
        """Declare a queue and bind it to ``channels``, exactly as subscribing with the same arguments does.

        A queue that exists and is equal stays as it is, with its messages. Bindings are added, never removed. Without
        channels a new queue gets no messages until a subscription binds it; on AMQP also those that are published to
        the exchange ``amq.default`` with its name as routing key.

        Args:
            name: as in the extension ``queue``.
            *channels: channel patterns.
            **context: the keywords of :meth:`Messaging.subscribe`, such as ``queue_type="quorum"``.

        Returns:
            A promise; it fails with ``QueueRefusedError`` also if the queue exists and differs.

        Raises:
            InvalidChannelError, InvalidExtensionError, UnsupportedFeatureError: as :meth:`Messaging.subscribe`.
        """
        self._check(name)
        if "queue" in context:
            raise ArgumentError("queue= is the first argument")
        specs = []
        for channel in channels or (_UNBOUND,):
            given = self._contexts.subscribing(channel, {**context, "queue": name}, "declare")
            specs.append(self._subscription.check(channel, given.extensions, given.channel_extension))
        return self._request(
            f"declaring queue {name!r}", lambda adapter: adapter.declare_queue(specs, is_bound=bool(channels))
        )

    def peek(self, name: str, limit: int = 10) -> Promise[list[ReceivedMessage[Any]]]:
        """Look at the first messages of a queue, which stay there. They cannot be acknowledged.

        The broker hands them out and takes them back. So their next delivery is marked as redelivered, and a quorum
        queue counts a delivery of each: one that has reached its delivery limit is dead-lettered, or dropped. It also
        appends them to the messages that were redelivered before, and so their order may change. Messages that a
        consumer has not settled are not seen; consumers get the others once they are taken back.

        Args:
            name: of the queue.
            limit: most messages to return, 1 to 1,000. There are fewer once their payloads exceed 64 MiB.
        """
        self._check(name)
        most = checked("limit", integer(1, MAX_PEEK), limit)

        async def peek(adapter: AdministersQueues) -> list[ReceivedMessage[Any]]:
            make = maker(self._connection.settings.default_content_type)
            found = await adapter.peek_queue(name, most)
            for each in found:
                each.state, each.settler = AcknowledgeType.UNSUPPORTED, None
            return [make(each.payload, each, None) for each in found]

        return self._request(f"peeking at queue {name!r}", peek)

    def purge(self, name: str) -> Promise[int]:
        """Remove the messages of a queue and resolve to their number; those that a consumer has are not removed."""
        self._check(name)
        return self._request(f"purging queue {name!r}", lambda adapter: adapter.purge_queue(name))

    def delete(self, name: str, *, if_empty: bool = False, if_unused: bool = False) -> Promise[int]:
        """Delete a queue with its messages, and resolve to their number. Its subscriptions end with an error.

        Args:
            name: of the queue.
            if_empty: refuse to delete a queue that has messages; quorum queues and streams do not support it.
            if_unused: refuse to delete a queue that has consumers; quorum queues do not support it.
        """
        self._check(name)
        for argument, value in (("if_empty", if_empty), ("if_unused", if_unused)):
            checked(argument, boolean, value)
        return self._request(
            f"deleting queue {name!r}",
            lambda adapter: adapter.delete_queue(name, if_empty=if_empty, if_unused=if_unused),
        )

    def _check(self, name: str) -> None:
        connection = self._connection
        if Features.QUEUE_ADMINISTRATION not in connection.adapter.capabilities.features:
            raise connection.adapter.capabilities.lacks(Features.QUEUE_ADMINISTRATION)
        check_queue(name)
        connection.refuse_closed()

    def _request(self, what: str, ask: Callable[[AdministersQueues], Coroutine[Any, Any, T]]) -> Promise[T]:
        connection = self._connection
        adapter, timeout = connection.adapter, connection.settings.timeout

        async def request() -> T:
            try:
                async with clock.timeout(timeout):
                    await connection.ready
                    if not isinstance(adapter, AdministersQueues):
                        raise adapter.capabilities.lacks(Features.QUEUE_ADMINISTRATION)
                    return await of_library(ask(adapter))
            except TimeoutError:
                raise DeadlineError(f"{adapter.name!r}: {what} took longer than {timeout:g} s") from None
            except ConnectionLostError as error:
                if connection.endings.is_closing:
                    raise ClosedError(f"{what}: the instance {adapter.name!r} was closed") from error
                raise

        return connection.engine.run(request(), what)


def check_queue(name: str) -> None:
    """Refuse a malformed name of a queue with an ``InvalidExtensionError``."""
    try:
        CHECKS[Features.EXTENSION_QUEUE](name)
    except ValueError as error:
        raise InvalidExtensionError(Features.EXTENSION_QUEUE, str(error)) from None
