"""Whatever a public callable is given, it raises a ``MessagingError`` or a ``TypeError``, or does what it promises.

The callables are found: the constructors and functions in ``__all__`` of every public package, and the methods of
every object that an application can reach from an instance, a bus, an admin and a registry: by public attributes, and
as results of methods. A new one is covered without a change here.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import importlib.util
import inspect
import logging
import math
import pkgutil
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import pytest

import messaging
import messaging_adapters
import pyspark_messaging
from messaging import MessageContextBuilder, Messaging, MessagingError, eventadmin, gateway
from messaging.cloudevents import events as cloud_events
from messaging.distributedeventing import DistributedEventAdmin, EventSigning, SigningKey
from messaging.eventadmin import Event, EventAdmin
from messaging.execution import Promise
from messaging.journal import Journal
from messaging.leases import Landlord, LeaseRenewalManager
from messaging.model import keywords
from messaging.model.settings import Settings
from messaging.observability.monitor import SnapshotPublisher
from messaging.remoteevent import (
    EventCorrelator,
    EventGenerator,
    EventMailbox,
    EventServer,
    ListenerReference,
    MailboxServer,
    NotificationFilter,
    RemoteEvent,
    RemoteGenerator,
    RemoteMailbox,
    StoreAndForwardAgent,
)
from messaging.remoteevent.transactions import RemoteTransactionManager, TransactionManager, TransactionServer
from messaging.replyto import DeferredReply
from messaging.services import LdapFilter, ServiceRegistry
from messaging.sparkplug import Reading
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from messaging.typedevent import TypedEventBus

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

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

#: values for the parameters that get no junk, by name; a str for those that are not named
GOOD: Final[dict[str, Any]] = {
    "handler": lambda _: None, "timeout": 0.01, "event": {"a": 1}, "listener": lambda _: None, "service": object(),
    "interface": "junk", "text": "(a=b)", "filter": "(a=b)", "factory": MessageContextBuilder, "function": print,
    "properties": {"a": 1}, "callback": lambda _: None, "topic": "a/b", "payload": b"1", "actions": "publish",
    "start": datetime(2026, 1, 1, tzinfo=UTC), "end": datetime(2026, 1, 2, tzinfo=UTC),
}  # fmt: skip

#: parameters that are given though they have a default: without them, the others are not looked at yet
GIVEN: Final = {"handler"}

#: methods that serve other modules of this project, and are given what those have made
INTERNAL: Final[dict[str, set[str]]] = {
    "AcknowledgeMessageContext": {"settle", "settle_invalid"},
    "ConnectionStates": {"change", "abandon"},
    "BatchListener": {"deliver", "notify"},  # called by generators
    "Bridge": {"generate", "open"},  # called by sources of events
    "BusConnection": {
        "member_lost", "offer", "receive", "refresh", "sends", "wanted", "batch_received",
    },
    "Cursor": {"read"},  # waits for a record
    "DistributedEventAdmin": {"node"},
    "EventAdmin": {"check"},
    "EventGenerator": {"publish"},
    "EventService": {"dispatcher", "lanes", "open", "pool", "publishing", "sending", "tolerance"},
    "Gateway": {"run", "run_until_stopped", "start"},  # they connect, or wait for stop()
    "GrantedLease": {"note_answered"},
    "Journal": {"put"},
    "JournalView": {"stored"},
    "Landlord": {"cancel_ids", "renew_ids"},
    "Lease": {"note_answered", "note_asked", "note_cancelled", "note_granted"},
    "ListenerRegistration": {"deliver"},
    "MailboxRegistration": {"accept", "delivery", "pass_over", "read"},
    "MessagePublisher": {
        "announce", "chain", "check_payload", "compile", "extended", "intercepted", "open", "outbox", "override",
        "publish_checked", "readdress", "refresh", "restore", "stamp",
    },
    "MessageServiceRuntime": {"bind"},
    "MessageSubscription": {"check", "open_handler", "open_joint", "open_requests"},
    "OutboxTables": {"position"},
    "Promise": {"abandon", "call_listeners", "listen", "reject", "resolve"},
    "Publication": {"confirm", "fail", "sent", "unfinished"},
    "Push": {"start", "stop", "wake"},
    "Request": {"unsent"},
    "ReplyToPublisher": {"prepare_many"},
    "ReplyToWhiteboard": {"routes", "close", "open", "ready", "refresh"},
    "TypedEventMonitor": {"close", "dispatcher", "pool", "taps"},
    "RemoteEventIterator": {"batch", "next", "next_soon"},  # wait for an event
    "RemoteObject": {"call"},
    "RemoteParty": {"reach"},
    "RemoteTransactionManager": {"waiting"},
    "RetryPolicy": {"delay_after", "is_exhausted"},
    "Settings": {"for_options", "settings_customise_sources"},
    "StoreAndForwardAgent": {"deliver", "notify"},
    "TransactionManager": {"watch"},
    "_Watcher": {"tell"},
}  # fmt: skip

#: methods that end an object: each call gets an object of its own
ENDING: Final = {"close", "aclose", "dispose", "unregister", "remove", "cancel"}

#: methods that wait for a message or an outcome, without end unless they are told: see test_times
WAITING: Final = {"exception", "receive", "result"}

#: parameters that take a function of the application which is called at once: its exceptions are its own
CALLED: Final = {"mapper"}


#: takes strings alone, and ends the process
COMMAND_LINE: Final = "messaging.cli"


def public_packages() -> Iterator[str]:
    """The packages and modules that list their public names."""
    for package in (messaging, messaging_adapters, pyspark_messaging):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if each.name.startswith("messaging.testing"):  # tests, and tools for tests
                continue
            spec: Any = importlib.util.find_spec(each.name)
            if "\n__all__ = " in spec.loader.get_source(each.name) and each.name != COMMAND_LINE:
                yield each.name
    yield "messaging"


PACKAGES: Final = tuple(public_packages())

PUBLIC: Final = {
    name: getattr(module, name) for module in map(importlib.import_module, PACKAGES) for name in module.__all__
}


INTERNAL_CLASSES: Final = {
    name
    for module in [*sys.modules.values()]
    if module.__name__.split(".")[0] in ("messaging", "messaging_adapters", "pyspark_messaging")
    for name, value in vars(module).items()
    if isinstance(value, type) and value.__module__ == module.__name__ and name not in PUBLIC
}

#: classes that are public for their types: a registry makes their objects
MADE_HERE: Final = {
    "CursorDTO",
    "DamagedRange",
    "DeadLetter",
    "EventSubscription",
    "GrantedLease",
    "Info",
    "JournalDTO",
    "Lease",
    "ListenerRegistration",
    "Plan",
    "PlannedFlow",
    "Record",
    "ServiceEvent",
    "ServiceReference",
    "ServiceRegistration",
}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except ValueError:  # of a builtin type, or derived from one
        return []


def is_made_here(kind: type) -> bool:
    """Whether this project calls a constructor: applications have nothing that it takes."""
    annotations = [str(each.annotation) for each in parameters_of(kind)]
    if issubclass(kind, Settings):
        return False
    return kind.__name__ in MADE_HERE or not INTERNAL_CLASSES.isdisjoint(re.findall(r"\w+", " ".join(annotations)))


def variants(function: Callable[..., Any], good: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Each parameter in turn, and how to call ``function`` with something for it."""
    parameters = parameters_of(function)
    is_special = isinstance(function, type) and issubclass(function, Settings) and function is not Settings
    inherited = Settings.model_fields if is_special else {}
    junk: list[tuple[str, inspect.Parameter]] = []
    for each in parameters:
        if each.name in inherited:  # see test_settings_that_every_adapter_has
            continue
        if each.kind is not each.VAR_KEYWORD:
            junk.append((each.name, each))
        elif typed := re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation)):
            junk += [(name, each) for name in getattr(keywords, typed[1]).__annotations__]
    for name, chosen in junk:

        def call(value: Any, name: str = name, chosen: inspect.Parameter = chosen) -> Any:
            positional: list[Any] = []
            named: dict[str, Any] = {}
            for each in parameters:
                if each is chosen:
                    argument = value
                elif each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or (
                    each.default is not each.empty and each.name not in GIVEN
                ):
                    continue
                else:
                    argument = good.get(each.name, "a")
                if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
                    positional.append(argument)
                else:
                    named[name if each is chosen else each.name] = argument
            return function(*positional, **named)

        if name not in CALLED:
            yield name, call


def wrong(name: str, call: Callable[[Any], Any]) -> list[str]:
    """Call with all the junk; returns what came out that must not."""
    found: dict[str, list[str]] = {}
    for value in JUNK:
        began = time.monotonic()
        problem = None
        try:
            made = call(value)
            if is_own(type(made)) and not repr(made).isprintable():
                problem = "its repr cannot be printed"
            for end in ("close", "unregister", "dispose"):
                if not isinstance(made, type) and callable(getattr(made, end, None)):
                    getattr(made, end)()
                    break
        except (MessagingError, TypeError):
            pass
        except JunkError:
            if value is not Hostile and not isinstance(value, Hostile):
                problem = "JunkError"
        except Exception as error:  # noqa: BLE001  # this test looks for them
            problem = f"{type(error).__name__}: {error!s:.60}"
        if time.monotonic() - began > PATIENCE:
            problem = f"took {time.monotonic() - began:.1f} s"
        if problem is not None:
            found.setdefault(problem, []).append(type(value).__name__)
    return [f"{name} = {', '.join(values)}: {problem}" for problem, values in found.items()]


def listed(found: list[str]) -> str:
    """The problems, a line each, in a form that pytest can pass from one process to another: junk is not all UTF-8."""
    return "\n".join(found).encode("ascii", "backslashreplace").decode("ascii")


#: rooms whose public objects have internal ones as attributes
ROOMS_OF_STORES: Final = ("messaging.journal", "messaging.leases", "messaging.remoteevent", "messaging.gateway")


def is_own(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("messaging", "messaging_adapters", "pyspark_messaging")


def is_reachable(kind: type) -> bool:
    """Whether objects of a class of this project are given to applications."""
    return is_own(kind) and (kind in PUBLIC.values() or not kind.__module__.startswith(ROOMS_OF_STORES))


def methods(owner: Any) -> Iterator[str]:
    """The public methods that this project has given a class."""
    kind = type(owner)
    left_out = {name for each in kind.__mro__ for name in INTERNAL.get(each.__name__, ())} | {"after_fork"}
    for name in dir(kind):
        method = getattr(kind, name, None)
        plain = getattr(method, "__func__", method)
        if name.startswith("_") or name in left_out or not isinstance(plain, FunctionType):
            continue
        if plain.__module__.split(".")[0] in ("messaging", "messaging_adapters", "pyspark_messaging"):
            yield name


def attributes(owner: Any) -> Iterator[Any]:
    """The values of its public attributes."""
    left_out = {name for each in type(owner).__mro__ for name in INTERNAL.get(each.__name__, ())}
    for name in {*dir(type(owner)), *getattr(owner, "__dict__", {})} - left_out:
        if name.startswith("_"):
            continue
        with contextlib.suppress(AttributeError):
            value = getattr(owner, name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def ends(kind: type, name: str) -> bool:
    """Whether a method ends its object; ``cancel`` and ``remove`` of a landlord or a server end what they are given."""
    return name in ENDING and not (name in ("cancel", "remove") and kind.__module__.startswith(ROOMS_OF_STORES))


def takes_nothing(method: Callable[..., Any]) -> bool:
    return all(each.default is not each.empty for each in inspect.signature(method).parameters.values())


class World:
    """One object of every kind that an application can reach, and what its methods take.

    Args:
        wanted: the only kind that is wanted: no other objects are made once there is one.
    """

    def __init__(self, wanted: type | None = None) -> None:
        self._stack = contextlib.ExitStack()
        keep = self._stack.enter_context
        self.registry = ServiceRegistry()
        m = messaging.connect("memory://junk", services=self.registry, timeout=0.2, close_timeout=0.1)
        self._stack.callback(m.close)
        bus, admin = keep(TypedEventBus(self.registry)), keep(EventAdmin(self.registry))
        distributed = keep(DistributedEventAdmin(ServiceRegistry()))
        stream, lost = m.subscribe("world"), m.subscribe("a")
        stream.ready.result(PATIENCE)
        m.publish("world", b"1").result(PATIENCE)
        received = stream.receive(PATIENCE)
        message = MessageContextBuilder().channel("a").content(b"").build_message()
        event = Event("a/b", {})
        seeds = [
            m, bus, admin, self.registry, stream, lost, received, message, event, LdapFilter("(a=b)"),
            m.on("handled", lambda _: None), m.reply("served", lambda _: b""), m.request("served", b""),
            m.request_many("served", b""), stream.subscribe(lambda _: None),
            self.registry.register("junk", object(), {}), self.registry.add_listener(lambda _: None),
            bus.create_publisher("a/b"), m.publish("a", b""), messaging.Credentials("user", "password"),
            bus.connect(m, "junk/*"), distributed, distributed.create_session("a/b"),
            distributed.create_subscription("a/b"), EventSigning(SigningKey.hmac("key", "s" * 32)),
            DeferredReply(m.publish("a", b"")), cloud_events(m.subscribe("cloud")), SnapshotPublisher(m),
            Reading("plant", "node", None, "temperature", None, None, None),
        ]  # fmt: skip
        self.good: dict[str, Any] = {
            **GOOD, "services": self.registry, "admin": admin, "bus": bus, "monitor": bus.monitor,
            "instance": m, "m": m, "message": message, "request_message": message,
            "context": received.context, "reference": self.registry.find("junk")[0],
        }  # fmt: skip
        self.good_of_admin = {**self.good, "event": event}
        self.good_of_stores = self.good
        if wanted is None or wanted.__module__.startswith(ROOMS_OF_STORES):
            self.good_of_stores, parties = self._remote_events(m)
            seeds += parties
        self.objects: dict[type, Any] = {}
        for each in seeds:
            self._add(each)
        if wanted in self.objects:
            return
        for package in PACKAGES:
            for _, kind in constructors_and_functions(package):
                if isinstance(kind, type) and kind not in self.objects:
                    self._construct(kind)
        for owner in [*self.objects.values()]:
            for name in methods(owner):
                method = getattr(owner, name)
                if name not in ENDING | WAITING and not inspect.iscoroutinefunction(method) and takes_nothing(method):
                    with contextlib.suppress(MessagingError):  # another of them has ended the object
                        self._add(method())

    def _remote_events(self, m: Messaging) -> tuple[dict[str, Any], list[Any]]:
        """Return the parties of remote events, and what their methods take."""
        keep = self._stack.enter_context
        folder = keep(tempfile.TemporaryDirectory())
        settings = gateway.GatewaySettings(
            name="junk", data=f"{folder}/gateway", instances={"here": {"url": "memory://junk"}}
        )
        journal = keep(Journal.open(f"{folder}/journal"))
        journal.append("a", b"1")
        landlord, generator = keep(Landlord()), keep(EventGenerator("junk", events=["a", "a/b"]))
        mailbox, manager = keep(EventMailbox(f"{folder}/mailbox")), keep(TransactionManager())
        keep(EventServer(m, "generator", generator)), keep(MailboxServer(m, "mailbox", mailbox))
        keep(TransactionServer(m, "transactions", manager))
        lease, registration = landlord.grant(60.0), mailbox.register(60.0)
        box, transactions = (
            keep(RemoteMailbox(m, "mailbox", timeout=PATIENCE)),
            RemoteTransactionManager(m, "transactions"),
        )
        event, reference = RemoteEvent("junk", "a", 1), ListenerReference("mailbox", registration.id)
        transaction = manager.create(60.0)
        agent = StoreAndForwardAgent(f"{folder}/agent", target=lambda _: None)
        good = {
            **self.good, "messaging": m, "landlord": landlord, "mailbox": mailbox, "manager": manager, "lease": lease,
            "leases": [lease], "reference": reference, "event": event, "transaction": transaction, "party": generator,
            "generator": generator, "event_id": "a", "grantor": landlord, "duration": 60.0, "requested": 60.0,
            "path": f"{folder}/other", "settings": settings,
        }  # fmt: skip
        seeds = [
            landlord, generator, mailbox, manager, lease, registration, box, transactions, event, reference,
            transaction, journal, journal.cursor("junk"), keep(agent), box.register(60.0).result(PATIENCE),
            transactions.create(60.0), generator.register("a", None, print, 60.0), keep(LeaseRenewalManager()),
            RemoteGenerator(m, "generator", timeout=PATIENCE).register("a", None, reference, 60.0).result(PATIENCE),
            gateway.plan(settings), gateway.Gateway(settings), gateway.Problem(text="junk"),
            NotificationFilter(lambda _: True, print), EventCorrelator(lambda _: None, generator, "a"),
            keep(Journal.view(f"{folder}/journal")),
        ]  # fmt: skip
        return good, seeds

    def _construct(self, kind: type) -> None:
        good = self.good_for(kind)
        parameters = parameters_of(kind)
        required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        arguments = [good.get(each.name, "a/b") for each in required if each.kind is not each.VAR_POSITIONAL]
        with contextlib.suppress(MessagingError, TypeError):
            made = kind(*arguments)
            if hasattr(made, "close"):
                self._stack.callback(made.close)
            self._add(made)

    def _add(self, found: Any) -> None:
        """Add an object, and those it leads to, unless there is one of the kind."""
        waiting = [found]
        while waiting:
            each = waiting.pop(0)
            kind = type(each)
            if is_reachable(kind) and kind not in self.objects and not isinstance(each, (enum.Enum, BaseException)):
                self.objects[kind] = each
                if kind in PUBLIC.values():  # attributes of others are internal
                    waiting += attributes(each)

    def good_for(self, kind: type) -> dict[str, Any]:
        if kind.__module__.startswith(ROOMS_OF_STORES):
            return self.good_of_stores
        return self.good_of_admin if kind.__module__.startswith("messaging.eventadmin") else self.good

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> Iterator[None]:
    yield
    gc.collect()


class Unprintable(logging.Handler):
    """Gathers what does not fit into one line of a log file, and makes it a line that pytest can report."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not line.isprintable():
            self.found.add(f"{record.name}:{record.funcName}: {line}")
            record.msg, record.args = ascii(line), ()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some junk is the name of a folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Log lines about junk can be printed."""
    logger, gathering = logging.getLogger("messaging"), Unprintable()
    logger.addHandler(gathering)
    try:
        yield
    finally:
        logger.removeHandler(gathering)
    assert not gathering.found, listed(sorted(gathering.found))


@pytest.fixture
def registry() -> ServiceRegistry:
    return ServiceRegistry()


@pytest.fixture
def m(registry: ServiceRegistry) -> Iterator[Messaging]:
    with messaging.connect("memory://junk", services=registry, timeout=0.2, close_timeout=0.1) as m:
        yield m


def waited_for(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``call`` of a coroutine function as a call that blocks."""

    async def run(value: Any) -> Any:
        return await asyncio.wait_for(call(value), PATIENCE)

    return lambda value: asyncio.run(run(value))


def constructors_and_functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        if not callable(found) or getattr(found, "_is_protocol", False):
            continue
        if isinstance(found, type) and (
            issubclass(found, (BaseException, enum.Enum)) or inspect.isabstract(found) or is_made_here(found)
        ):
            continue
        yield f"{package}.{name}", found


@pytest.fixture
def good() -> Iterator[dict[str, Any]]:
    """Good arguments, by the names of their parameters."""
    with World() as world:
        yield world.good


@table("package", PACKAGES)
def test_constructors_and_functions(package: str, good: dict[str, Any]) -> None:
    found = [
        problem
        for name, function in constructors_and_functions(package)
        for parameter, call in variants(function, good)
        for problem in wrong(f"{name}({parameter})", call)
    ]
    assert not found, listed(found)


def test_methods_of_all_that_can_be_reached() -> None:
    found = []
    with World() as world:
        for kind, owner in world.objects.items():
            for name in methods(owner):
                if ends(kind, name) or name in WAITING:
                    continue
                method = getattr(owner, name)
                for parameter, call in variants(method, world.good_for(kind)):
                    called = waited_for(call) if inspect.iscoroutinefunction(method) else call
                    found += wrong(f"{kind.__name__}.{name}({parameter})", called)
    assert not found, listed(found)


def wrong_at_the_end(kind: type, name: str) -> list[str]:
    """Return the faults of a method that ends an object: each call that does gets objects of its own."""
    fresh: list[World] = []
    with contextlib.ExitStack() as stack:

        def end(value: Any) -> None:
            if not fresh:
                fresh.append(stack.enter_context(World(kind)))
            method = getattr(fresh[0].objects[kind], name)
            [(_, call)] = variants(method, GOOD)
            (waited_for(call) if inspect.iscoroutinefunction(method) else call)(value)
            fresh.clear()  # it has ended

        return wrong(f"{kind.__name__}.{name}", end)


def test_methods_that_end_an_object() -> None:
    with World() as world:
        ending = [(kind, name) for kind, owner in world.objects.items() for name in methods(owner) if ends(kind, name)]
    found = [
        problem
        for kind, name in ending
        if inspect.signature(getattr(kind, name)).parameters.keys() - {"self"}
        for problem in wrong_at_the_end(kind, name)
    ]
    assert not found, listed(found)


def test_settings_that_every_adapter_has() -> None:
    found = [problem for name, call in variants(Settings, {}) for problem in wrong(f"Settings({name})", call)]
    assert not found, listed(found)


def test_every_public_class_is_reached_or_constructed() -> None:
    """One that is neither has methods that nothing calls here."""
    with World() as world:
        reached = {base for kind in world.objects for base in kind.__mro__}
    missed = [
        name
        for name, kind in PUBLIC.items()
        if isinstance(kind, type) and kind not in reached and is_own(kind)
        and not getattr(kind, "_is_protocol", False)
        and not issubclass(kind, (BaseException, enum.Enum)) and not inspect.isabstract(kind)
        and not is_made_here(kind) and any(methods_of_class(kind))
    ]  # fmt: skip
    assert not missed


def methods_of_class(kind: type) -> Iterator[str]:
    return (name for name, each in vars(kind).items() if not name.startswith("_") and isinstance(each, FunctionType))


def test_times(m: Messaging, registry: ServiceRegistry) -> None:
    """Times that do not fit into a float, too, are times: they are as long as it takes."""
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
    assert not found, listed(found)
    m.publish("a", b"").result(PATIENCE)
    assert stream.receive(HUGE).payload == b""
    assert promise.result(HUGE) == 1
    stream.close().result(PATIENCE)


@table("setting", ["url", "services", "name", "timeout", "outbox_size"])
def test_connecting(setting: str) -> None:
    def connect(value: Any) -> Messaging:
        return messaging.connect(**{"url": "memory://junk", "name": "junk", setting: value})

    found = wrong(f"connect({setting})", connect)
    assert not found, listed(found)
