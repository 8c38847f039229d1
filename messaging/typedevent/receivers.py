"""Event handlers as the bus knows them: typed, untyped and unhandled (157.4)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from messaging.coroutines import is_coroutine
from messaging.dispatch.handler import (
    Handler,
    Terms,
    read_filter,
    read_principal,
    read_timeout,
    read_topics,
)
from messaging.dispatch.topics import parse_filter
from messaging.errors import ArgumentError, ConversionError, InvalidEventError
from messaging.services.registry import interface_name
from messaging.typedevent.constants import TypedEventConstants as Names
from messaging.typedevent.conversion import converter_to
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.handlers import (
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    declared_properties,
)
from messaging.typedevent.reify import load_type, parameters_of, reified_type, topic_of

if TYPE_CHECKING:
    from messaging.services import ServiceReference

logger = logging.getLogger(__name__)

TYPED: Final = interface_name(TypedEventHandler)
UNTYPED: Final = interface_name(UntypedEventHandler)
UNHANDLED: Final = interface_name(UnhandledEventHandler)

#: the method of each interface
_METHODS: Final = {TYPED: "notify", UNTYPED: "notify_untyped", UNHANDLED: "notify_unhandled"}
#: of each interface, the properties that are not for it (157.4.8)
_FORBIDDEN: Final = {
    TYPED: (),
    UNTYPED: (Names.TYPED_EVENT_TYPE,),
    UNHANDLED: (Names.TYPED_EVENT_TYPE, Names.TYPED_EVENT_HISTORY),
}


@dataclass(frozen=True, slots=True)
class EventTerms(Terms):
    """What the properties of an event handler ask for.

    Attributes:
        history: how many past events it gets first, at most.
        type: what a typed handler wants.
    """

    history: int = 0
    type: Any = None


def read_terms(kind: str, service: Any, properties: Mapping[str, Any]) -> EventTerms:
    """What a handler asks for (157.4.8).

    Args:
        kind: the interface it is registered with.
        service: what is registered.
        properties: what it is registered with; they go before what decorators say about it.

    Raises:
        ArgumentError: what is wrong with it (157.4.9).
    """
    asked = {**declared_properties(service), **properties}
    for name in _FORBIDDEN[kind]:
        if asked.get(name) is not None:
            logger.warning("%s is not for an %s: it is ignored", name, kind.rpartition(".")[2])
    type_: Any = _read_type(service, asked.get(Names.TYPED_EVENT_TYPE)) if kind == TYPED else None
    topics = read_topics(asked.get(Names.TYPED_EVENT_TOPICS), Names.TYPED_EVENT_TOPICS)
    if topics is None and kind == UNHANDLED:
        topics = (parse_filter("*"),)
    elif topics is None and kind == TYPED:
        topics = (parse_filter(topic_of(type_)),)
    return EventTerms(
        topics,
        read_filter(asked.get(Names.TYPED_EVENT_FILTER)),
        read_principal(asked.get(Names.TYPED_EVENT_PRINCIPAL), Names.TYPED_EVENT_PRINCIPAL),
        read_timeout(asked.get(Names.TYPED_EVENT_TIMEOUT), Names.TYPED_EVENT_TIMEOUT),
        0 if kind == UNHANDLED else _read_history(asked.get(Names.TYPED_EVENT_HISTORY)),
        type_,
    )


def _read_type(service: Any, named: Any) -> Any:
    if named is not None:
        return load_type(named)
    found = reified_type(service)
    if found is None:
        raise ArgumentError(
            "which type it wants is not known: it is neither a parameter of TypedEventHandler nor an annotation, "
            "and there is no event.type"
        )
    return found


def _read_history(value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(f"{Names.TYPED_EVENT_HISTORY} must be an int of at least 0, not {value!r:.80}")
    return value


def function_of(kind: str, service: Any) -> Callable[..., Any]:
    """What is to be called with topic and event: the method of the interface, or the service if it is a function.

    Raises:
        ArgumentError: it is neither, or it does not take them.
    """
    method = getattr(service, _METHODS[kind], None)
    function = service if method is None else method
    if not callable(function):
        raise ArgumentError(f"a {type(service).__name__} is neither a function nor has {_METHODS[kind]}()")
    required = len([each for each in parameters_of(function) if each.default is each.empty])
    if required > 2 or not parameters_of(function):
        raise ArgumentError(f"{_METHODS[kind]}() takes a topic and an event; this one takes {required} arguments")
    takes_topic = required == 2 or any(each.kind is each.VAR_POSITIONAL for each in parameters_of(function))
    return function if takes_topic else _without_topic(function)


def _without_topic(function: Callable[..., Any]) -> Callable[..., Any]:
    if is_coroutine(function):

        @functools.wraps(function)
        async def call_async(_: str, event: Any) -> Any:
            return await function(event)

        return call_async

    @functools.wraps(function)
    def call(_: str, event: Any) -> Any:
        return function(event)

    return call


class Receiver(Handler[PublishedEvent]):
    """A handler of any kind; this one gets data in map form.

    Args:
        kind: the interface it is registered with.
        service: what is registered.
        terms: what it asks for.
        replay: called with this, with the lock of the bus, if it wants events of the history: returns them, the
            oldest first.
        reference, options: see :class:`Handler`.
    """

    terms: EventTerms

    def __init__(
        self,
        reference: ServiceReference,
        kind: str,
        service: Any,
        terms: EventTerms,
        *,
        replay: Callable[[Receiver], list[PublishedEvent]],
        **options: Any,
    ) -> None:
        self.kind = kind
        self.service = service
        self._replay = replay
        super().__init__(reference, function_of(kind, service), terms, **options)

    def change(self, properties: Mapping[str, Any]) -> Callable[[], None]:
        """Take over new properties; see ``Dispatcher``. Nothing is replayed once more."""
        terms = read_terms(self.kind, self.service, properties)
        return lambda: self.take_over(terms)

    def take_over(self, terms: EventTerms) -> None:
        """With the lock of the dispatcher."""
        self.terms = terms
        self.lane.timeout = self.timeout

    # --- history (157.4.7)

    def added(self) -> Callable[[], object]:
        """See ``Handler``: what it asks of the history comes before all that is published from now on."""
        if not self.terms.history:
            return super().added()
        lane = self.lane = self.new_lane(is_held=True)
        past = self._replay(self)

        def go_on() -> None:
            fitting = islice((event for event in reversed(past) if self.accepts(event)), self.terms.history)
            lane.release([event.copy() for event in fitting][::-1])

        return go_on

    # --- events

    def accepts(self, event: PublishedEvent) -> bool:
        """Whether an event passes its filter (157.4.5). On the thread that publishes."""
        if self.terms.filter is None:
            return True
        try:
            return self.terms.filter.matches(event.as_map())
        except InvalidEventError as error:
            self._miss(event, error)
        except Exception:
            logger.exception("%s: its filter failed on %s", self.name, self.describe(event))
        return False

    def call(self, event: PublishedEvent) -> Any:
        """See ``Handler``."""
        try:
            data = event.as_map()
        except InvalidEventError as error:
            self._miss(event, error)
            return None
        return self.function(event.topic, data)

    def _miss(self, event: PublishedEvent, error: Exception) -> None:
        logger.error("%s does not get %s: %s", self.name, self.describe(event), error)

    def describe(self, event: PublishedEvent) -> str:
        """See ``Handler``."""
        return f"an event on {event.topic!r}"


class TypedReceiver(Receiver):
    """A handler that gets instances of a type."""

    def __init__(self, reference: ServiceReference, kind: str, service: Any, terms: EventTerms, **options: Any) -> None:
        self._convert = converter_to(terms.type)
        super().__init__(reference, kind, service, terms, **options)

    def take_over(self, terms: EventTerms) -> None:
        """See ``Receiver``."""
        self._convert = converter_to(terms.type)
        super().take_over(terms)

    def call(self, event: PublishedEvent) -> Any:
        """See ``Handler``."""
        data = event.data
        if data.__class__ is not self.terms.type:
            try:
                data = event.converted(self._convert)
            except (ConversionError, InvalidEventError) as error:
                self._miss(event, error)
                return None
        return self.function(event.topic, data)


def make(
    reference: ServiceReference, kind: str, service: Any, properties: Mapping[str, Any], **options: Any
) -> Receiver:
    """What the bus knows of a handler. Raises ``ArgumentError`` if anything about it is wrong (157.4.9)."""
    class_ = TypedReceiver if kind == TYPED else Receiver
    return class_(reference, kind, service, read_terms(kind, service, properties), **options)
