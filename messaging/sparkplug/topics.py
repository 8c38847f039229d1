"""Topics of Sparkplug B (Sparkplug 3.0, 4)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from messaging.errors import InvalidChannelError

NAMESPACE: Final = "spBv1.0"
_FORM: Final = f"write {NAMESPACE}/<group>/NDATA/<edge node> or {NAMESPACE}/<group>/DDATA/<edge node>/<device>"


class MessageType(StrEnum):
    """What a Sparkplug message is about."""

    NBIRTH = "NBIRTH"
    NDEATH = "NDEATH"
    NDATA = "NDATA"
    NCMD = "NCMD"
    DBIRTH = "DBIRTH"
    DDEATH = "DDEATH"
    DDATA = "DDATA"
    DCMD = "DCMD"
    STATE = "STATE"

    @property
    def is_device(self) -> bool:
        """Return whether its topic names a device."""
        return self.value.startswith("D")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of Sparkplug B: of an edge node, of a device at one, or of the state of a host application.

    Attributes:
        type: of the messages.
        group: of the edge node; empty for ``STATE``.
        edge_node: the edge node, or the host application for ``STATE``.
        device: for births, deaths, data and commands of a device.

    Raises:
        InvalidChannelError: a part is missing, is one too many, or holds ``+``, ``#`` or ``/``.
    """

    type: MessageType
    group: str
    edge_node: str
    device: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, MessageType):
            raise InvalidChannelError("type must be a MessageType")
        is_state = self.type is MessageType.STATE
        parts = [("edge node", self.edge_node)]
        if is_state and (self.group or self.device is not None):
            raise InvalidChannelError("a topic of the state of a host application has no group and no device")
        if not is_state:
            parts.append(("group", self.group))
        if self.device is not None:
            parts.append(("device", self.device))
        if not is_state and self.type.is_device != (self.device is not None):
            raise InvalidChannelError(
                f"a topic of {self.type} {'needs a' if self.type.is_device else 'has no'} device; {_FORM}"
            )
        for name, each in parts:
            if not isinstance(each, str) or not each or any(sign in each for sign in "+#/\0"):
                raise InvalidChannelError(f"the name of the {name} must be a text without '+', '#' and '/'; {_FORM}")

    @classmethod
    def parse(cls, channel: str) -> Topic:
        """Return the topic of a channel.

        Raises:
            InvalidChannelError: it is no topic of Sparkplug B.
        """
        if not isinstance(channel, str):
            raise InvalidChannelError(f"a Sparkplug topic must be a str, not {type(channel).__name__}")
        levels = channel.split("/")
        if levels[0] == "STATE" and len(levels) == 2:  # of Sparkplug 2.2
            return cls(MessageType.STATE, "", levels[1])
        if levels[0] == NAMESPACE:
            if len(levels) == 3 and levels[1] == "STATE":
                return cls(MessageType.STATE, "", levels[2])
            if len(levels) in (4, 5):
                try:
                    kind = MessageType(levels[2])
                except ValueError:
                    kind = MessageType.STATE
                if kind is not MessageType.STATE:
                    return cls(kind, levels[1], *levels[3:])
        raise InvalidChannelError(f"{channel!a:.90} is no topic of Sparkplug B; {_FORM}")

    def __str__(self) -> str:
        if self.type is MessageType.STATE:
            return f"{NAMESPACE}/STATE/{self.edge_node}"
        found = f"{NAMESPACE}/{self.group}/{self.type}/{self.edge_node}"
        return found if self.device is None else f"{found}/{self.device}"
