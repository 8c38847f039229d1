"""Exchanges, queues and bindings at the broker: checked for, declared, or waited for.

An exchange or queue that exists is used as it is, whatever its type and arguments. It is checked for passively first,
so a declaration never clashes with a queue or exchange of an operator. A failed check closes the channel, so each
function opens a channel of its own, or returns the one that is open at the end.

**Absent queues** are there, and cannot be used for now: their node is down, or they have no leader. RabbitMQ refuses to
subscribe to such a queue with 404, as it does for a queue that does not exist, and tells the two apart in the text. It
cancels the consumers of a queue whose node went down with ``basic.cancel``, as it does when a queue is deleted. A queue
that exists is waited for: its node returns, or it gets another leader.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import aiormq
from aiormq import spec

from messaging.execution import Backoff, clock
from messaging_adapters.amqp.connection import AmqpWire, reply
from messaging_adapters.amqp.declarations import ExchangeSpec, QueueSpec

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractQueue


logger = logging.getLogger(__name__)

#: the exchange that every virtual host has and that cannot be deleted
TOPIC_EXCHANGE: Final = "amq.topic"
#: prefix of the names that the broker reserves: they are never declared
RESERVED: Final = "amq."
#: pause before the first further attempt, and the longest pause, seconds
_FIRST: Final = 0.1
_LONGEST: Final = 1.0
#: reply texts of RabbitMQ for a queue that exists
_ABSENT: Final = ("down or inaccessible", "due to timeout", "is stopped by supervisor")


async def ensure_exchange(wire: AmqpWire, exchange: ExchangeSpec) -> None:
    """Make sure that an exchange exists, unless ``declare`` is "none".

    Raises:
        aiormq.AMQPChannelError: it does not exist and must not be declared, or the broker refused the declaration.
        ConnectionLostError: the connection was lost.
    """
    if exchange.name in ("", TOPIC_EXCHANGE) or exchange.declare == "none":
        return
    channel = await wire.channel()
    try:
        try:
            await wire.command(channel.get_exchange(exchange.name), spec.Exchange.Declare)
        except aiormq.ChannelNotFoundEntity:
            if exchange.declare != "create" or exchange.name.startswith(RESERVED):
                raise
            channel = await wire.channel()
            declaring = channel.declare_exchange(
                exchange.name,
                exchange.kind,
                durable=exchange.durable,
                auto_delete=exchange.auto_delete,
                internal=exchange.internal,
                arguments=_plain(exchange.arguments),
            )
            await wire.command(declaring, spec.Exchange.Declare)
    finally:
        await wire.close_channel(channel)


async def ensure_queue(wire: AmqpWire, queue: QueueSpec) -> tuple[AbstractChannel, AbstractQueue]:
    """Make sure that a named queue exists, unless ``declare`` is "none".

    Returns:
        A channel that is open and unused, and the queue.

    Raises:
        aiormq.AMQPChannelError: it does not exist and must not be declared, or the broker refused the declaration.
        ConnectionLostError: the connection was lost.
    """
    channel = await wire.channel()
    name = queue.name or ""
    try:
        checking = channel.get_queue(name, ensure=queue.declare != "none")
        return channel, await wire.command(checking, spec.Queue.Declare)
    except aiormq.ChannelNotFoundEntity:
        if queue.declare != "create":
            raise
    channel = await wire.channel()
    return channel, await declare_queue(wire, channel, queue)


async def check_queue(wire: AmqpWire, channel: AbstractChannel, queue: QueueSpec) -> None:
    """Ask the broker for a queue, and declare nothing. Raises as :func:`ensure_queue`."""
    await wire.command(channel.get_queue(queue.name or ""), spec.Queue.Declare)


async def declare_queue(wire: AmqpWire, channel: AbstractChannel, queue: QueueSpec) -> AbstractQueue:
    """Declare a queue; the broker names it if it has no name. Raises as :func:`ensure_queue`."""
    declaring = channel.declare_queue(
        queue.name or "",
        durable=queue.durable,
        exclusive=queue.exclusive,
        auto_delete=queue.auto_delete,
        arguments=_plain(queue.arguments),
    )
    return await wire.command(declaring, spec.Queue.Declare)


async def bind(
    wire: AmqpWire, queue: AbstractQueue, exchange: ExchangeSpec, key: str, arguments: Mapping[str, Any] | None = None
) -> None:
    """Bind a queue to an exchange. Raises as :func:`ensure_queue`."""
    await wire.command(queue.bind(exchange.name, key, arguments=_plain(arguments or {})), spec.Queue.Bind)


async def unbind(wire: AmqpWire, queue: AbstractQueue, exchange: ExchangeSpec, key: str) -> None:
    """Unbind a queue, which need not be bound, from an exchange. Raises as :func:`ensure_queue`."""
    await wire.command(queue.unbind(exchange.name, key), spec.Queue.Unbind)


def _plain(value: Any) -> Any:
    """Return arguments as pamqp encodes them: it knows neither tuples nor read-only mappings."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def way_out(queue: QueueSpec, error: aiormq.AMQPChannelError) -> str:
    """Return a hint for a queue that differs from its declaration; empty for any other refusal."""
    code, text = reply(error)
    # "inequivalent arg 'x-max-priority' for queue ...", "invalid arg ..."
    if code != 406 or " arg '" not in (text or ""):
        return ""
    flags = f"durable={queue.durable}, exclusive={queue.exclusive}, auto_delete={queue.auto_delete}"
    return (
        f"declared here with {flags}, arguments {dict(queue.arguments)}; ask for what the queue has, use it as it is "
        "with declare='passive', or delete it"
    )


async def delete_queue(wire: AmqpWire, name: str, *, if_empty: bool = False, if_unused: bool = False) -> int:
    """Delete a queue, if it exists, and return the number of its messages. Raises as :func:`ensure_queue`."""
    channel = await wire.channel()
    try:
        deleting = channel.queue_delete(name, if_empty=if_empty, if_unused=if_unused)
        deleted = await wire.command(deleting, spec.Queue.Delete)
        return cast("int", deleted.message_count)
    finally:
        await wire.close_channel(channel)


async def consume(
    wire: AmqpWire, queue: AbstractQueue, tag: str, *, no_ack: bool, arguments: Mapping[str, Any] | None = None
) -> None:
    """Start a consumer. A frame lane takes its deliveries. Raises as :func:`ensure_queue`."""
    consuming = queue.consume(_ignore, no_ack=no_ack, arguments=dict(arguments or {}), consumer_tag=tag)
    await wire.command(consuming, spec.Basic.Consume)


async def _ignore(_: object) -> None:
    """Stand in for the callback of aio-pika, which sees no deliveries."""


def is_absent(error: BaseException) -> bool:
    """Return whether ``error`` refuses a queue that exists and cannot be used for now."""
    code, text = reply(error)
    return code == 404 and any(each in (text or "") for each in _ABSENT)


async def subscribed(subscribe: Callable[[], Awaitable[None]], what: str, is_wanted: Callable[[], bool]) -> None:
    """Call ``subscribe`` until the queue can be used.

    Args:
        subscribe: subscribes, or raises.
        what: names instance and subscription in the log.
        is_wanted: whether to go on waiting.

    Raises:
        aiormq.AMQPChannelError: the broker refused the subscription for another reason, or it is not wanted any more.
        ConnectionLostError: the connection was lost.
    """
    is_told = False
    for pause in Backoff(_FIRST, _LONGEST, has_jitter=False):
        try:
            await subscribe()
        except aiormq.AMQPChannelError as error:
            if not is_absent(error) or not is_wanted():
                raise
            level = logging.DEBUG if is_told else logging.WARNING
            is_told = True
            logger.log(level, "%s: the queue cannot be used for now: %s; trying until it can", what, error)
        else:
            return
        await clock.sleep(pause)


async def exists(wire: AmqpWire, queue: QueueSpec) -> bool:
    """Return whether a queue exists, whether or not it can be used for now.

    Raises:
        ConnectionLostError: the connection was lost.
    """
    channel = await wire.channel()
    try:
        await check_queue(wire, channel, queue)
    except aiormq.AMQPChannelError as error:
        return is_absent(error)
    finally:
        await wire.close_channel(channel)
    return True
