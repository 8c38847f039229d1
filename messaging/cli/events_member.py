"""This program as a member of an event network: joining it, asking its members, and leaving it.

**Threads.** The methods of a ``NodeService`` run on worker threads; a command reads what they note on the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.events_options import Grammar
from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS
from messaging.distributedeventing.qos import supported_by
from messaging.errors import DeadlineError, MessagingError, PartialNotificationError
from messaging.eventnetwork import PREFIX, Arrival, EventNetwork, EventNode, Interest, NodeService

if TYPE_CHECKING:
    from messaging.cli.events_options import NetworkOptions
    from messaging.dispatch import TopicGrammar
    from messaging.eventnetwork import NodeDTO
    from messaging.instance import Messaging

logger = logging.getLogger(__name__)

#: default of ``--heartbeat``, seconds
_HEARTBEAT: Final = EventNetwork().heartbeat
#: how long to wait for joining, seconds
_JOINING: Final = 30.0
#: how long to wait until all members know of this one, and until it has left, seconds
_ANNOUNCING: Final = 10.0
_LEAVING: Final = 5.0


def grammar_of(network: NetworkOptions) -> TopicGrammar[Any]:
    """Return the grammar of the topics of a network."""
    return TYPED_EVENTS if network.grammar is Grammar.TYPED else DISTRIBUTED_EVENTS


def interest_in(topics: str, network: NetworkOptions) -> Interest:
    """Return the interest in the events of a topic filter."""
    return Interest(topics, grammar=network.grammar.value)


def settings_of(network: NetworkOptions) -> EventNetwork:
    """Return the settings of a network.

    Raises:
        ArgumentError: the heartbeat is out of its range.
    """
    return EventNetwork(
        prefix=PREFIX if network.prefix is None else network.prefix,
        heartbeat=_HEARTBEAT if network.heartbeat is None else network.heartbeat,
        send_always=network.everything,  # also for programs that announce nothing
        last_will=False,  # setting it would interrupt the connection, and most commands end soon
    )


@contextlib.contextmanager
def joined(m: Messaging, network: NetworkOptions, service: NodeService) -> Iterator[EventNode]:
    """Join a network; leave it at the end of the ``with`` block.

    Raises:
        MessagingError: the network cannot be joined: a setting is invalid, or the broker refuses.
    """
    settings = settings_of(network)
    everything = interest_in(network.everything, network)
    node = EventNode(
        f"event network {settings.prefix!r}",
        m.name,
        service,
        m,
        grammar_of(network),
        everything,
        settings,
        supported_by(m),
    )
    try:
        node.ready.result(_JOINING)
        yield node
    finally:
        with contextlib.suppress(MessagingError):
            node.close().result(_LEAVING)


def announce(node: EventNode) -> None:
    """Wait until the broker has confirmed the subscriptions of ``node``, and every member knows of them.

    Raises:
        MessagingError: the broker refuses a subscription.
    """
    node.refresh().result(_JOINING)
    try:
        node.announced(_ANNOUNCING).result()
    except PartialNotificationError as error:
        logger.warning("%s: some members may not send their events yet: %s", node.title, ", ".join(error.missing))


class Observer(NodeService):
    """Wants no events, and notes that other members changed."""

    def __init__(self) -> None:
        self._has_news = threading.Event()

    def wanted(self) -> tuple[frozenset[Interest], frozenset[str]]:
        """See ``NodeService``."""
        return frozenset(), frozenset()

    def receive(self, arrival: Arrival) -> None:
        """See ``NodeService``: no events are subscribed to."""

    def interest_changed(self) -> None:
        """See ``NodeService``."""
        self._has_news.set()

    def member_lost(self, member: str) -> None:
        """See ``NodeService``."""

    def settled(self, node: EventNode) -> NodeDTO:
        """Wait until the other members had time to answer; return the members that are known.

        Raises:
            DeadlineError: the connection was lost, and is not back in time.
        """
        deadline = time.monotonic() + _JOINING
        while not (found := node.get_dto()).is_settled:
            if not self._has_news.wait(max(0.0, deadline - time.monotonic())):
                raise DeadlineError(f"{node.title}: its members did not answer within {_JOINING:g} s")
            self._has_news.clear()
        return found
