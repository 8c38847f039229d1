"""Interceptors: code that sees each message before it is published, and wraps the processing of each received message.

Give them to ``messaging.connect(url, interceptors=[...])``, or register them in the service registry under
:class:`Interceptor`. Subclass it and override what you need; ``docs/tracing.md`` shows an example.

**Order.** The interceptors given to ``connect`` come first, in their order, then the registered ones by ranking, the
highest first. The first one is the outermost: it sees an outgoing message first and its outcome last, and its context
manager is entered first and exited last.

**Cost.** Interceptors wrap the functions that publish, and the handlers and observers that process. An instance without
interceptors calls these themselves, so interceptors cost it nothing for each message. An interceptor that overrides one
method costs nothing on the other side.

The rooms above use ``PublishChain`` and ``ProcessChain``.
"""

from messaging.interception.interceptor import (
    InboundMessage,
    InstanceInfo,
    Interceptor,
    OutboundMessage,
    Outcome,
)
from messaging.interception.interceptors import Interceptors as Interceptors
from messaging.interception.processing import ProcessChain as ProcessChain
from messaging.interception.processing import PulledScope as PulledScope
from messaging.interception.processing import Scope as Scope
from messaging.interception.publishing import PublishChain as PublishChain

__all__ = ["InboundMessage", "InstanceInfo", "Interceptor", "OutboundMessage", "Outcome"]
