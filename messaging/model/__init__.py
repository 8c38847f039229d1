"""What a message is: values, without threads and without input or output.

Messages and their contexts, builders, acknowledgement states, channels, URLs, features and extensions (RFC 5.6, 5.8,
6.3).

May import: ``errors``, ``text``, ``forking``, ``codecs``, ``services``. ``model.settings`` and ``model.envelope`` are
imported by their own names, because they load pydantic.
"""

from messaging.model.acknowledge import AcknowledgeHandler, AcknowledgeMessageContext, AcknowledgeType, state_lock
from messaging.model.builder import (
    AcknowledgeMessageContextBuilder,
    MessageContextBuilder,
    MessageContextProvider,
    as_context,
    as_message,
)
from messaging.model.channels import (
    ANY_LEVEL,
    ANY_LEVELS,
    SEPARATOR,
    check_name,
    check_pattern,
    forbidden_character,
    matcher,
    overlap,
)
from messaging.model.context import (
    NO_EXTENSIONS,
    DirectAcknowledgement,
    MessageContext,
    check_printable,
    check_text,
    kind_like,
)
from messaging.model.extensions import (
    CHECKS,
    EMPTY,
    MAX_MESSAGE_ID,
    MAX_PREFETCH,
    OVERFLOW_POLICIES,
    PUBLISH_ONLY,
    SUBSCRIBE_ONLY,
    PublishOptions,
    SubscribeOptions,
    boolean,
    carried_headers,
    identified,
    integer,
    publish_options,
    publishing_only,
    requested,
    seconds,
    subscribe_options,
    subscribing_only,
)
from messaging.model.features import GENERATE_REPLY_CHANNEL_ALIAS, Features
from messaging.model.headers import REPEATED_TEXT, as_text, frozen, gathered
from messaging.model.incoming import Incoming
from messaging.model.keywords import (
    PublishKeywords,
    ReplyKeywords,
    RequestKeywords,
    RequestManyKeywords,
    SubscribeKeywords,
)
from messaging.model.message import AcknowledgeConsumer, AcknowledgeFilter, Message, ReceivedMessage, V, maker
from messaging.model.outgoing import Outgoing
from messaging.model.url import BrokerUrl, concealed, is_secret_option, parse_url

__all__ = [
    "ANY_LEVEL",
    "ANY_LEVELS",
    "CHECKS",
    "EMPTY",
    "GENERATE_REPLY_CHANNEL_ALIAS",
    "MAX_MESSAGE_ID",
    "MAX_PREFETCH",
    "NO_EXTENSIONS",
    "OVERFLOW_POLICIES",
    "PUBLISH_ONLY",
    "REPEATED_TEXT",
    "SEPARATOR",
    "SUBSCRIBE_ONLY",
    "AcknowledgeConsumer",
    "AcknowledgeFilter",
    "AcknowledgeHandler",
    "AcknowledgeMessageContext",
    "AcknowledgeMessageContextBuilder",
    "AcknowledgeType",
    "BrokerUrl",
    "DirectAcknowledgement",
    "Features",
    "Incoming",
    "Message",
    "MessageContext",
    "MessageContextBuilder",
    "MessageContextProvider",
    "Outgoing",
    "PublishKeywords",
    "PublishOptions",
    "ReceivedMessage",
    "ReplyKeywords",
    "RequestKeywords",
    "RequestManyKeywords",
    "SubscribeKeywords",
    "SubscribeOptions",
    "V",
    "as_context",
    "as_message",
    "as_text",
    "boolean",
    "carried_headers",
    "check_name",
    "check_pattern",
    "check_printable",
    "check_text",
    "concealed",
    "forbidden_character",
    "frozen",
    "gathered",
    "identified",
    "integer",
    "is_secret_option",
    "kind_like",
    "maker",
    "matcher",
    "overlap",
    "parse_url",
    "publish_options",
    "publishing_only",
    "requested",
    "seconds",
    "state_lock",
    "subscribe_options",
    "subscribing_only",
]
