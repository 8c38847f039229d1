"""Whatever a public callable is given, it raises a ``MessagingError`` or a ``TypeError``, or does what it promises."""

from __future__ import annotations

import enum
import gc
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import pytest

import messaging
from messaging import MessageContextBuilder, Messaging, MessagingError, eventadmin, replyto, services, typedevent
from messaging.eventadmin import Event, EventAdmin
from messaging.promise import Promise
from messaging.services import ServiceRegistry
from messaging.typedevent import TypedEventBus
from tests.core.fake import PATIENCE

HUGE: Final = 10**400


class JunkError(Exception):
    """What the methods of a junk object raise: it may come out wherever they are called."""


class Hostile:
    """Whatever is done with it raises."""

    def __getattr__(self, name: str) -> Any:
        raise JunkError(name)

    def fail(self, *_: object) -> Any:
        raise JunkError

    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __call__ = __enter__ = __float__ = __index__ = fail
    __hash__ = None  # type: ignore[assignment]


class Text(str):
    """A str of another kind."""

    __slots__ = ()


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


JUNK: Final[tuple[Any, ...]] = (
    None, HUGE, -HUGE, math.nan, math.inf, -1, 0, True, b"x", b"", "", "\ud800", "x\x00", "x", Text("a/b"), [], ["x"],
    {}, {"a": 1}, {1: 2}, nested(500), object(), Hostile(), lambda: 0, Hostile,
)  # fmt: skip

#: what is given for the other parameters
GOOD: Final[dict[str, Any]] = {
    "handler": lambda _: None, "timeout": 0.01, "event": {"a": 1}, "listener": lambda _: None, "service": object(),
    "interface": "junk", "text": "(a=b)", "filter": "(a=b)",
}  # fmt: skip

#: classes that are public for their types: a registry makes their objects
MADE_HERE: Final = {"ListenerRegistration", "ServiceEvent", "ServiceReference", "ServiceRegistration"}

#: methods that wait for something else than a deadline, are asynchronous, or are for adapters and the core itself
LEFT_OUT: Final = {
    "close",
    "aclose",
    "asend_event",
    "check",
    "check_like",
    "publish_checked",
    "check_payload",
    "refresh",
}


def variants(function: Callable[..., Any], good: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Each parameter in turn, and how to call ``function`` with something for it."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:
        return
    for junk in parameters:
        if junk.kind in (junk.VAR_POSITIONAL, junk.VAR_KEYWORD):
            continue

        def call(value: Any, junk: inspect.Parameter = junk) -> Any:
            positional: list[Any] = []
            keywords: dict[str, Any] = {}
            for each in parameters:
                if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                    continue
                if each is not junk and each.default is not each.empty:
                    continue
                argument = value if each is junk else good.get(each.name, "a")
                if each.kind is each.POSITIONAL_ONLY:
                    positional.append(argument)
                else:
                    keywords[each.name] = argument
            return function(*positional, **keywords)

        yield junk.name, call


def wrong(name: str, call: Callable[[Any], Any]) -> list[str]:
    """Call with all the junk; returns what came out that must not."""
    found = []
    for value in JUNK:
        shown = f"{name} = {type(value).__name__}"
        began = time.monotonic()
        try:
            made = call(value)
            end = getattr(made, "close", None) or getattr(made, "unregister", None) or getattr(made, "dispose", None)
            if callable(end) and not isinstance(made, type):
                end()
        except (MessagingError, TypeError):
            pass
        except JunkError:
            if value is not Hostile and not isinstance(value, Hostile):
                found.append(f"{shown}: JunkError")
        except Exception as error:  # noqa: BLE001  # that is what is looked for
            found.append(f"{shown}: {type(error).__name__}: {error!s:.60}")
        if time.monotonic() - began > PATIENCE:
            found.append(f"{shown}: took {time.monotonic() - began:.1f} s")
    return found


def public_callables(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in module.__all__:
        found = getattr(module, name)
        if not callable(found) or getattr(found, "_is_protocol", False) or name in MADE_HERE:
            continue
        if isinstance(found, type) and (issubclass(found, (BaseException, enum.Enum)) or inspect.isabstract(found)):
            continue
        yield f"{module.__name__}.{name}", found


def methods(owner: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that this project has given a class."""
    for name, method in inspect.getmembers(owner, inspect.ismethod):
        if name.startswith("_") or name in LEFT_OUT or not method.__module__.startswith("messaging"):
            continue
        if inspect.iscoroutinefunction(method):
            continue
        yield f"{type(owner).__name__}.{name}", method


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def registry() -> ServiceRegistry:
    return ServiceRegistry()


@pytest.fixture
def m(registry: ServiceRegistry) -> Iterator[Messaging]:
    with messaging.connect("memory://junk", services=registry, timeout=0.2, close_timeout=0.1) as m:
        yield m


@pytest.mark.parametrize("module", [services, typedevent, eventadmin, replyto], ids=lambda module: module.__name__)
def test_constructors_and_functions(module: ModuleType, registry: ServiceRegistry) -> None:
    admin, bus = EventAdmin(registry), TypedEventBus(registry)
    good = {**GOOD, "services": registry, "admin": admin, "bus": bus}
    try:
        found = [
            problem
            for name, function in public_callables(module)
            for parameter, call in variants(function, good)
            for problem in wrong(f"{name}({parameter})", call)
        ]
    finally:
        bus.close()
        admin.close()
    assert not found, "\n".join(found)


def test_methods_of_an_instance_and_its_services(m: Messaging) -> None:
    message = MessageContextBuilder().channel("a").content(b"").build_message()
    good = {**GOOD, "message": message, "request_message": message}
    owners = [m, m.publisher, m.reply_to, m.context_builder(), m.acknowledge_context_builder(), m.connection_state]
    left_out = {"Messaging.reply", "Messaging.on", "ReplyToPublisher.prepare_many", "ConnectionStates.change"}
    found = [
        problem
        for owner in owners
        for name, method in methods(owner)
        if name not in left_out
        for parameter, call in variants(method, good)
        if parameter != "mapper"  # what a mapper raises is its user's
        for problem in wrong(f"{name}({parameter})", call)
    ]
    assert not found, "\n".join(found)


def test_methods_of_registries_and_event_services(registry: ServiceRegistry) -> None:
    admin, bus = EventAdmin(registry), TypedEventBus(registry)
    registration = registry.register("junk", object(), {})
    try:
        found = [
            problem
            for owner, good in (
                (registry, GOOD),
                (registration, GOOD),
                (bus, GOOD),
                (admin, {**GOOD, "event": Event("a/b", {})}),
            )
            for name, method in methods(owner)
            for parameter, call in variants(method, good)
            for problem in wrong(f"{name}({parameter})", call)
        ]
    finally:
        bus.close()
        admin.close()
    assert not found, "\n".join(found)


def test_times(m: Messaging, registry: ServiceRegistry) -> None:
    """Also those that do not fit into a float: they are as long as it takes."""
    stream = m.subscribe("a")
    stream.ready.result(PATIENCE)
    promise: Promise[int] = Promise("a test")
    promise.resolve(1)

    def receive(timeout: Any) -> None:
        m.publish("a", b"").result(PATIENCE)
        stream.receive(timeout)

    def pending(timeout: Any) -> None:
        later: Promise[int] = Promise("a test")
        timer = threading.Timer(0.01, later.resolve, (1,))
        timer.start()
        try:
            later.result(timeout)
        finally:
            timer.join()

    with EventAdmin(registry) as admin:
        found = [
            *wrong("receive", receive), *wrong("result", promise.result), *wrong("exception", promise.exception),
            *wrong("result of a pending one", pending),
            *wrong("send_event", lambda timeout: admin.send_event(Event("a/b", {}), timeout=timeout)),
        ]  # fmt: skip
        registry.register(eventadmin.EventHandler, lambda _: None, {"event.topics": "a/b"})
        found += wrong("send_event to a handler", lambda timeout: admin.send_event(Event("a/b", {}), timeout=timeout))
    assert not found, "\n".join(found)
    m.publish("a", b"").result(PATIENCE)
    assert stream.receive(HUGE).payload == b""
    assert promise.result(HUGE) == 1
    stream.close().result(PATIENCE)


@pytest.mark.parametrize("setting", ["url", "services", "name", "timeout", "outbox_size"])
def test_connecting(setting: str) -> None:
    def connect(value: Any) -> Messaging:
        return messaging.connect(**{"url": "memory://junk", "name": "junk", setting: value})

    found = wrong(f"connect({setting})", connect)
    assert not found, "\n".join(found)
