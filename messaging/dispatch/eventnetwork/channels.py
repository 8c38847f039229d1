"""The channels of an event network.

======================================  ==============================================================================
channel                                 messages
======================================  ==============================================================================
``<prefix>/<topic>``                    the events of a topic: ``orders/placed`` is ``topics/orders/placed``
``<prefix>-private/<name>``             the events of the private topic ``.<name>``
``<prefix>-members/all``                announcements for all members
``<prefix>-members/<member>``           announcements for one member
``<prefix>-past/<member>``              past events that one member has asked for
======================================  ==============================================================================

The four have different first levels: no wildcard below ``<prefix>`` reaches a private topic, an announcement or a past
event.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import uuid4

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import TopicFilter, TopicGrammar, is_private_topic
from messaging.dispatch.eventdata import pattern_below, pattern_of
from messaging.errors import ArgumentError
from messaging.instance import Messaging
from messaging.model import Features, MessageContext, MessageContextBuilder, check_name

#: default of the prefix
PREFIX: Final = "topics"
#: topics and channels that are remembered
_REMEMBERED: Final = 65_536
#: what the private topic for the replies to a session begins with
_REPLIES: Final = ".replies-"
_PRIVATE_SUFFIX: Final = "-private"
_MEMBERS_SUFFIX: Final = "-members"
_PAST_SUFFIX: Final = "-past"


def new_reply_topic() -> str:
    """Return a private topic for the replies to one session."""
    return f"{_REPLIES}{uuid4().hex}"


class ChannelNames:
    """The channels of one network.

    Args:
        prefix: the first levels of its channels.
        grammar: of its topics.

    Raises:
        InvalidChannelError: the prefix is no channel.
        ArgumentError: the prefix ends as the channels of private topics or announcements do.
    """

    def __init__(self, prefix: str, grammar: TopicGrammar[Any]) -> None:
        self.prefix = check_name(prefix)
        for suffix in (_PRIVATE_SUFFIX, _MEMBERS_SUFFIX, _PAST_SUFFIX):
            if self.prefix.endswith(suffix):
                raise ArgumentError(f"the prefix {prefix!r} must not end with {suffix!r}: such channels are reserved")
        self._grammar = grammar
        self._start = f"{self.prefix}/"
        self._private = f"{self.prefix}{_PRIVATE_SUFFIX}/"
        self._members = f"{self.prefix}{_MEMBERS_SUFFIX}/"
        self._past = f"{self.prefix}{_PAST_SUFFIX}/"
        #: topics of channels, and channels of topics, that are remembered
        self._topics: BoundedCache[str, str] = BoundedCache(_REMEMBERED)
        self._channels: BoundedCache[str, str] = BoundedCache(_REMEMBERED)
        self._of_one_run = (self._members, self._past, self.of(_REPLIES))
        #: of announcements for all members
        self.all_members = f"{self._members}all"

    def member(self, member: str) -> str:
        """Return the channel of announcements for one member."""
        return f"{self._members}{member}"

    def past(self, member: str) -> str:
        """Return the channel of past events that one member has asked for."""
        return f"{self._past}{member}"

    def is_of_one_run(self, channel: str) -> bool:
        """Return whether a channel is made for one run of a member: no later run subscribes to it."""
        return channel.startswith(self._of_one_run)

    def is_past(self, channel: str | None) -> bool:
        """Return whether a channel has past events that a member has asked for."""
        return channel is not None and channel.startswith(self._past)

    def of(self, topic: str) -> str:
        """Return the channel of a topic."""
        found = self._channels.get(topic)
        if found is None:
            found = f"{self._private}{topic[1:]}" if is_private_topic(topic) else f"{self._start}{topic}"
            self._channels[topic] = found
        return found

    def pattern(self, topic_filter: str) -> str:
        """Return the channel pattern that matches the channels of all topics that a filter matches, and maybe more."""
        if is_private_topic(topic_filter):
            return self.of(topic_filter)
        parsed = self._grammar.parse(topic_filter)
        if not parsed.has_wildcard:
            return self.of(topic_filter)
        if isinstance(parsed, TopicFilter):
            return pattern_of(self.prefix, parsed)
        levels = topic_filter.split("/")[:-1]
        return pattern_below(self.prefix, levels, is_deep=topic_filter.endswith("**"))

    def topic(self, channel: str) -> str | None:
        """Return the topic of a channel, or ``None`` if it is a channel of no topic."""
        known = self._topics.get(channel)
        if known is not None:
            return known
        if channel.startswith(self._start):
            found = channel[len(self._start) :]
        elif channel.startswith(self._private):
            found = f".{channel[len(self._private) :]}"
        else:
            return None
        if not self._grammar.is_topic(found):
            return None
        self._topics[channel] = found
        return found

    def is_announcement(self, channel: str | None) -> bool:
        """Return whether a channel has announcements."""
        return channel is not None and channel.startswith(self._members)


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
