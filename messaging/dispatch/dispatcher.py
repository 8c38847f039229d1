"""The handlers of one bus: added, changed and removed with their registrations, and found by topic.

**Threads and the lock.** Registry events are processed on the thread that caused them. One lock guards the handlers,
the topics, and the state that a bus keeps beside them, such as its history. No user code runs with the lock. Publishing
takes it only where the bus says so. *Routes* hold all that a bus needs to publish to one topic. They are made on first
use and remembered until a change affects them; then all of them are forgotten in one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from messaging.codecs.cache import BoundedCache
from messaging.dispatch.handler import DispatchHandler, Terms
from messaging.dispatch.permission import Principal, TopicPermission, TopicPolicy, check_principal, denied
from messaging.dispatch.topics import TYPED_EVENTS, AbstractTopicFilter, TopicGrammar, TopicIndex
from messaging.environment.forks import LiveObjects
from messaging.errors import ArgumentError, ClosedError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog
from messaging.execution import Lane, Promise
from messaging.services import ServiceEvent, ServiceEventKind, as_filter, interface_name

if TYPE_CHECKING:
    from messaging.services import ServiceProperties, ServiceReference, ServiceRegistration, ServiceRegistry

logger = SafeLog(__name__)

H = TypeVar("H", bound="DispatchHandler[Any]")
R = TypeVar("R")
T = TypeVar("T")

#: maximum number of remembered routes
_ROUTES: Final = 65_536
#: maximum number of remembered permission checks
_ANSWERS: Final = 65_536

#: property of a handler: LDAP filter over the properties of the buses that it is for
_TARGET: Final = "event.target"

#: identifies a handler: its service, and the interface it is registered with
_Key = tuple["ServiceReference", str]


class Dispatcher(Generic[H, R]):
    """Finds handlers and routes by topic. Thread safe.

    Args:
        name: name of the bus in the log.
        services: registry of the handlers.
        interfaces: interfaces that handlers are registered with.
        announced: properties of the bus, by which handlers select it (``event.target``).
        make: returns a handler for its service, interface and properties, or ``None`` if its service is gone. Raises if
            they are invalid.
        route: makes the route of a topic from the unblocked handlers that match it and may subscribe to it, the
            preferred first, each with the terms by which it does: an update may give it others meanwhile. Called
            without the lock.
        policy: grants publishing and subscribing; without a policy all principals may do both.
        grammar: of the topics, and of the topic filters of the handlers.

    Raises:
        ArgumentError: ``grammar`` is no grammar, or the policy has another one.
    """

    def __init__(
        self,
        name: str,
        services: ServiceRegistry,
        interfaces: Iterable[type[Any]],
        *,
        announced: Mapping[str, Any],
        make: Callable[[ServiceReference, str, ServiceProperties], H | None],
        route: Callable[[str, list[tuple[H, Any]]], R],
        policy: TopicPolicy | None = None,
        grammar: TopicGrammar[Any] = TYPED_EVENTS,
    ) -> None:
        check_instance("grammar", grammar, TopicGrammar)
        if policy is not None and policy.grammar is not grammar:  # it would refuse everything
            raise ArgumentError(f"{name}: needs a TopicPolicy of the grammar {grammar}, not of {policy.grammar}")
        self.name = name
        self.services = services
        #: reentrant: finalizers and signal handlers may need it on a thread that holds it
        self.lock = threading.RLock()
        #: by topic; replaced at every change. Publishers look here first, and call :meth:`route` on a miss
        self.routes: BoundedCache[str, R] = BoundedCache(_ROUTES)
        self.is_closed = False
        #: called when routes are forgotten, perhaps with the lock: it must neither wait nor call user code
        self.on_change: Callable[[], object] | None = None
        self.policy = policy
        self.grammar = grammar
        self._interfaces = [interface_name(each) for each in interfaces]
        self._announced = announced
        self._make = make
        self._route = route
        self._handlers: dict[_Key, H] = {}
        self._trie: TopicIndex[Any, H] = grammar.new_index()
        self._answers: BoundedCache[tuple[Principal, str, str], bool] = BoundedCache(_ANSWERS)
        self._watches: list[Any] = []
        self._stop_watching: Callable[[], object] | None = None
        _dispatchers.add(self)

    def after_fork(self) -> None:
        """Replace the lock, which a thread of the parent process may hold. See ``Forkable``."""
        self.lock = threading.RLock()

    def register(
        self, interface: type[Any], handler: Any, properties: Mapping[str, Any], terms: Terms
    ) -> ServiceRegistration:
        """Register a handler whose properties say ``terms``.

        Raises:
            PermissionDeniedError: its principal may not subscribe to a topic that has no wildcard.
        """
        for each in terms.topics or ():
            if not each.has_wildcard:
                self.check(terms.principal, TopicPermission.SUBSCRIBE, each.text)
        return self.services.register(interface, handler, properties)

    # --- handlers are added, changed and removed

    def open(self) -> None:
        """Add the registered handlers, and those registered from now on."""
        if self.policy is not None:
            self._stop_watching = self.policy.on_change(self._policy_changed)
        for name in self._interfaces:
            self._watches.append(self.services.add_listener(partial(self._event, name), name))
            for reference in self.services.find(name):
                self._add((reference, name))

    def close(self) -> None:
        """Forget all handlers and add no more."""
        for watch in self._watches:
            watch.remove()
        if self._stop_watching is not None:
            self._stop_watching()
        with self.lock:
            self.is_closed = True
            self.on_change = None  # a queue of the service keeps the events of its handlers until it runs again
            self._handlers.clear()
            self._trie = self.grammar.new_index()
            self.forget()

    def handlers(self) -> list[tuple[str, H]]:
        """Return all handlers with their interfaces."""
        with self.lock:
            return [(name, handler) for (_, name), handler in self._handlers.items()]

    def _event(self, name: str, event: ServiceEvent) -> None:
        key = event.reference, name
        if event.kind is ServiceEventKind.UNREGISTERING:
            self._remove(key)
        elif key in self._handlers:
            self._update(key)
        else:
            self._add(key)

    def _add(self, key: _Key) -> None:
        reference, name = key
        while True:
            properties = reference.properties
            handler = self._attempt(reference, properties, partial(self._make, reference, name))
            with self.lock:
                if self.is_closed or key in self._handlers or not self.services.is_registered(reference):
                    return
                if reference.properties is not properties:
                    continue  # another thread changed them meanwhile
                if handler is None:
                    return
                self._handlers[key] = handler
                self._place(handler)
                finish = handler.added()
            finish()
            return

    def _update(self, key: _Key) -> None:
        """Apply new properties, and unblock the handler (157.4.6)."""
        reference, _ = key
        while True:
            properties = reference.properties
            handler = self._handlers.get(key)
            if handler is None:
                return
            change = self._attempt(reference, properties, handler.change)
            if change is None:
                self._remove(key)
                return
            with self.lock:
                if self._handlers.get(key) is not handler:
                    return
                if reference.properties is not properties:
                    continue
                before = handler.topics
                change()
                if handler.blocked is not None:
                    handler.unblock()
                self._place(handler)
                self._displace(handler, [each for each in before if each not in handler.topics])
            return

    def _attempt(
        self, reference: ServiceReference, properties: ServiceProperties, call: Callable[[ServiceProperties], T]
    ) -> T | None:
        """Return the result of ``call``, or ``None`` if the handler is for another bus.

        If ``call`` raises, log that the handler is ignored and return ``None``.
        """
        try:
            target = as_filter(properties.get(_TARGET))
            return call(properties) if target is None or target.matches(self._announced) else None
        except Exception as error:  # noqa: BLE001  # a factory of the application may raise anything
            logger.error("%s: the handler %r is ignored: %s", self.name, reference, error)
            return None

    def _remove(self, key: _Key) -> None:
        with self.lock:
            handler = self._handlers.pop(key, None)
            if handler is None:
                return
            handler.is_registered = False
            self._displace(handler, handler.topics)
        handler.removed()

    def _place(self, handler: H) -> None:
        for each in handler.topics:
            self._trie.add(each, handler)
        self.forget()

    def _displace(self, handler: H, topics: Iterable[AbstractTopicFilter]) -> None:
        for each in topics:
            self._trie.remove(each, handler)
        self.forget()

    def block(self, handler: H, lane: Lane, reason: str) -> None:
        """Deliver no more events to a handler until its registration is updated. From any thread.

        Args:
            handler: the handler.
            lane: the lane it misbehaved on; nothing happens if it has another one now.
            reason: follows "is blocked:" in the log.
        """
        with self.lock:
            if handler.blocked is not None or handler.lane is not lane or not handler.is_registered:
                return
            handler.blocked = reason
            self.forget()
        lost = handler.discard_waiting(lane)
        logger.error(
            "%s: the handler %s for %s is blocked: %s; %d events that waited for it are dropped; update its "
            "registration to unblock it",
            self.name, handler.name, ", ".join(each.text for each in handler.topics), reason, lost,
        )  # fmt: skip

    # --- routes

    def route(self, topic: str) -> R:
        """Return the route of a topic; made and remembered if necessary. Raises the errors of ``check_topic``."""
        topic = self.grammar.check_topic(topic)
        routes = self.routes  # read first: a change meanwhile replaces them, and the route made here goes with them
        found = routes.get(topic)
        if found is not None:
            return found
        with self.lock:  # not in the middle of an update: a handler may have the topic by another filter then
            matching = [(each, each.terms) for each in self._trie.match(topic)]
        handlers = [
            (each, terms)
            for each, terms in matching
            if each.blocked is None and self.may(terms.principal, TopicPermission.SUBSCRIBE, topic)
        ]
        handlers.sort(key=lambda each: each[0].order)
        made = self._route(topic, handlers)
        routes[topic] = made
        return made

    def forget(self) -> None:
        """Forget all routes. To be called after a change that affects them, so that none is made of older state."""
        with self.lock:
            self.routes = BoundedCache(_ROUTES)
            if self.on_change is not None:
                self.on_change()

    # --- permissions

    def may(self, principal: Principal, action: str, topic: str) -> bool:
        """Return whether ``principal`` may take ``action`` on ``topic``."""
        if self.policy is None:
            return True
        answers = self._answers
        key = principal, action, topic
        answer = answers.get(key)
        if answer is None:
            answer = self.policy.permits(principal, TopicPermission(topic, action, self.grammar))
            answers[key] = answer
        return answer

    def check(self, principal: Principal, action: str, topic: str) -> None:
        """Refuse an action that a principal may not take.

        Raises:
            PermissionDeniedError: ``principal`` may not take ``action`` on ``topic``.
            ArgumentError: ``principal`` is neither a str nor ``None``.
        """
        principal = check_principal(principal)
        if not self.may(principal, action, topic):
            raise denied(principal, action, topic, by=self.name)

    def _policy_changed(self) -> None:
        self._answers = BoundedCache(_ANSWERS)
        self.forget()

    # --- waiting

    def refuse_closed(self) -> None:
        """Raise ``ClosedError`` if the bus is closed."""
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed")


def when_all_done(lanes: Iterable[Lane], what: str) -> Promise[None]:
    """Return a promise that resolves when every item now in ``lanes`` has been processed or dropped."""
    promise: Promise[None] = Promise(what)
    # a closed lane is not waited for: its abandoned receiver may never return
    several = [each for each in dict.fromkeys(lanes) if (len(each) or each.is_scheduled) and not each.is_closed]
    if not several:
        promise.resolve(None)
        return promise
    lock = threading.Lock()  # guards left
    left = len(several)

    def reached() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            promise.resolve(None)

    for lane in several:
        lane.when_done(reached)
    return promise


_dispatchers: Final = LiveObjects[Dispatcher[Any, Any]]()
