"""``messaging queue``: declare, peek at, purge and delete the queues of a broker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, following, identity, warn_of_memory
from messaging.cli.options import argument, flag, option
from messaging.cli.output import ExitCode, show_outcome

if TYPE_CHECKING:
    from messaging import Messaging

logger = logging.getLogger(__name__)

queue = options.CommandGroup(
    "queue",
    help="Declare, peek at, purge and delete queues at a broker that has them, such as RabbitMQ. MQTT has none.",
)

#: most messages of one peek, as in ``Queues.peek``
_MAX_PEEK = 1000

_Words = Annotated[list[str] | None, argument("NAME", "Name of the queue, as in sub --queue.")]


@queue.command()
def declare(
    broker: BrokerOptions,
    words: _Words = None,
    topics: Annotated[
        list[str] | None, option("--topic -t", "PATTERN", "Bind it to this channel or pattern; repeatable.")
    ] = None,
    routing_key: options.RoutingKey = None,
    extension: options.Extensions = None,
) -> int:
    """Declare a queue and bind it to channels, exactly as `sub --queue` with the same options does.

    A queue that exists and is equal stays as it is; one that differs is refused.

    Example: messaging queue declare amqp://localhost work -t 'jobs/#' -x queueType=quorum
    """
    with _connected(broker, words) as (m, name):
        given = {"channel_extension": routing_key, **options.extensions(extension, queue=name)}
        del given["queue"]  # checked not to be among the extensions
        m.queues.declare(name, *(topics or ()), **given).result()
        logger.info("queue %r is declared at %s", name, identity(m))
    return ExitCode.OK


@queue.command()
def peek(
    broker: BrokerOptions,
    words: _Words = None,
    most: Annotated[int, option("--max -n", "N", "Write at most N messages.", min=1, max=_MAX_PEEK)] = 10,
    json: Annotated[bool, flag("--json", "Write each message as a JSON object on one line.")] = False,
    verbose: options.Verbose = False,
    format_: options.Format = None,
    no_newline: options.NoNewline = False,
) -> int:
    """Write the first messages of a queue, which stay in it, in the forms of `sub`.

    The broker delivers them and takes them back: their next delivery is marked as redelivered, and a quorum queue
    counts it, towards its delivery limit, too. Messages that a consumer has not acknowledged are not seen.

    Example: messaging queue peek amqp://localhost work --max 3 --json
    """
    from messaging.cli.formats import message_form, write_formatted

    form, _ = message_form(format_, json=json, verbose=verbose, no_newline=no_newline)
    with _connected(broker, words) as (m, name):
        found = m.queues.peek(name, most).result()
    write_formatted(found, form)
    if found:
        logger.info("%d messages of queue %r were peeked at: they are marked as redelivered now", len(found), name)
    return ExitCode.OK


@queue.command()
def purge(broker: BrokerOptions, words: _Words = None, json: options.Json = False) -> int:
    """Remove all messages of a queue, except for those that a consumer has.

    Example: messaging queue purge amqp://localhost work
    """
    with _connected(broker, words) as (m, name):
        removed = m.queues.purge(name).result()
    return show_outcome(
        {"queue": name, "removed": removed}, "removed {removed} messages from queue {queue!r}", json=json
    )


@queue.command()
def delete(
    broker: BrokerOptions,
    words: _Words = None,
    if_empty: Annotated[bool, flag("--if-empty", "Refuse a queue with messages.")] = False,
    if_unused: Annotated[bool, flag("--if-unused", "Refuse a queue with consumers.")] = False,
    json: options.Json = False,
) -> int:
    """Delete a queue with its messages. Its consumers are cancelled.

    Example: messaging queue delete amqp://localhost work --if-unused
    """
    with _connected(broker, words) as (m, name):
        deleted = m.queues.delete(name, if_empty=if_empty, if_unused=if_unused).result()
    return show_outcome(
        {"queue": name, "deleted": deleted}, "deleted {deleted} messages with queue {queue!r}", json=json
    )


@contextlib.contextmanager
def _connected(broker: BrokerOptions, words: list[str] | None) -> Iterator[tuple[Messaging, str]]:
    """Connect to the broker; return the instance, and the name of the queue."""
    from messaging.instance import check_queue  # importing it is slow, and help and completion do not need it

    broker, (name,) = following(broker, words, "NAME")
    check_queue(name)
    with broker.connect("queue") as m:
        warn_of_memory(m)
        yield m, name
