"""Event handlers as the bus knows them: typed, untyped and unhandled (157.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from messaging.coroutines import is_coroutine
from messaging.dispatch import (
    LaneHandler,
    Terms,
    name_of,
    parse_filter,
    read_filter,
    read_principal,
    read_timeout,
    read_topics,
)
from messaging.errors import ArgumentError, ConversionError, InvalidEventError
from messaging.safelog import SafeLog
from messaging.services import interface_name
from messaging.typedevent.constants import TypedEventConstants as Names
from messaging.typedevent.conversion import converter_to
from messaging.typedevent.event import PublishedEvent
from messaging.typedevent.handlers import (
    TypedEventHandler,
    UnhandledEventHandler,
    UntypedEventHandler,
    declared_properties,
)
from messaging.typedevent.history import last
from messaging.typedevent.reify import event_parameter, load_type, reified_type, topic_of

if TYPE_CHECKING:
    from messaging.services import ServiceReference

logger = SafeLog(__name__)

TYPED: Final = interface_name(TypedEventHandler)
UNTYPED: Final = interface_name(UntypedEventHandler)
UNHANDLED: Final = interface_name(UnhandledEventHandler)

#: the method of each interface
_METHODS: Final = {TYPED: "notify", UNTYPED: "notify_untyped", UNHANDLED: "notify_unhandled"}


class Relay:
    """Registered as an ``UntypedEventHandler``, passes events on to somewhere else.

    It gets them as they were published, and does not count as a handler: what only relays get is unhandled here.

    Args:
        receive: called with each event.
    """

    def __init__(self, receive: Callable[[PublishedEvent], object]) -> None:
        self.receive = receive


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
    declared = declared_properties(service)

    def asked(name: str) -> Any:
        return properties.get(name, declared.get(name))  # in any case, if they are those of a registration

    type_: Any = asked(Names.TYPED_EVENT_TYPE)
    if kind == TYPED:
        type_ = _read_type(service, type_)
    elif type_ is not None:
        type_ = None
        logger.warning(
            "%s is not for an %s: that of %s is ignored",
            Names.TYPED_EVENT_TYPE,
            kind.rpartition(".")[2],
            name_of(function_of(kind, service)),
        )
    history = asked(Names.TYPED_EVENT_HISTORY)
    if kind == UNHANDLED and history is not None:
        raise ArgumentError(f"{Names.TYPED_EVENT_HISTORY} is not for an UnhandledEventHandler")
    topics = read_topics(asked(Names.TYPED_EVENT_TOPICS), Names.TYPED_EVENT_TOPICS)
    if topics is None and kind == UNHANDLED:
        topics = (parse_filter("*"),)
    elif topics is None and kind == TYPED:
        topics = (parse_filter(topic_of(type_)),)
    return EventTerms(
        topics,
        read_filter(asked(Names.TYPED_EVENT_FILTER)),
        read_principal(asked(Names.TYPED_EVENT_PRINCIPAL), Names.TYPED_EVENT_PRINCIPAL),
        read_timeout(asked(Names.TYPED_EVENT_TIMEOUT), Names.TYPED_EVENT_TIMEOUT),
        _read_history(history),
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
    if isinstance(service, Relay):
        return service.receive
    method = getattr(service, _METHODS[kind], None)
    function = service if method is None else method
    if not callable(function):
        raise ArgumentError(f"a {type(service).__name__} is neither a function nor has {_METHODS[kind]}()")
    takes_topic, _ = event_parameter(function, is_method=method is not None)
    return function if takes_topic else _without_topic(function)


def _without_topic(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call_async(_: str, event: Any) -> Any:
        return await function(event)

    def call(_: str, event: Any) -> Any:
        return function(event)

    wrapper: Any = call_async if is_coroutine(function) else call
    wrapper.__qualname__ = name_of(function)
    return wrapper  # type: ignore[no-any-return]


class Receiver(LaneHandler[PublishedEvent]):
    """A handler of any kind; this one gets data in map form.

    Args:
        kind: the interface it is registered with.
        service: what is registered.
        terms: what it asks for.
        replay: called with this, with the lock of the bus, if it wants events of the history: returns them, the
            newest first, to be gone through without the lock.
        reference, options: see :class:`LaneHandler`.
    """

    terms: EventTerms

    def __init__(
        self,
        reference: ServiceReference,
        kind: str,
        service: Any,
        terms: EventTerms,
        *,
        replay: Callable[[Receiver], Iterator[PublishedEvent]],
        **options: Any,
    ) -> None:
        self.kind = kind
        self.service = service
        self.is_relay = isinstance(service, Relay)
        self._replay = replay
        super().__init__(reference, function_of(kind, service), terms, **options)

    def change(self, properties: Mapping[str, Any]) -> Callable[[], None]:
        """Take over new properties; see ``Dispatcher``. Nothing is replayed once more."""
        return self.taking_over(read_terms(self.kind, self.service, properties))

    def taking_over(self, terms: EventTerms) -> Callable[[], None]:
        """What is to be done with the lock of the dispatcher to take over other terms."""

        def take_over() -> None:
            self.terms = terms
            self.lane.timeout = self.timeout

        return take_over

    # --- history (157.4.7)

    def added(self) -> Callable[[], object]:
        """See ``LaneHandler``: what it asks of the history comes before all that is published from now on."""
        if not self.terms.history:
            return super().added()
        lane = self.lane = self.new_lane(is_held=True)
        past = self._replay(self)

        def go_on() -> None:
            first: list[PublishedEvent] = []
            try:
                first = [each.owned() for each in last(self.terms.history, filter(self.accepts, past))]
            finally:  # whatever interrupts this
                lane.release(first)

        return go_on

    # --- events

    def accepts(self, event: PublishedEvent) -> bool:
        """Whether an event passes its filter (157.4.5). On the thread that publishes."""
        wanted = self.terms.filter  # read once: an update may take it away meanwhile
        if wanted is None:
            return True
        try:
            return wanted.matches(event.as_map())
        except InvalidEventError as error:
            self._miss(event, error)
        except Exception:
            logger.exception("%s: its filter failed on %s", self.name, self.describe(event))
        return False

    def call(self, event: PublishedEvent) -> Any:
        """See ``LaneHandler``."""
        if self.is_relay:
            return self.function(event)
        try:
            data = event.as_map()
        except InvalidEventError as error:
            self._miss(event, error)
            return None
        return self.function(event.topic, data)

    def _miss(self, event: PublishedEvent, error: Exception) -> None:
        logger.error("%s does not get %s: %s", self.name, self.describe(event), error)

    def describe(self, event: PublishedEvent) -> str:
        """See ``LaneHandler``."""
        return f"an event on {event.topic!r}"


class TypedReceiver(Receiver):
    """A handler that gets instances of a type."""

    def __init__(self, reference: ServiceReference, kind: str, service: Any, terms: EventTerms, **options: Any) -> None:
        self._convert = converter_to(terms.type)
        super().__init__(reference, kind, service, terms, **options)

    def taking_over(self, terms: EventTerms) -> Callable[[], None]:
        """See ``Receiver``."""
        convert = converter_to(terms.type)  # here: pydantic may call code of the type
        take_over_rest = super().taking_over(terms)

        def take_over() -> None:
            self._convert = convert
            take_over_rest()

        return take_over

    def call(self, event: PublishedEvent) -> Any:
        """See ``LaneHandler``."""
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
