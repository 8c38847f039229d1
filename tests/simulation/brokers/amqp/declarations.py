"""Methods about exchanges, queues and bindings, on a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands

from tests.simulation.brokers.amqp.errors import AmqpError, precondition_failed, resource
from tests.simulation.brokers.amqp.exchanges import Destination
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.channel import Channel


def _exchange_declare(channel: Channel, given: Any) -> None:
    if given.passive:
        channel.vhost.check_exchange(given.exchange)
    else:
        channel.vhost.declare_exchange(
            given.exchange, given.exchange_type, durable=given.durable, auto_delete=given.auto_delete,
            internal=given.internal, given=given.arguments,
        )  # fmt: skip
    channel.answer(given, commands.Exchange.DeclareOk)


def _exchange_delete(channel: Channel, given: Any) -> None:
    channel.vhost.delete_exchange(given.exchange, if_unused=given.if_unused)
    channel.answer(given, commands.Exchange.DeleteOk)


def _exchange_bind(channel: Channel, given: Any) -> None:
    destination = Destination(False, given.destination)
    channel.vhost.bind(given.source, destination, given.routing_key, given.arguments, channel.connection)
    channel.answer(given, commands.Exchange.BindOk)


def _exchange_unbind(channel: Channel, given: Any) -> None:
    destination = Destination(False, given.destination)
    channel.vhost.unbind(given.source, destination, given.routing_key, given.arguments, channel.connection)
    channel.answer(given, commands.Exchange.UnbindOk)


def _queue_declare(channel: Channel, given: Any) -> None:
    name = given.queue
    if name == REPLY_TO or (given.passive and channel.broker.replies.get(name) is not None):
        channel.answer(given, commands.Queue.DeclareOk, queue=name, message_count=0, consumer_count=1)
        return
    if given.passive:
        queue = channel.vhost.accessible(name, channel.connection)
        queue.touch()
    else:
        queue = channel.vhost.declare_queue(
            name, durable=given.durable, exclusive=given.exclusive, auto_delete=given.auto_delete,
            given=given.arguments, connection=channel.connection,
        )  # fmt: skip
    channel.last_queue = queue.name
    counts = {"message_count": queue.ready, "consumer_count": queue.consumer_count}
    channel.answer(given, commands.Queue.DeclareOk, queue=queue.name, **counts)


def _queue_bind(channel: Channel, given: Any) -> None:
    key = given.routing_key or ("" if given.queue else channel.last_queue)
    destination = Destination(True, channel.queue_name(given.queue))
    channel.vhost.bind(given.exchange, destination, key, given.arguments, channel.connection)
    channel.answer(given, commands.Queue.BindOk)


def _queue_unbind(channel: Channel, given: Any) -> None:
    key = given.routing_key or ("" if given.queue else channel.last_queue)
    destination = Destination(True, channel.queue_name(given.queue))
    channel.vhost.unbind(given.exchange, destination, key, given.arguments, channel.connection)
    channel.send(commands.Queue.UnbindOk)


def _queue_purge(channel: Channel, given: Any) -> None:
    count = channel.vhost.accessible(channel.queue_name(given.queue), channel.connection).purge()
    channel.answer(given, commands.Queue.PurgeOk, message_count=count)


def _queue_delete(channel: Channel, given: Any) -> None:
    name = channel.queue_name(given.queue)
    count = 0
    if name in channel.vhost.queues:
        queue = channel.vhost.accessible(name, channel.connection)
        what = resource("queue", name, channel.vhost.name)
        if queue.type == "quorum" and (given.if_unused or given.if_empty):
            flag = "if-unused" if given.if_unused else "if-empty"
            raise AmqpError(540, f"cannot delete {what}. queue.delete operations with {flag} flag set are not "
                                 "supported by quorum queues")  # fmt: skip
        if given.if_empty and queue.ready:
            raise precondition_failed(f"{what} not empty")
        if given.if_unused and queue.turns.all:
            raise precondition_failed(f"{what} in use")
        count = queue.ready
        channel.answer(given, commands.Queue.DeleteOk, message_count=count)
        channel.vhost.delete_queue(queue)
    else:
        channel.answer(given, commands.Queue.DeleteOk, message_count=count)


#: by the number that the method has on the wire
HANDLERS: Final[dict[int, Callable[[Channel, Any], None]]] = {
    commands.Exchange.Declare.index: _exchange_declare,
    commands.Exchange.Delete.index: _exchange_delete,
    commands.Exchange.Bind.index: _exchange_bind,
    commands.Exchange.Unbind.index: _exchange_unbind,
    commands.Queue.Declare.index: _queue_declare,
    commands.Queue.Bind.index: _queue_bind,
    commands.Queue.Unbind.index: _queue_unbind,
    commands.Queue.Purge.index: _queue_purge,
    commands.Queue.Delete.index: _queue_delete,
}
