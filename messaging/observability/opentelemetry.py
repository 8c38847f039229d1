"""Traces and metrics of OpenTelemetry: an interceptor for instances. Needs the extra ``otel``: the API only.

::

    from messaging.observability.opentelemetry import OpenTelemetryInterceptor

    with messaging.connect(url, interceptors=[OpenTelemetryInterceptor()]) as m:
        ...

**Spans** follow the semantic conventions for messaging. A message that is published has a span until the broker has
taken it, a request until its reply has arrived. A received message has one while it is processed: the handler, the
observer or the body of the loop runs inside it.

**Propagation.** The context travels in the headers of the message, as the global propagator writes it (W3C trace
context and baggage, by default): user properties of MQTT 5, headers of AMQP, the envelope of MQTT 3.1.1. A request and
its reply are one trace. A message of publish/subscribe begins a trace of its own with a link to the publisher's span,
because it may have many subscribers; ``parent=True`` continues the publisher's trace instead. A message that is
published outside of any span, and has a context in its headers already, continues that: so messages pass through a
gateway.

**Conventions.** ``OTEL_SEMCONV_STABILITY_OPT_IN`` holds ``messaging`` for the present names of attributes,
``messaging/dup`` for both; without it spans have the old ones.

An error of OpenTelemetry is logged by the instance, and never costs a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.errors import MissingExtraError as _MissingExtraError
from messaging.errors.checks import check_instance, plain_function
from messaging.execution import clock
from messaging.interception import InboundMessage, InstanceInfo, Interceptor, OutboundMessage, Outcome
from messaging.model import Features, Message

try:
    from opentelemetry import baggage, context, metrics, propagate, trace
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ImportError as error:
    raise _MissingExtraError("otel", "messaging.observability.opentelemetry") from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Span, TracerProvider


#: the variable that chooses the names of attributes, and its values for messaging
OPT_IN: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
_SCOPE: Final = "rx-messaging"
#: boundaries of the buckets of durations that the conventions give, seconds
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
#: what is published -> the name of the operation, and the kind of its span
_OUTBOUND: Final[Mapping[str, tuple[str, SpanKind]]] = {
    "publish": ("publish", SpanKind.PRODUCER),
    "request": ("request", SpanKind.CLIENT),
    "reply": ("reply", SpanKind.PRODUCER),
}
#: schemes of URLs -> ``messaging.system``
_SYSTEMS: Final[Mapping[str, str]] = {
    "amqp": "rabbitmq", "amqps": "rabbitmq", "mqtt": "mqtt", "mqtts": "mqtt", "ws": "mqtt", "wss": "mqtt",
}  # fmt: skip
#: channels whose attributes are kept
_CACHED: Final = 4096


class OpenTelemetryInterceptor(Interceptor):
    """Makes spans and metrics of the messages of instances. Thread safe; one serves any number of instances.

    Args:
        tracer_provider: ``None``: the global one.
        meter_provider: ``None``: the global one.
        propagator: ``None``: the global one.
        parent: whether a message of publish/subscribe continues the trace of its publisher.
        destination: returns the name of a channel for metrics, such as ``plant/+/data`` for ``plant/7/data``; ``None``
            to leave it out. Without it metrics of publishing have no destination: channels may be without number.

    Raises:
        ArgumentError: ``destination`` is no function.
        MissingExtraError: OpenTelemetry is not installed.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
        parent: bool = False,
        destination: Callable[[str], str | None] | None = None,
    ) -> None:
        if destination is not None:
            destination = plain_function(destination, "destination")
        check_instance("parent", parent, bool)
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._propagator = propagator
        self._continues = parent
        self._destination = destination
        chosen = {each.strip() for each in os.environ.get(OPT_IN, "").split(",")}
        self._has_new_names = "messaging" in chosen or "messaging/dup" in chosen
        self._has_old_names = "messaging/dup" in chosen or not self._has_new_names
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were published."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were processed."
        )
        self._operations = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Time until the broker took a message, or a reply arrived.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )  # fmt: skip
        self._processings = meter.create_histogram(
            "messaging.process.duration", "s", "Time in which a message was processed.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )  # fmt: skip
        #: names of spans, and the attributes that all messages of a channel share
        self._spans: BoundedCache[tuple[Any, ...], tuple[str, dict[str, Any]]] = BoundedCache(_CACHED)
        #: attributes of metrics
        self._measures: BoundedCache[tuple[Any, ...], dict[str, Any]] = BoundedCache(_CACHED)

    # --- publishing

    def intercept_publish(self, outbound: OutboundMessage) -> Callable[[Outcome], object] | None:
        """See :class:`messaging.interception.Interceptor`."""
        operation, kind = _OUTBOUND[outbound.operation]
        message = outbound.message
        channel = message.context.channel or ""
        parent = context.get_current()
        if not trace.get_current_span(parent).get_span_context().is_valid:
            source = outbound.request.context.extensions.get(Features.EXTENSION_HEADERS) if outbound.request else None
            parent = self._extracted(source or outbound.headers)
        key = (outbound.instance, operation, channel)
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = self._span(outbound.instance, operation, "send", channel, {})
        name, shared = found
        span = self._tracer.start_span(name, parent, kind, self._attributes(shared, message))
        carrier: dict[str, str] = {}
        propagator = self._propagator or propagate.get_global_textmap()
        propagator.inject(carrier, context=trace.set_span_in_context(span, parent))
        if carrier:
            outbound.add_headers(carrier)
        instance, start = outbound.instance, clock.wall_ns()

        def settle(outcome: Outcome) -> None:
            """End the span. On a worker thread."""
            failure = None if outcome.error is None else type(outcome.error).__name__
            if span.is_recording():
                if outcome.message_id is not None:
                    span.set_attribute("messaging.message.id", outcome.message_id)
                if outcome.correlation_id is not None:
                    span.set_attribute("messaging.message.conversation_id", outcome.correlation_id)
                if failure is not None:
                    span.set_attribute("error.type", failure)
                    span.set_status(Status(StatusCode.ERROR, str(outcome.error)))
                span.end(outcome.at)
            destination = None if self._destination is None else self._destination(channel)
            key = (instance, operation, destination, failure)
            measures = self._measures.get(key)
            if measures is None:
                more = {} if destination is None else {"messaging.destination.name": destination}
                measures = self._measures[key] = self._measured(instance, operation, failure, more)
            self._sent.add(1, measures)
            self._operations.record(max(0, outcome.at - start) / 1e9, measures)

        return settle

    def intercept_process(self, inbound: InboundMessage) -> AbstractContextManager[object] | None:
        """See :class:`messaging.interception.Interceptor`."""
        return _ProcessingSpan(self, inbound)

    # --- parts of both

    def _extracted(self, headers: Mapping[str, Any] | None) -> Context:
        """Return the context that a message carries, on top of the current one."""
        if not headers:
            return context.get_current()
        propagator = self._propagator or propagate.get_global_textmap()
        carrier = {name: value for name in propagator.fields if isinstance(value := headers.get(name), str)}
        return propagator.extract(carrier) if carrier else context.get_current()

    def start_processing(self, inbound: InboundMessage) -> tuple[Span, Context]:
        """Return the span of a received message, and the context to process it in."""
        message = inbound.message
        channel = message.context.channel or ""
        extensions = message.context.extensions
        current = context.get_current()
        remote = self._extracted(extensions.get(Features.EXTENSION_HEADERS))
        links: Sequence[Link] = ()
        parent = remote
        if inbound.operation == "message" and not self._continues:
            origin = trace.get_current_span(remote).get_span_context()
            if origin.is_valid and remote is not current:
                links = (Link(origin),)
            parent = current
            if remote is not current:
                for name, value in baggage.get_all(remote).items():
                    parent = baggage.set_baggage(name, value, parent)
        key = (inbound.instance, "process", channel, inbound.subscription, inbound.queue)
        found = self._spans.get(key)
        if found is None:
            found = self._span(inbound.instance, "process", "process", channel, _subscribed(inbound))
            self._spans[key] = found
        name, shared = found
        attributes = self._attributes(shared, message)
        message_id = extensions.get(Features.EXTENSION_MESSAGE_ID)
        if message_id is not None:
            attributes["messaging.message.id"] = message_id
        span = self._tracer.start_span(name, parent, SpanKind.CONSUMER, attributes, links)
        return span, trace.set_span_in_context(span, parent)

    def measure_processing(self, inbound: InboundMessage, seconds: float, failure: str | None) -> None:
        """Count a message that was processed."""
        key = (inbound.instance, inbound.subscription, inbound.queue, failure)
        measures = self._measures.get(key)
        if measures is None:
            measures = self._measured(inbound.instance, "process", failure, _subscribed(inbound))
            self._measures[key] = measures
        self._consumed.add(1, measures)
        self._processings.record(seconds, measures)

    def _measured(
        self, instance: InstanceInfo, operation: str, failure: str | None, more: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the attributes of a measurement."""
        found = {name: value for name, value in _of(instance).items() if name != "messaging.client.id"}
        found["messaging.operation.name"] = operation
        if failure is not None:
            found["error.type"] = failure
        return {**found, **more}

    def _span(
        self, instance: InstanceInfo, operation: str, kind: str, channel: str, more: Mapping[str, str]
    ) -> tuple[str, dict[str, Any]]:
        """Return the name of a span, and the attributes that all messages of a channel share."""
        found = {**_of(instance), "messaging.destination.name": channel, **more}
        if self._has_new_names:
            found |= {"messaging.operation.name": operation, "messaging.operation.type": kind}
        if self._has_old_names:
            found["messaging.operation"] = "publish" if kind == "send" else kind
        return f"{operation} {channel}" if self._has_new_names else f"{channel} {operation}", found

    def _attributes(self, shared: Mapping[str, Any], message: Message) -> dict[str, Any]:
        """Return the attributes of the span of a message."""
        found = {**shared}
        if self._has_new_names:
            found["messaging.message.body.size"] = len(message.payload)
        if self._has_old_names:
            found["messaging.message.payload_size_bytes"] = len(message.payload)
        if message.context.correlation_id is not None:
            found["messaging.message.conversation_id"] = message.context.correlation_id
        return found


def _of(instance: InstanceInfo) -> dict[str, Any]:
    """Return the attributes of an instance."""
    found: dict[str, Any] = {"messaging.system": _SYSTEMS.get(instance.scheme, instance.scheme)}
    if instance.scheme != "memory":
        found["server.address"] = instance.host
        if instance.port is not None:
            found["server.port"] = instance.port
    if instance.client_id is not None:
        found["messaging.client.id"] = instance.client_id
    return found


def _subscribed(inbound: InboundMessage) -> dict[str, str]:
    """Return the attributes of a subscription."""
    found = {"messaging.destination.template": inbound.subscription}
    return found if inbound.queue is None else {**found, "messaging.consumer.group.name": inbound.queue}


class _ProcessingSpan:
    """The span of a received message, current while it is processed."""

    __slots__ = ("_inbound", "_owner", "_span", "_start", "_token")

    def __init__(self, owner: OpenTelemetryInterceptor, inbound: InboundMessage) -> None:
        self._owner = owner
        self._inbound = inbound

    def __enter__(self) -> None:
        self._start = clock.wall_ns()
        self._span, inside = self._owner.start_processing(self._inbound)
        self._token = context.attach(inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context.detach(self._token)
        span, failure = self._span, None if error is None else type(error).__name__
        if error is None and self._inbound.outcome == "rejected":
            failure = "rejected"
        if span.is_recording():
            if error is not None:
                span.record_exception(error)
            if failure is not None:
                span.set_attribute("error.type", failure)
                span.set_status(Status(StatusCode.ERROR, failure if error is None else str(error)))
            span.end()
        self._owner.measure_processing(self._inbound, (clock.wall_ns() - self._start) / 1e9, failure)
