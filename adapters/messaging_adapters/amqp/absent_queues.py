"""Queues that are there, and cannot be used for now: their node is down, or they have no leader.

RabbitMQ refuses to subscribe to such a queue with 404, as it does for a queue that does not exist, and tells the two
apart in the text. It cancels the consumers of a queue whose node went down with ``basic.cancel``, as it does when a
queue is deleted. A queue that exists is waited for: its node returns, or it gets another leader.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import aiormq

from messaging.execution import clock
from messaging_adapters.amqp import topology
from messaging_adapters.amqp.connection import reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from messaging_adapters.amqp.connection import Wire
    from messaging_adapters.amqp.declarations import QueueSpec

logger = logging.getLogger(__name__)

#: delay before the first further attempt, and the longest delay, seconds; each is twice the one before
_FIRST: Final = 0.1
_LONGEST: Final = 1.0
#: reply texts of RabbitMQ for a queue that exists
_ABSENT: Final = ("down or inaccessible", "due to timeout", "is stopped by supervisor")


def is_absent(error: BaseException) -> bool:
    """Return whether ``error`` refuses a queue that exists and cannot be used for now."""
    code, text = reply(error)
    return code == 404 and any(each in (text or "") for each in _ABSENT)


async def subscribed(subscribe: Callable[[], Awaitable[None]], what: str, is_wanted: Callable[[], bool]) -> None:
    """Call ``subscribe`` until the queue can be used.

    Args:
        subscribe: subscribes, or raises.
        what: names the subscription in the log.
        is_wanted: whether to go on waiting.

    Raises:
        aiormq.AMQPChannelError: the broker refused the subscription for another reason, or it is not wanted any more.
        ConnectionLostError: the connection was lost.
    """
    delay = _FIRST
    while True:
        try:
            await subscribe()
        except aiormq.AMQPChannelError as error:
            if not is_absent(error) or not is_wanted():
                raise
            level = logging.WARNING if delay == _FIRST else logging.DEBUG
            logger.log(level, "amqp: %s: the queue cannot be used for now: %s; trying until it can", what, error)
        else:
            return
        await clock.sleep(delay)
        delay = min(delay * 2, _LONGEST)


async def exists(wire: Wire, queue: QueueSpec) -> bool:
    """Return whether a queue exists, whether or not it can be used for now.

    Raises:
        ConnectionLostError: the connection was lost.
    """
    channel = await wire.channel()
    try:
        await topology.check_queue(wire, channel, queue)
    except aiormq.AMQPChannelError as error:
        return is_absent(error)
    finally:
        await wire.close_channel(channel)
    return True
