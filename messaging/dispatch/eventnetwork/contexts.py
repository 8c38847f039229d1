"""The contexts of the messages of one member: channel, level of confirmation, content type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from messaging.codecs.cache import BoundedCache
from messaging.model import Features, MessageContext, MessageContextBuilder

if TYPE_CHECKING:
    from messaging.instance import Messaging

#: contexts that are remembered
_CONTEXTS: Final = 65_536


class EventContexts:
    """Makes contexts, and remembers them: a publisher compiles each once. Thread safe.

    Args:
        instance: publishes the messages.
        as_cbor: whether events are sent in CBOR.
    """

    def __init__(self, instance: Messaging, *, as_cbor: bool) -> None:
        self._features = instance.features
        self._content_type = "application/cbor" if as_cbor else "application/json"
        self._known: BoundedCache[tuple[str, str, bool], MessageContext] = BoundedCache(_CONTEXTS)

    def of_event(self, channel: str, qos: str, *, is_stored: bool = False) -> MessageContext:
        """Return the context of events.

        Args:
            channel: of their topic.
            qos: ``0`` or ``1``; an instance without levels has its own.
            is_stored: whether they are stored before they are sent.
        """
        key = channel, qos, is_stored
        context = self._known.get(key)
        if context is None:
            builder = self._builder(channel, qos, self._content_type)
            if is_stored:
                builder.extension_entry(Features.EXTENSION_STORE_AND_FORWARD, True)
            context = self._known[key] = builder.build_context()
        return context

    def of_announcement(self, channel: str, *, is_last_will: bool = False) -> MessageContext:
        """Return the context of announcements."""
        builder = self._builder(channel, "1", "application/json")
        if is_last_will:
            builder.extension_entry(Features.EXTENSION_LAST_WILL, True)
        return builder.build_context()

    def _builder(self, channel: str, qos: str, content_type: str) -> MessageContextBuilder:
        builder = MessageContextBuilder().channel(channel)
        if Features.EXTENSION_QOS in self._features:
            builder.extension_entry(Features.EXTENSION_QOS, qos)
        if Features.MESSAGE_PROPERTIES in self._features:
            builder.content_type(content_type)
        return builder
