"""Exchanges and queues: found, or made.

What exists is used as it is, whatever its type and arguments: it is asked for passively first, so that an operator's
own queue or exchange never clashes with what this adapter would have made. Asking for what does not exist costs the
channel, so each function brings one of its own or returns the one that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiormq

from adapters.amqp.connection import ExchangeDeclare, QueueBind, QueueDeclare, QueueDelete, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from adapters.amqp.declarations import ExchangeSpec, QueueSpec

#: every virtual host has it, and nobody can delete it
TOPIC_EXCHANGE: Final = "amq.topic"
#: names the broker keeps to itself: never declared
RESERVED: Final = "amq."


async def ensure_exchange(wire: Wire, spec: ExchangeSpec) -> None:
    """Make sure that an exchange exists, unless nothing is to be asked.

    Raises:
        aiormq.AMQPChannelError: it does not exist and is not to be made, or the broker refused.
        ConnectionLostError: the connection went away.
    """
    if spec.name in ("", TOPIC_EXCHANGE) or spec.declare == "none":
        return
    channel = await wire.channel()
    try:
        try:
            await wire.command(channel, ExchangeDeclare(exchange=spec.name, passive=True))
        except aiormq.ChannelNotFoundEntity:
            if spec.declare != "create" or spec.name.startswith(RESERVED):
                raise
            channel = await wire.channel()
            request = ExchangeDeclare(
                exchange=spec.name,
                exchange_type=spec.kind,
                durable=spec.durable,
                auto_delete=spec.auto_delete,
                internal=spec.internal,
                arguments=dict(spec.arguments),
            )
            await wire.command(channel, request)
    finally:
        await wire.close_channel(channel)


async def find_queue(wire: Wire, spec: QueueSpec) -> aiormq.Channel:
    """Make sure that a queue exists, unless nothing is to be asked.

    Returns:
        A channel, open and fresh.

    Raises:
        aiormq.AMQPChannelError: it does not exist and is not to be made, or the broker refused.
        ConnectionLostError: the connection went away.
    """
    channel = await wire.channel()
    if spec.declare == "none":
        return channel
    try:
        await wire.command(channel, QueueDeclare(queue=spec.name or "", passive=True))
    except aiormq.ChannelNotFoundEntity:
        if spec.declare != "create":
            raise
        channel = await wire.channel()
        await make_queue(wire, channel, spec)
    return channel


async def make_queue(wire: Wire, channel: aiormq.Channel, spec: QueueSpec) -> str:
    """Make a queue, with a name of the broker's if it has none, and return the name. Raises as :func:`find_queue`."""
    request = QueueDeclare(
        queue=spec.name or "",
        durable=spec.durable,
        exclusive=spec.exclusive,
        auto_delete=spec.auto_delete,
        arguments=dict(spec.arguments),
    )
    return str((await wire.command(channel, request)).queue)


def declared(spec: QueueSpec) -> str:
    """Return how a queue is declared here, and what to do where the queue is another one, for an error text."""
    flags = f"durable={spec.durable}, exclusive={spec.exclusive}, auto_delete={spec.auto_delete}"
    return (
        f"declared here with {flags}, arguments {dict(spec.arguments)}; ask for what the queue has, use it as it is "
        "with declare='passive', or delete it"
    )


async def delete_queue(wire: Wire, name: str) -> None:
    """Delete a queue, if it exists. Raises as :func:`find_queue`."""
    channel = await wire.channel()
    try:
        await wire.command(channel, QueueDelete(queue=name))
    finally:
        await wire.close_channel(channel)


async def bind(
    wire: Wire, channel: aiormq.Channel, queue: str, exchange: str, key: str, arguments: Mapping[str, Any]
) -> None:
    """Bind a queue, as often as one likes. Raises as :func:`find_queue`."""
    request = QueueBind(queue=queue, exchange=exchange, routing_key=key, arguments=dict(arguments))
    await wire.command(channel, request)
