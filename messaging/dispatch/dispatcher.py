"""All handlers of one bus: they come, change and go with their registrations, and are found by topic.

**Threads and the lock.** What the registry tells is taken in where it tells it. One lock guards the handlers, what is
found by topic, and what a bus has beside them (its history, say); no user code runs with it, and publishing takes it
only where the bus says so. *Routes*, what a bus has to know to publish to one topic, are made on first use, with the
lock, and remembered until anything changes that they depend on; then all are forgotten at once, in one step.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from messaging.dispatch.permission import TopicPermission, check_principal
from messaging.dispatch.topics import TopicTrie, check_topic
from messaging.errors import ClosedError, PermissionDeniedError
from messaging.execution import Promise
from messaging.services import ServiceEvent, ServiceEventKind
from messaging.services.registry import interface_name
from messaging.text import SafeLog

if TYPE_CHECKING:
    from messaging.dispatch.handler import Handler
    from messaging.dispatch.permission import Principal, TopicPolicy
    from messaging.dispatch.topics import TopicFilter
    from messaging.execution import Lane
    from messaging.services import ServiceProperties, ServiceReference, ServiceRegistry

logger = SafeLog(__name__)

H = TypeVar("H", bound="Handler[Any]")
R = TypeVar("R")

#: topics whose routes are remembered
_ROUTES: Final = 65_536
#: answers of the policy that are remembered
_ANSWERS: Final = 65_536

#: which handler it is: its service, and the interface it is known by
_Key = tuple["ServiceReference", str]


class Dispatcher(Generic[H, R]):
    """Finds handlers and routes. Thread safe.

    Args:
        name: of the bus, for the log.
        services: where handlers are registered.
        interfaces: which interfaces they are registered with.
        make: makes a handler from its service, interface and properties; raises what is wrong with them. ``None`` if
            it is meant for somebody else.
        change: takes over new properties of a handler: returns what is to be done with the lock, or raises what is
            wrong with them. ``None`` if it is meant for somebody else, now.
        route: makes the route of a topic from the handlers that match it, are not blocked and may have it, the
            preferred first. Called without the lock.
        policy: who may publish and subscribe; everybody, if there is none.
    """

    def __init__(
        self,
        name: str,
        services: ServiceRegistry,
        interfaces: Iterable[type[Any]],
        *,
        make: Callable[[ServiceReference, str, ServiceProperties], H | None],
        change: Callable[[H, ServiceProperties], Callable[[], object] | None],
        route: Callable[[str, list[H]], R],
        policy: TopicPolicy | None = None,
    ) -> None:
        self.name = name
        self.services = services
        #: a thread may take it again: of finalizers and signal handlers nobody knows when they run
        self.lock = threading.RLock()
        #: by topic; replaced when anything changes. A publisher that finds its topic here need not look any further
        self.routes: dict[str, R] = {}
        self.is_closed = False
        self._interfaces = [interface_name(each) for each in interfaces]
        self._make = make
        self._change = change
        self._route = route
        self.policy = policy
        self._handlers: dict[_Key, H] = {}
        self._trie: TopicTrie[H] = TopicTrie()
        self._answers: dict[tuple[Principal, str, str], bool] = {}
        self._watches: list[Any] = []
        self._stop_watching: Callable[[], object] | None = None
        _dispatchers.add(self)

    # --- handlers come, change and go

    def open(self) -> None:
        """Take in what is registered, and what will be."""
        if self.policy is not None:
            self._stop_watching = self.policy.on_change(self._policy_changed)
        for name in self._interfaces:
            self._watches.append(self.services.add_listener(partial(self._event, name), name))
            for reference in self.services.find(name):
                self._add((reference, name))

    def close(self) -> list[H]:
        """Let go of all handlers, and take in no more; returns them."""
        for watch in self._watches:
            watch.remove()
        if self._stop_watching is not None:
            self._stop_watching()
        with self.lock:
            self.is_closed = True
            left = [*self._handlers.values()]
            self._handlers.clear()
            self._trie = TopicTrie()
            self.forget()
        return left

    def handlers(self) -> list[tuple[str, H]]:
        """All of them, with their interfaces."""
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
            try:
                handler = self._make(reference, name, properties)
            except Exception as error:  # noqa: BLE001  # of a factory of the application, say
                handler = None
                self._complain(reference, error)
            with self.lock:
                if self.is_closed or key in self._handlers or not self.services.is_registered(reference):
                    return
                if reference.properties is not properties:
                    continue  # changed by another thread while this one was looking
                if handler is None:
                    return
                self._handlers[key] = handler
                self._place(handler)
                go_on = handler.added()
            go_on()
            return

    def _update(self, key: _Key) -> None:
        """Whatever was wrong with it, it is given another chance (157.4.6)."""
        reference, _ = key
        while True:
            properties = reference.properties
            handler = self._handlers.get(key)
            if handler is None:
                return
            try:
                change = self._change(handler, properties)
            except Exception as error:  # noqa: BLE001
                change = None
                self._complain(reference, error)
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

    def _complain(self, reference: ServiceReference, error: Exception) -> None:
        logger.error("%s: the handler %r is ignored: %s", self.name, reference, error)

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

    def _displace(self, handler: H, topics: Iterable[TopicFilter]) -> None:
        for each in topics:
            self._trie.remove(each, handler)
        self.forget()

    def block(self, handler: H, lane: Lane, reason: str) -> None:
        """Give a handler no more events, until its registration is updated. From any thread.

        Args:
            handler: which one.
            lane: that it misbehaved on; if it has another one by now, nothing happens.
            reason: why, in words that follow "is blocked:".
        """
        with self.lock:
            if handler.blocked is not None or handler.lane is not lane or not handler.is_registered:
                return
            handler.blocked = reason
            self.forget()
        lost = handler.give_up(lane)
        logger.error(
            "%s: the handler %s for %s is blocked: %s. %d events that waited for it are dropped. An update of its "
            "registration unblocks it",
            self.name,
            handler.name,
            ", ".join(each.text for each in handler.topics),
            reason,
            lost,
        )

    # --- routes

    def route(self, topic: str) -> R:
        """The route of a topic.

        Raises:
            NullEventError, InvalidTopicError: it is no topic.
        """
        topic = check_topic(topic)
        routes = self.routes  # first: what is made from now on may already be out of date, and then goes with them
        found = routes.get(topic)
        if found is not None:
            return found
        with self.lock:  # not in the middle of an update: a handler may have the topic by another filter then
            found_by_topic = self._trie.match(topic)
        handlers = [
            each
            for each in found_by_topic
            if each.blocked is None and self.may(each.terms.principal, TopicPermission.SUBSCRIBE, topic)
        ]
        handlers.sort(key=lambda each: each.order)
        made = self._route(topic, handlers)
        if len(routes) >= _ROUTES:
            routes.clear()  # not replaced: if they are out of date, what was made just now is, too
        routes[topic] = made
        return made

    def forget(self) -> None:
        """Something changed that routes depend on. After the change, so that none is made of what was before."""
        self.routes = {}

    # --- permissions

    def may(self, principal: Principal, action: str, topic: str) -> bool:
        """Whether a principal may do that with a topic."""
        if self.policy is None:
            return True
        answers = self._answers
        key = principal, action, topic
        answer = answers.get(key)
        if answer is None:
            answer = self.policy.permits(principal, TopicPermission(topic, action))
            if len(answers) >= _ANSWERS:
                answers.clear()  # see route()
            answers[key] = answer
        return answer

    def check(self, principal: Principal, action: str, topic: str) -> None:
        """Refuse what a principal may not do.

        Raises:
            PermissionDeniedError: it may not do that with the topic.
            ArgumentError: it is none.
        """
        principal = check_principal(principal)
        if not self.may(principal, action, topic):
            who = "whoever gives no principal" if principal is None else f"the principal {principal!r}"
            raise PermissionDeniedError(f"{self.name}: {who} may not {action} {topic!r}")

    def _policy_changed(self) -> None:
        self._answers = {}
        self.forget()

    # --- waiting

    def refuse_closed(self) -> None:
        """Refuse what nobody would get any more.

        Raises:
            ClosedError: the bus is closed.
        """
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed")


def when_all_done(lanes: Iterable[Lane], what: str) -> Promise[None]:
    """Resolves when what is in the lanes now is done with, or given up."""
    promise: Promise[None] = Promise(what)
    # nobody waits for what a receiver that was given up still does: it may never end
    several = [each for each in {*lanes} if (len(each) or each.is_scheduled) and not each.is_closed]
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


_dispatchers: weakref.WeakSet[Dispatcher[Any, Any]] = weakref.WeakSet()


def _after_fork() -> None:
    """Whoever held a lock is the parent's."""
    for dispatcher in [*_dispatchers]:
        dispatcher.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
