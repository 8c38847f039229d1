"""CloudEvents 1.0 over MQTT, AMQP and memory: events as messages, in binary and structured mode.

``publish`` and ``events`` are the short way; ``to_message``, ``from_message`` and ``is_cloud_event`` convert. Event
class and JSON format extend those of the package ``cloudevents``. Importing this package registers a codec for
``application/cloudevents+json``. See ``docs/cloudevents.md``.

Needs the extra ``cloudevents``.
"""

from messaging.errors import MissingExtraError as _MissingExtraError

try:
    import cloudevents.core.v1.event as _sdk  # noqa: F401
except ImportError as error:
    raise _MissingExtraError("cloudevents", "messaging.cloudevents") from error

from messaging.cloudevents.bindings import (
    Binding,
    EventStream,
    Mode,
    events,
    from_message,
    is_cloud_event,
    publish,
    to_message,
)
from messaging.cloudevents.event import CloudEvent
from messaging.cloudevents.json_format import CloudEventsCodec, JsonFormat
from messaging.codecs import register_codec as _register_codec

__all__ = [
    "Binding",
    "CloudEvent",
    "CloudEventsCodec",
    "EventStream",
    "JsonFormat",
    "Mode",
    "events",
    "from_message",
    "is_cloud_event",
    "publish",
    "to_message",
]

_register_codec(CloudEventsCodec())
