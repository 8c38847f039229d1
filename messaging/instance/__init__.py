"""``connect(url)``, and the messaging instance that it returns, with its services (RFC 5.2)."""

from messaging.connection.properties import FEATURE_PROPERTY as FEATURE_PROPERTY  # names that are imported from here
from messaging.connection.properties import NAME_PROPERTY as NAME_PROPERTY
from messaging.connection.properties import PROTOCOL_PROPERTY as PROTOCOL_PROPERTY
from messaging.connection.properties import PROVIDER_PROPERTY as PROVIDER_PROPERTY
from messaging.instance.connecting import connect
from messaging.instance.connecting import find_adapter as find_adapter
from messaging.instance.messaging import Messaging
from messaging.instance.queues import Queues
from messaging.instance.queues import check_queue as check_queue

__all__ = [
    "Messaging",
    "Queues",
    "connect",
]
