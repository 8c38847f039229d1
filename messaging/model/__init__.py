"""Messages as values, without threads and without input or output.

Messages and their contexts, builders, acknowledgement states, channels, URLs, settings, features and extensions (RFC
5.6, 5.8, 6.3).

``model.settings``, ``model.credentials`` and ``model.envelope`` are imported by their own names, because they load
pydantic.
"""

from messaging.model.acknowledge import AcknowledgeHandler, AcknowledgeMessageContext, AcknowledgeType
from messaging.model.acknowledge import Incoming as Incoming
from messaging.model.acknowledge import state_lock as state_lock
from messaging.model.addressing import REPLY_CHANNELS as REPLY_CHANNELS
from messaging.model.addressing import Addressing as Addressing
from messaging.model.addressing import ReplyAddress as ReplyAddress
from messaging.model.addressing import ReplyRoute as ReplyRoute
from messaging.model.builder import AcknowledgeMessageContextBuilder, MessageContextBuilder, MessageContextProvider
from messaging.model.builder import as_context as as_context
from messaging.model.builder import as_message as as_message
from messaging.model.capabilities import CORE_FEATURES as CORE_FEATURES
from messaging.model.capabilities import QUEUE_BROKER_FEATURES as QUEUE_BROKER_FEATURES
from messaging.model.capabilities import Capabilities as Capabilities
from messaging.model.channels import ANY_LEVEL as ANY_LEVEL
from messaging.model.channels import ANY_LEVELS as ANY_LEVELS
from messaging.model.channels import SEPARATOR as SEPARATOR
from messaging.model.channels import check_name as check_name
from messaging.model.channels import check_pattern as check_pattern
from messaging.model.channels import forbidden_character as forbidden_character
from messaging.model.channels import matcher as matcher
from messaging.model.channels import overlap as overlap
from messaging.model.context import NO_EXTENSIONS as NO_EXTENSIONS
from messaging.model.context import DirectAcknowledgement as DirectAcknowledgement
from messaging.model.context import MessageContext
from messaging.model.context import check_printable as check_printable
from messaging.model.context import check_text as check_text
from messaging.model.context import plan_key as plan_key
from messaging.model.extensions import CHECKS as CHECKS
from messaging.model.extensions import EMPTY as EMPTY
from messaging.model.extensions import MAX_MESSAGE_ID as MAX_MESSAGE_ID
from messaging.model.extensions import MAX_PREFETCH as MAX_PREFETCH
from messaging.model.extensions import OVERFLOW_POLICIES as OVERFLOW_POLICIES
from messaging.model.extensions import PUBLISH_ONLY as PUBLISH_ONLY
from messaging.model.extensions import SUBSCRIBE_ONLY as SUBSCRIBE_ONLY
from messaging.model.extensions import PublishOptions as PublishOptions
from messaging.model.extensions import SubscribeOptions as SubscribeOptions
from messaging.model.extensions import boolean as boolean
from messaging.model.extensions import carried_headers as carried_headers
from messaging.model.extensions import identified as identified
from messaging.model.extensions import integer as integer
from messaging.model.extensions import publish_options as publish_options
from messaging.model.extensions import publishing_only as publishing_only
from messaging.model.extensions import requested as requested
from messaging.model.extensions import seconds as seconds
from messaging.model.extensions import subscribe_options as subscribe_options
from messaging.model.extensions import subscribing_only as subscribing_only
from messaging.model.extensions import with_headers as with_headers
from messaging.model.features import GENERATE_REPLY_CHANNEL_ALIAS as GENERATE_REPLY_CHANNEL_ALIAS
from messaging.model.features import REPLY_FEATURES as REPLY_FEATURES
from messaging.model.features import Features
from messaging.model.headers import REPEATED_TEXT as REPEATED_TEXT
from messaging.model.headers import as_text as as_text
from messaging.model.headers import frozen as frozen
from messaging.model.headers import gathered as gathered
from messaging.model.keywords import PublishKeywords as PublishKeywords
from messaging.model.keywords import ReplyKeywords as ReplyKeywords
from messaging.model.keywords import RequestKeywords as RequestKeywords
from messaging.model.keywords import RequestManyKeywords as RequestManyKeywords
from messaging.model.keywords import SubscribeKeywords as SubscribeKeywords
from messaging.model.message import AcknowledgeConsumer as AcknowledgeConsumer
from messaging.model.message import AcknowledgeFilter as AcknowledgeFilter
from messaging.model.message import Message, ReceivedMessage
from messaging.model.message import V as V
from messaging.model.message import context_of as context_of
from messaging.model.message import maker as maker
from messaging.model.message import parts as parts
from messaging.model.plan import Outgoing as Outgoing
from messaging.model.plan import PublishPlan as PublishPlan
from messaging.model.plan import SubscriptionSpec as SubscriptionSpec
from messaging.model.stored import restored_context as restored_context
from messaging.model.stored import stored_properties as stored_properties
from messaging.model.url import BrokerUrl as BrokerUrl
from messaging.model.url import Endpoint as Endpoint
from messaging.model.url import Host as Host
from messaging.model.url import check_hosts as check_hosts
from messaging.model.url import concealed as concealed
from messaging.model.url import is_secret_option as is_secret_option
from messaging.model.url import parse_host as parse_host
from messaging.model.url import parse_url as parse_url

__all__ = [
    "AcknowledgeHandler",
    "AcknowledgeMessageContext",
    "AcknowledgeMessageContextBuilder",
    "AcknowledgeType",
    "Features",
    "Message",
    "MessageContext",
    "MessageContextBuilder",
    "MessageContextProvider",
    "ReceivedMessage",
]
