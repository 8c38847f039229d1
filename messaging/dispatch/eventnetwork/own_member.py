"""This member of a network: what its event service says of it, and what its parts share."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch import DISTRIBUTED_EVENTS, TYPED_EVENTS, TopicGrammar
from messaging.dispatch.eventnetwork.announcements import TYPED, Announcement, TopicInterest

if TYPE_CHECKING:
    from messaging.dispatch.eventnetwork.channels import ChannelNames
    from messaging.dispatch.eventnetwork.contexts import EventContexts
    from messaging.dispatch.eventnetwork.control import Control
    from messaging.dispatch.eventnetwork.hops import ArrivedEvent
    from messaging.dispatch.eventnetwork.seals import Seals
    from messaging.dispatch.eventnetwork.settings import EventNetwork
    from messaging.instance import Messaging

#: the interest in every event, by the grammar of the topics
EVERYTHING: Final[dict[TopicGrammar[Any], TopicInterest]] = {
    DISTRIBUTED_EVENTS: TopicInterest("**"),
    TYPED_EVENTS: TopicInterest("*", grammar=TYPED),
}


class NodeService(abc.ABC):
    """The event service of a node."""

    @abc.abstractmethod
    def wanted(self) -> tuple[Iterable[TopicInterest], Iterable[str]]:
        """Return the events that are wanted, each once, and the topics that are offered. On a worker thread."""

    @abc.abstractmethod
    def receive(self, arrival: ArrivedEvent) -> None:
        """Take an event of another member, and see to ``ArrivedEvent.notified``.

        On a worker thread, one at a time; may wait for room. A ``MessagingError`` refuses the event; then its sender is
        answered by the caller.
        """

    def batch_received(self) -> None:  # noqa: B027  # a service may deliver each event at once
        """Note that no more events follow at once. On the thread of :meth:`receive`."""

    @abc.abstractmethod
    def interest_changed(self) -> None:
        """Note that other members want other events than before. On a worker thread."""

    @abc.abstractmethod
    def member_lost(self, member: str) -> None:
        """Note that a member is lost, after its last event was received. On the thread of :meth:`receive`.

        It is called again if events of a lost member arrive that its broker kept, see :meth:`EventNode.heard_of`.
        """

    def replay_asked(self, request: Announcement) -> None:  # noqa: B027  # a service need not share its history
        """Answer the ``replay`` of another member, on another thread. On a worker thread; does not wait."""


@dataclass(frozen=True, slots=True)
class MemberProfile:
    """How an event service takes part in a network. Immutable.

    Attributes:
        title: of the event service, for the log.
        name: of the member, for people.
        grammar: of the topics.
        qos: the qualities of service that are announced.
        shares_history: whether the service answers a ``replay``.
    """

    title: str
    name: str
    grammar: TopicGrammar[Any]
    qos: tuple[str, ...] = ()
    shares_history: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OwnMember:
    """This member, as its parts use it. Immutable.

    Attributes:
        title: of the event service, for the log.
        id: of the member, new for each run.
        node: stands for the member in the way of an event.
        service: the event service.
        instance: the messaging instance of the broker.
        settings: of the network.
        names, contexts: the channels of the network, and the contexts of the messages to them.
        control: the thread of announcements and timers.
        seals: signs messages and opens signed ones; ``None``: messages are not signed.
    """

    title: str
    id: str
    node: object
    service: NodeService
    instance: Messaging
    settings: EventNetwork
    names: ChannelNames
    contexts: EventContexts
    control: Control
    seals: Seals | None = None
