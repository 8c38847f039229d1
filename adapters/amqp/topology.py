"""Exchanges and queues: found, or made.

What exists is used as it is, whatever its type and arguments: it is asked for passively first, so that an operator's
own queue or exchange never clashes with what this adapter would have made. Asking for what does not exist costs the
channel, so each function brings one of its own or returns the one that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiormq

from adapters.amqp.connection import ExchangeDeclare, QueueBind, QueueDeclare, QueueDelete, Wire

if TYPE_CHECKING:
    from pamqp.common import FieldTable

#: every virtual host has it, and nobody can delete it
TOPIC_EXCHANGE: Final = "amq.topic"
#: names the broker keeps to itself: never declared
RESERVED: Final = "amq."


async def ensure_exchange(wire: Wire, name: str, *, create: bool) -> None:
    """Make sure that an exchange exists; one that is made is a durable topic exchange.

    Raises:
        aiormq.AMQPChannelError: it does not exist and is not to be made, or the broker refused.
        ConnectionLostError: the connection went away.
    """
    if name == TOPIC_EXCHANGE:
        return
    channel = await wire.channel()
    try:
        try:
            await wire.ask(channel.rpc(ExchangeDeclare(exchange=name, passive=True)))
        except aiormq.ChannelNotFoundEntity:
            if not create or name.startswith(RESERVED):
                raise
            channel = await wire.channel()
            await wire.ask(channel.rpc(ExchangeDeclare(exchange=name, exchange_type="topic", durable=True)))
    finally:
        await wire.close_channel(channel)


async def find_queue(wire: Wire, name: str, *, create: bool, max_priority: int) -> aiormq.Channel:
    """Make sure that a queue exists; one that is made is durable and shared, and stays.

    Returns:
        A channel, open and fresh.

    Raises:
        aiormq.AMQPChannelError: it does not exist and is not to be made, or the broker refused.
        ConnectionLostError: the connection went away.
    """
    channel = await wire.channel()
    try:
        await wire.ask(channel.rpc(QueueDeclare(queue=name, passive=True)))
    except aiormq.ChannelNotFoundEntity:
        if not create:
            raise
        channel = await wire.channel()
        await wire.ask(channel.rpc(QueueDeclare(queue=name, durable=True, arguments=_arguments(max_priority))))
    return channel


async def make_private_queue(wire: Wire, channel: aiormq.Channel, *, max_priority: int) -> str:
    """Make a queue that ends with its consumer or its connection, and return its name. Raises as :func:`find_queue`."""
    request = QueueDeclare(queue="", exclusive=True, auto_delete=True, arguments=_arguments(max_priority))
    declared = await wire.ask(channel.rpc(request))
    return str(declared.queue)


async def delete_queue(wire: Wire, name: str) -> None:
    """Delete a queue, if it exists. Raises as :func:`find_queue`."""
    channel = await wire.channel()
    try:
        await wire.ask(channel.rpc(QueueDelete(queue=name)))
    finally:
        await wire.close_channel(channel)


async def bind(wire: Wire, channel: aiormq.Channel, queue: str, exchange: str, key: str) -> None:
    """Bind a queue, as often as one likes. Raises as :func:`find_queue`."""
    await wire.ask(channel.rpc(QueueBind(queue=queue, exchange=exchange, routing_key=key)))


def _arguments(max_priority: int) -> FieldTable | None:
    return {"x-max-priority": max_priority} if max_priority else None
