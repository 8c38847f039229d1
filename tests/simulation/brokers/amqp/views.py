"""What the clients of the comparison know, and the steps that they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pamqp import commands
from pamqp.base import Frame

from tests.simulation.brokers.amqp import properties
from tests.simulation.brokers.amqp.fake_host import Received
from tests.simulation.brokers.amqp.virtual_host import REPLY_TO

#: what was received, by connection and channel
Events = dict[tuple[int, int], list[Received]]

_MAX_ADDRESSES: Final = 3


@dataclass
class Publish:
    """A message of a step."""

    exchange: str
    routing_key: str
    raw: bytes
    body: bytes
    mandatory: bool = False
    immediate: bool = False


@dataclass
class Step:
    """One step: ``connect``, ``drop``, ``publish`` messages, or ``call`` a method."""

    action: str
    connection: int
    channel: int = 0
    method: type[Frame] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    messages: list[Publish] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"{self.connection}.{self.channel}"
        if self.action == "publish":
            return f"{where} publish " + ", ".join(
                f"{each.body.decode()} to {each.exchange!r} {each.routing_key!r} {each.raw.hex()}"
                + " mandatory" * each.mandatory
                for each in self.messages
            )
        if self.method is None:
            return f"{where} {self.action}"
        return f"{where} {self.method.name} {self.values}"


@dataclass
class ChannelView:
    """What a client knows of one of its channels.

    Attributes:
        unacked: tags of unacknowledged deliveries.
        real_tags: the tags that the real broker gave to the same deliveries.
    """

    confirms: bool = False
    consumers: list[str] = field(default_factory=list)
    unacked: list[int] = field(default_factory=list)
    real_tags: dict[int, int] = field(default_factory=dict)
    unconfirmed: set[int] = field(default_factory=set)
    published: int = 0
    has_replies: bool = False
    no_ack: set[str] = field(default_factory=set)


@dataclass
class View:
    """What all clients know.

    Attributes:
        connections: the channels by connection and number.
        addresses: of requests, that replies go to.
        queues: names of queues, those that the broker has named included.
    """

    connections: dict[int, dict[int, ChannelView]] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)

    def channel(self, connection: int, number: int) -> ChannelView | None:
        """Return a channel that is open."""
        return self.connections.get(connection, {}).get(number)

    def update(self, step: Step, events: Events) -> None:
        """Take in what a step has led to."""
        channel = self.channel(step.connection, step.channel)
        if channel is not None:
            _settle(channel, step)
        if step.action == "connect":
            self.connections[step.connection] = {}
        elif step.action == "drop":
            del self.connections[step.connection]
        for (connection, number), received in events.items():
            for event in received:
                self._take(step, connection, number, event)
        if channel is not None:
            answers = events.get((step.connection, step.channel), [])
            channel.unconfirmed -= {*confirmed(answers, channel.unconfirmed)}

    def _take(self, step: Step, connection: int, number: int, event: Received) -> None:
        channels = self.connections.get(connection)
        if channels is None:
            return
        if event.name in ("Connection.Close", "Connection.CloseOk"):
            del self.connections[connection]
            return
        if event.name == "Channel.OpenOk":
            channels[number] = ChannelView()
            return
        channel = channels.get(number)
        if channel is None:
            return
        address = reply_to(event)
        if address:
            self.addresses = [*self.addresses, address][-_MAX_ADDRESSES:]
        match event.name:
            case "Channel.Close" | "Channel.CloseOk":
                del channels[number]
            case "Confirm.SelectOk":
                channel.confirms = True
            case "Basic.ConsumeOk":
                _consume(step, channel, event.consumer_tag)
            case "Basic.CancelOk" | "Basic.Cancel":
                channel.has_replies = channel.has_replies and event.consumer_tag != "replies"
                channel.consumers = [tag for tag in channel.consumers if tag != event.consumer_tag]
            case "Basic.Deliver" if event.consumer_tag not in channel.no_ack:
                channel.unacked.append(event.delivery_tag)
            case "Basic.GetOk" if not step.values["no_ack"]:
                channel.unacked.append(event.delivery_tag)
            case "Basic.RecoverOk":
                channel.unacked = []
            case "Queue.DeclareOk" if event.queue not in self.queues and event.queue != REPLY_TO:
                self.queues.append(event.queue)
            case _:
                pass


def _consume(step: Step, channel: ChannelView, tag: str) -> None:
    if tag == "replies":
        channel.has_replies = True
        channel.no_ack.add(tag)
        return
    channel.consumers.append(tag)
    (channel.no_ack.add if step.values["no_ack"] else channel.no_ack.discard)(tag)


def _settle(channel: ChannelView, step: Step) -> None:
    """Forget the deliveries that a step settles."""
    if step.method in (commands.Basic.Ack, commands.Basic.Nack, commands.Basic.Reject):
        tag, multiple = step.values["delivery_tag"], step.values.get("multiple")
        channel.unacked = [
            each for each in channel.unacked if not (each == tag or (multiple and (not tag or each < tag)))
        ]


def confirmed(events: list[Received], unconfirmed: set[int]) -> dict[int, str]:
    """Return which of the unconfirmed messages were answered, and how."""
    found: dict[int, str] = {}
    for event in events:
        if event.name not in ("Basic.Ack", "Basic.Nack"):
            continue
        tag = event.delivery_tag
        for each in sorted(unconfirmed) if event.multiple else [tag]:
            if each <= tag:
                found.setdefault(each, event.name)
    return found


def reply_to(event: Received) -> str:
    """Return the reply address of a message, if a broker has made it."""
    if event.properties is None:
        return ""
    name = properties.split(event.properties).get(properties.REPLY_TO, b"\0")[1:].decode()
    return name if name.startswith(f"{REPLY_TO}.") else ""
