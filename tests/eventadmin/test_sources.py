"""Services, log records, configurations and connections as events; no event goes round for ever (RFC 97 5.6)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import messaging
from messaging.connection import ConnectionState
from messaging.errors import ArgumentError, ConnectionLostError, PermissionDeniedError
from messaging.eventadmin import (
    ConfigurationEvents,
    ConnectionEvents,
    Event,
    EventConstants,
    LogEvents,
    ServiceEvents,
    Tolerance,
    TopicPermission,
    TopicPolicy,
)
from messaging.services import LdapFilter, ServiceEventKind, ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.dispatch.helpers import renewed
from tests.eventadmin.conftest import AsyncRecorder, Hub, Hubs, RaisingFilter, Recorder, on, opened_hub, own_hub
from tests.threads import in_background, in_threads

SERVICE = "org/osgi/framework/ServiceEvent"
LOG = "org/osgi/service/log/LogEntry"
CONFIGURATION = "org/osgi/service/cm/ConfigurationEvent"
CONNECTION = "messaging/state/ConnectionState"


# --- conventions


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of its own, whose records go nowhere else."""
    log = logging.Logger(f"test-{uuid.uuid4().hex}")  # noqa: LOG001
    yield log
    for each in [*log.handlers]:
        log.removeHandler(each)


@table(
    ("error", "class_", "message"),
    [
        (ValueError("boom"), "builtins.ValueError", "boom"),
        (ValueError(), "builtins.ValueError", None),
        (PermissionDeniedError("no"), "messaging.errors.PermissionDeniedError", "no"),
        (SilentError("x"), f"{__name__}.SilentError", None),
        (KeyboardInterrupt(), "builtins.KeyboardInterrupt", None),
    ],
)
@own_hub
def test_the_properties_of_an_exception_agree(
    hub: Hub, log: logging.Logger, error: BaseException, class_: str, message: str | None
) -> None:
    """Scenarios 45 and 46; RFC 97 5.6.1, 5.6.3: the message only if there is one."""
    recorder = hub.record()
    with LogEvents(hub.admin, log):
        try:
            raise error
        except BaseException:
            log.exception("it failed")
    hub.flush()
    (event,) = recorder.events
    assert event.get_property("exception") is error
    assert event.get_property("exception.class") == class_
    assert event.get_property("exception.message") == message
    assert ("exception.message" in event.get_property_names()) is (message is not None)


def test_properties_without_a_value_must_be_left_out(hub: Hub, log: logging.Logger) -> None:
    """Scenario 46; RFC 97 5.6.1: not set to none, in any source."""
    recorder = hub.record()
    with ServiceEvents(hub.admin), LogEvents(hub.admin, log), ConfigurationEvents(hub.admin) as configurations:
        hub.services.register("x", object()).unregister()
        log.error("message")
        configurations.updated("pid")
    hub.flush()
    assert len(recorder.events) == 4
    for event in recorder.events:
        assert None not in event.properties.values()
        assert "service.pid" not in event.get_property_names()
        assert not [name for name in event.get_property_names() if name.startswith("exception")]


# --- services


def test_service_events_must_be_delivered_synchronously(hub: Hub) -> None:
    """Scenarios 47 and 48; RFC 97 5.6.2, 5.6.2.3: the topic is made of class and constant."""
    recorder = hub.record(f"{SERVICE}/*")
    with ServiceEvents(hub.admin):
        registration = hub.services.register(["x", "y"], object(), {"service.pid": "p"})
        registration.update({})
        registration.unregister()
        assert recorder.topics == [f"{SERVICE}/{each}" for each in ("REGISTERED", "MODIFIED", "UNREGISTERING")]
    assert recorder.threads == [threading.get_ident()] * 3
    reference = registration.reference
    for event, pid in zip(recorder.events, ("p", None, None), strict=True):
        assert event.get_property("service") is reference
        assert event.get_property("service.id") == reference.id
        assert event.get_property("service.objectClass") == ("x", "y")
        assert event.get_property("service.pid") == pid
        assert event.get_property("event").reference is reference
    assert recorder.events[0].get_property("event").kind is ServiceEventKind.REGISTERED


def test_every_kind_of_service_event_has_a_topic(hub: Hub) -> None:
    """Scenario 47: there are no others, so there is none that would be unknown."""
    recorder = hub.record(f"{SERVICE}/*")
    with ServiceEvents(hub.admin, filter="(x=1)"):
        registration = hub.services.register("x", object(), {"x": 1})
        registration.update({"x": 1, "y": 2})
        registration.update({})
        registration.update({"x": 1})
        registration.unregister()
    kinds = [topic.rpartition("/")[2] for topic in recorder.topics]
    assert kinds == ["REGISTERED", "MODIFIED", "MODIFIED_ENDMATCH", "MODIFIED", "UNREGISTERING"]
    assert {*kinds} == {kind.name for kind in ServiceEventKind}


def test_only_services_that_match_are_told_of(hub: Hub) -> None:
    other = ServiceRegistry()
    recorder = hub.record(f"{SERVICE}/*")
    with ServiceEvents(hub.admin, other, LdapFilter("(colour=red)")):
        hub.services.register("x", object(), {"colour": "red"})
        other.register("y", object(), {"colour": "blue"})
        other.register("z", object(), {"Colour": "red"})
    other.register("z", object(), {"colour": "red"})
    assert recorder.of("service.objectClass") == [("z",)]


def test_handlers_of_service_events_may_register_services(hub: Hub) -> None:
    """RFC 97 5.6.2.3, 5.2.3: the event of the inner one comes first, where it is synchronous."""
    steps: list[str] = []

    def handler(event: Event) -> None:
        name = event.get_property("service.objectClass")[0]
        steps.append(f"begin {name}")
        if len(name) < 4:
            hub.services.register(name + "x", object())
        steps.append(f"end {name}")

    hub.handle(handler, f"{SERVICE}/REGISTERED")
    with ServiceEvents(hub.admin, filter="(objectClass=x*)"):
        hub.services.register("x", object())
    assert steps == [*(f"begin {'x' * n}" for n in (1, 2, 3, 4)), *(f"end {'x' * n}" for n in (4, 3, 2, 1))]


def test_the_events_of_one_service_are_never_mixed_up(hub: Hub) -> None:
    """A handler that unregisters what has just been changed hears of that when the others have heard of the change.

    A handler that is registered by a service event gets the next event, and not the one it comes by.
    """
    steps: list[str] = []
    late = Recorder()

    def first(event: Event) -> None:
        steps.append(f"first {event.topic.rpartition('/')[2]}")
        if event.topic.endswith("MODIFIED"):
            hub.handle(late, f"{SERVICE}/*")
            registration.unregister()

    hub.handle(first, f"{SERVICE}/*", ranking=1)
    hub.handle(lambda event: steps.append(f"last {event.topic.rpartition('/')[2]}"), f"{SERVICE}/*")
    registration = hub.services.register("x", object())
    with ServiceEvents(hub.admin, filter="(objectClass=x)"):
        registration.update({})
    assert steps == ["first MODIFIED", "last MODIFIED", "first UNREGISTERING", "last UNREGISTERING"]
    assert late.topics == [f"{SERVICE}/UNREGISTERING"]


def test_service_events_of_an_event_loop_reach_its_coroutines(hub: Hub) -> None:
    """RFC 97 5.6.2.3: synchronously they cannot, so they are posted, rather than lost."""
    recorder, plain = AsyncRecorder(), hub.record(f"{SERVICE}/*")

    async def main() -> None:
        hub.handle(recorder, f"{SERVICE}/*")
        with ServiceEvents(hub.admin, filter="(objectClass=x)"):
            hub.services.register("x", object()).unregister()
            await hub.admin.flush()

    asyncio.run(main())
    expected = [f"{SERVICE}/{each}" for each in ("REGISTERED", "UNREGISTERING")]
    assert recorder.topics == plain.topics == expected
    assert not hub.logged()


def test_threads_may_register_services_at_the_same_time(hub: Hub) -> None:
    recorder = hub.record(f"{SERVICE}/*")

    def run(thread: int) -> None:
        for _ in range(50):
            hub.services.register(f"t{thread}", object()).unregister()

    with ServiceEvents(hub.admin, filter="(objectClass=t*)"):
        in_threads(4, run)
    assert len(recorder.events) == 400


# --- the log


def test_log_records_are_posted(hub: Hub, log: logging.Logger) -> None:
    """Scenario 48; RFC 97 5.6.3, 4.2.2.3."""
    recorder = hub.record(LOG)
    with LogEvents(hub.admin, log):
        log.warning("%d of %s", 3, "them")
        hub.flush()
    (event,) = recorder.events
    entry = event.get_property("log.entry")
    expected = {"message": "3 of them", "log.level": 2, "log.logger": log.name, "timestamp": int(entry.created * 1000)}
    assert {name: event.get_property(name) for name in expected} == expected
    assert isinstance(entry, logging.LogRecord)
    assert recorder.threads != [threading.get_ident()]


def test_levels_are_those_of_osgi(hub: Hub, log: logging.Logger) -> None:
    """RFC 97 5.6.3; and those below the one asked for are not posted."""
    recorder = hub.record()
    log.setLevel(1)
    with LogEvents(hub.admin, log):
        for level in (50, 60, 40, 39, 30, 20, 19, 10, 1):
            log.log(level, "x")
    with LogEvents(hub.admin, log, "ERROR"):
        log.warning("x")
        log.error("x")
    hub.flush()
    assert recorder.of("log.level") == [1, 1, 1, 2, 2, 3, 4, 4, 4, 1]


def test_filters_of_handlers_work_with_log_events(hub: Hub, log: logging.Logger) -> None:
    """RFC 97 5.6.1: a handler of exceptions need not know their source."""
    errors = hub.record(filter="(&(exception.class=builtins.ValueError)(log.level<=1))")
    source = LogEvents(hub.admin, log)
    source.addFilter(lambda record: "secret" not in record.getMessage())
    log.error("x", exc_info=ValueError())
    log.warning("x", exc_info=ValueError())
    log.error("x", exc_info=KeyError())
    log.error("secret", exc_info=ValueError())
    hub.flush()
    assert len(errors.events) == 1
    source.close()


def replaced(record: logging.LogRecord) -> Any:
    return logging.makeLogRecord({**record.__dict__, "msg": "replaced", "args": ()})


def test_records_that_are_odd_do_no_harm(hub: Hub, log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = hub.record()
    with LogEvents(hub.admin, log) as source:
        log.error("no exception there", exc_info=True)  # noqa: LOG014
        log.error("%d", "no number")  # logging has its way with that: it writes to stderr
        assert "Logging error" in capsys.readouterr().err
        log.error({"not": "a text"})
        log.handle(logging.makeLogRecord({"msg": "made by hand", "exc_info": True, "levelno": 20}))
        assert "Logging error" in capsys.readouterr().err
        log.error("%s", "")
        source.addFilter(replaced)
        log.error("x")
    hub.flush()
    expected = ["no exception there", "{'not': 'a text'}", ""]
    assert recorder.of("message")[:3] == expected
    assert recorder.of("message")[3] in ("x", "replaced")  # from Python 3.12 on
    assert recorder.of("exception") == [None] * 4


@pytest.fixture
def rooted(hub: Hub) -> Iterator[LogEvents]:
    """All that is logged anywhere."""
    with LogEvents(hub.admin, logging.getLogger()) as source:
        yield source


@contextlib.contextmanager
def opened_rooted_hub(caplog: pytest.LogCaptureFixture) -> Iterator[Hub]:
    with opened_hub(caplog) as hub, LogEvents(hub.admin, logging.getLogger()):
        yield hub


#: gives each row of a table a hub that posts all that is logged anywhere
own_rooted_hub = renewed("hub", opened_rooted_hub, "caplog")


def settled(hub: Hub, recorder: Recorder) -> list[str]:
    """Return the messages of ``here``, logged by tests, when no event goes round any more."""
    for _ in range(5):
        hub.flush()
    return [
        text for text, name in zip(recorder.of("message"), recorder.of("log.logger"), strict=True) if name == "here"
    ]


here = logging.getLogger("here")


def test_a_handler_of_log_events_that_raises_must_not_feed_itself(hub: Hub, rooted: LogEvents) -> None:
    """Scenario 51: its failure is logged, and the record is not posted to any handler."""
    recorder = hub.record(LOG)
    for topics in (LOG, "*"):
        hub.failing(ValueError("boom"), topics)
    here.error("once")
    assert settled(hub, recorder) == ["once"]
    assert not [each for each in recorder.of("message") if "failed on" in each]
    assert len(hub.logged("failed on the event 'org/osgi/service/log/LogEntry'")) == 2 * len(recorder.events)


@table("kind", ["function", "coroutine", "task", "unordered", "returns an awaitable"])
@own_rooted_hub
def test_a_handler_of_log_events_may_log(hub: Hub, loop: asyncio.AbstractEventLoop, kind: str) -> None:
    """Scenario 51."""
    recorder = hub.record(LOG)

    def function(event: Event) -> None:
        here.error("again")

    async def coroutine(event: Event) -> None:
        await asyncio.sleep(0)
        here.error("again")

    async def task(event: Event) -> None:
        await asyncio.create_task(coroutine(event))

    handler: Any = {"coroutine": coroutine, "task": task, "returns an awaitable": lambda event: coroutine(event)}.get(
        kind, function
    )
    delivery = "async.unordered" if kind == "unordered" else None
    on(loop, lambda: hub.handle(handler, "*", delivery=delivery))
    here.error("once")
    assert settled(hub, recorder) == ["once"]


@table("publish", ["post", "send", "send elsewhere", "asend"])
@table("delivery", ["async.ordered", "async.unordered"])
@own_rooted_hub
def test_log_records_caused_by_log_events_are_not_posted(
    hub: Hub, loop: asyncio.AbstractEventLoop, publish: str, delivery: str
) -> None:
    """Scenario 51: log event, another event, a handler of that which logs: it would go round for ever."""
    recorder, alarms = hub.record(LOG), hub.record("alarm/*")

    def alarm(event: Event) -> None:
        if publish == "post":
            hub.admin.post_event(Event("alarm/1"))
        elif publish == "send":
            hub.admin.send_event(Event("alarm/1"))
        elif publish == "send elsewhere":
            hub.admin.send_event(Event("alarm/1"), timeout=PATIENCE)

    async def async_alarm(event: Event) -> None:
        await hub.admin.asend_event(Event("alarm/1"))

    def again(event: Event) -> None:
        if event.topic == "alarm/1":
            hub.admin.post_event(Event("alarm/2"))
        here.error("again")

    filter_ = "(log.logger=here)"
    if publish == "asend":
        on(loop, lambda: hub.handle(async_alarm, LOG, filter=filter_, delivery=delivery))
    else:
        hub.handle(alarm, LOG, filter=filter_, delivery=delivery)
    hub.handle(again, "alarm/*", delivery=delivery)
    hub.failing(ValueError("boom"), "alarm/*")
    here.error("once")
    eventually(lambda: len(alarms.events) == 2, "both alarms")
    assert settled(hub, recorder) == ["once"]
    assert sorted(alarms.topics) == ["alarm/1", "alarm/2"]
    # what has nothing to do with that is posted
    hub.handle(lambda event: here.error("something else"), "other")
    hub.admin.post_event(Event("other"))
    hub.flush()
    assert settled(hub, recorder) == ["once", "something else"]


def test_two_admins_do_not_keep_each_other_busy(hubs: Hubs, log: logging.Logger) -> None:
    """Scenario 51: each has the log, and handlers that log."""
    one, other = hubs(), hubs()
    recorder = one.record(LOG)
    one.handle(lambda event: log.error("again"), LOG)
    target = f"(event.admin.name={one.admin.name})"
    one.handle(lambda event: other.admin.post_event(Event("x")), LOG, target=target)
    one.handle(lambda event: log.error("again"), "x")
    with LogEvents(one.admin, log), LogEvents(other.admin, log):
        log.error("once")
        for _ in range(3):
            one.flush()
            other.flush()
    assert recorder.of("message") == ["once", "once"]


def test_a_filter_that_raises_on_log_events_does_no_harm(hub: Hub, rooted: LogEvents) -> None:
    """Scenario 51: its failure is logged, and not posted. Two sources on one admin post twice, and no more."""
    hub.record("*", filter=RaisingFilter("(x=1)", case_sensitive=True))
    recorder = hub.record(LOG)
    hub.handle(lambda event: here.error("again"), LOG)
    here.error("once")
    assert settled(hub, recorder) == ["once"]
    with LogEvents(hub.admin, here):
        here.error("twice")
        assert settled(hub, recorder) == ["once", "twice", "twice"]


def test_threads_may_log_while_log_events_are_delivered(hub: Hub, log: logging.Logger) -> None:
    """What they log is posted: they are not of the admin."""
    recorder = hub.record(LOG)
    hub.handle(lambda event: log.error("again"), LOG)
    with LogEvents(hub.admin, log):

        def run(thread: int) -> None:
            for number in range(100):
                log.error("%d %d", thread, number)

        in_threads(5, run)
    hub.flush()
    assert sorted(recorder.of("message")) == sorted(
        f"{thread} {number}" for thread in range(5) for number in range(100)
    )


def test_that_a_handler_of_log_events_is_blocked_is_posted_to_the_others(hub: Hub, rooted: LogEvents) -> None:
    """Scenarios 38 and 51."""
    gate, recorder = hub.gate(topics=LOG, filter="(log.logger=here)", timeout=0.1), hub.record(LOG)
    here.error("once")
    gate.wait()
    eventually(lambda: [each for each in recorder.of("message") if "is blocked" in each], "the others hear of it")
    gate.opened.set()
    here.error("twice")
    assert settled(hub, recorder) == ["once", "twice"]
    assert gate.of("message") == ["once"]


def test_a_handler_of_log_events_may_be_blocked_for_its_failures(hubs: Hubs, log: logging.Logger) -> None:
    hub = hubs(tolerance=Tolerance(failures=2))
    failing = hub.failing(ValueError("boom"), LOG)
    dispatch = logging.getLogger("messaging.dispatch")
    with LogEvents(hub.admin, log), LogEvents(hub.admin, dispatch):
        for number in range(5):
            log.error("%d", number)
            hub.flush()
    assert failing.of("message") == ["0", "1"]


def test_no_lock_of_logging_is_held_while_log_events_are_posted(hub: Hub, log: logging.Logger) -> None:
    """Scenario 41: posting may have to wait for handlers, which may log."""
    hub.admin._queue.room.limit = 1
    gate = hub.gate(topics=LOG)
    with LogEvents(hub.admin, log):
        joins = [in_background(functools.partial(log.error, "%d", number)) for number in range(4)]
        gate.wait()
        gate.opened.set()
        for join in joins:
            join()
        hub.flush()
    assert sorted(gate.of("message")) == ["0", "1", "2", "3"]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_sources_end_with_the_admin_and_when_they_are_closed(
    hub: Hub, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other handlers of the logger miss nothing, not even the next one; nor is the end of logging any trouble."""
    kept, recorder = Kept(), hub.record()
    source, other, shut = LogEvents(hub.admin, log), LogEvents(hub.admin), LogEvents(hub.admin, log)
    services, configurations = ServiceEvents(hub.admin), ConfigurationEvents(hub.admin)
    for handler in (kept, other):
        log.addHandler(handler)
    logging.shutdown([weakref.ref(shut)])
    log.error("1")
    other.close()  # it ends for every logger
    hub.flush()
    assert recorder.of("message") == ["1", "1"]
    assert log.handlers == [source, kept, other]
    hub.admin.close()
    for text in ("2", "3"):
        log.error(text)
    hub.services.register("x", object())
    configurations.updated("a")
    assert not hub.services._listeners
    assert (kept.messages, recorder.of("message")) == (["1", "2", "3"], ["1", "1"])
    for each in (source, source, shut, services, configurations):
        each.close()
    assert log.handlers == [kept, other]
    assert capsys.readouterr().err == ""


# --- configurations


def test_configuration_events_are_posted(hub: Hub) -> None:
    """Scenario 48; RFC 97 5.6.4, 4.2.2.6."""
    recorder = hub.record(f"{CONFIGURATION}/*")
    manager = hub.services.register("org.osgi.service.cm.ConfigurationAdmin", object(), {"service.pid": "cm"}).reference
    with ConfigurationEvents(hub.admin, manager) as configurations:
        configurations.updated("browser")
        configurations.updated("account.1", "account")
        configurations.deleted("account.1", "account")
        hub.flush()
    configurations.updated("after the end")
    hub.flush()
    assert recorder.topics == [f"{CONFIGURATION}/CM_UPDATED"] * 2 + [f"{CONFIGURATION}/CM_DELETED"]
    assert recorder.of("cm.pid") == ["browser", "account.1", "account.1"]
    assert recorder.of("cm.factoryPid") == [None, "account", "account"]
    assert recorder.of("service") == [manager] * 3
    assert recorder.of("service.id") == [manager.id] * 3
    assert recorder.of("service.objectClass") == [("org.osgi.service.cm.ConfigurationAdmin",)] * 3
    assert recorder.of("service.pid") == ["cm"] * 3
    assert threading.get_ident() not in recorder.threads


@table("wrong", [("", None), (None, None), (5, None), ("a", ""), ("a", 5)])
def test_a_pid_is_a_text(hub: Hub, wrong: Any) -> None:
    configurations = ConfigurationEvents(hub.admin)
    for call in (configurations.updated, configurations.deleted):
        with pytest.raises(ArgumentError, match="pid must be a non-empty str"):
            call(*wrong)
    with pytest.raises(ArgumentError, match="principal must be a str"):
        ConfigurationEvents(hub.admin, principal=5)  # type: ignore[arg-type]


# --- connections


def test_the_states_of_a_connection_are_posted(hub: Hub) -> None:
    """RFC 97 5.6.1: the present one first, and the last one."""
    recorder = hub.record(f"{CONNECTION}/*")
    with messaging.connect(f"memory://{uuid.uuid4().hex}", name="n") as m:
        with ConnectionEvents(hub.admin, m):
            eventually(lambda: recorder.topics == [f"{CONNECTION}/CONNECTED"], "the present state")
        source = ConnectionEvents(hub.admin, m)
        eventually(lambda: recorder.topics == [f"{CONNECTION}/CONNECTED"] * 2, "and again")
    eventually(lambda: recorder.topics[-1] == f"{CONNECTION}/CLOSED", "the end")
    source.close()
    source.close()
    event = recorder.events[0]
    assert event.get_property("osgi.messaging.name") == "n"
    assert event.get_property("connection.state") == "connected"
    assert event.get_property("message") == "connected"
    state = event.get_property("event")
    assert isinstance(state, ConnectionState)
    assert event.get_property("timestamp") == int(state.since * 1000)
    assert "exception" not in event.get_property_names()


class States:
    """A connection whose states a test tells, as ``Messaging`` does."""

    def __init__(self) -> None:
        self.name = "n"
        self.connection_state = self
        self.told: list[Any] = []
        self.disposed = 0

    def subscribe(self, on_next: Any) -> Any:
        self.told.append(on_next)
        on_next(ConnectionState("connecting"))
        return self

    def dispose(self) -> None:
        self.disposed += 1


def test_why_a_connection_is_not_as_it_should_be_is_an_exception(hub: Hub) -> None:
    """Scenario 45."""
    recorder = hub.record()
    states: Any = States()
    with ConnectionEvents(hub.admin, states):
        states.told[0](ConnectionState("reconnecting", ConnectionLostError("gone"), 5.0))
        hub.flush()
    assert states.disposed == 1
    event = recorder.events[1]
    assert event.topic == f"{CONNECTION}/RECONNECTING"
    assert event.get_property("exception.class") == "messaging.errors.ConnectionLostError"
    assert event.get_property("exception.message") == "gone"
    assert event.get_property("message") == "reconnecting: gone"
    assert event.get_property("timestamp") == 5000


def test_connection_events_end_with_the_admin(hub: Hub) -> None:
    """Even if it is closed already when the present state is told."""
    states: Any = States()
    with ConnectionEvents(hub.admin, states):
        hub.admin.close()
        states.told[0](ConnectionState("closed"))
        assert states.disposed == 1
    late: Any = States()
    ConnectionEvents(hub.admin, late)
    assert late.disposed == 1


# --- permissions


def test_a_denied_source_logs_once(hubs: Hubs, log: logging.Logger, capsys: Any) -> None:
    """RFC 97 5.4.2. No caller could handle the error, and it may be granted later."""
    policy = TopicPolicy({None: [TopicPermission("*", "subscribe")]})
    hub = hubs(permissions=policy)
    recorder = hub.record()
    states: Any = States()
    with (
        ServiceEvents(hub.admin, filter="(objectClass=x)", principal="p"),
        LogEvents(hub.admin, log, principal="p"),
        ConnectionEvents(hub.admin, states, principal="p"),
        ConfigurationEvents(hub.admin, principal="p") as configurations,
    ):
        for _ in range(3):
            hub.services.register("x", object())
            log.error("x")
            states.told[0](ConnectionState("connected"))
            with pytest.raises(PermissionDeniedError):
                configurations.updated("x")
        assert len(hub.logged("events are not published", "principal 'p' may not publish")) == 3
        policy.grant("p", TopicPermission("*", "publish"))
        hub.services.register("x", object())
        log.error("x")
        states.told[0](ConnectionState("connected"))
        configurations.updated("x")
    hub.flush()
    assert sorted(recorder.topics) == sorted(
        [f"{SERVICE}/REGISTERED", LOG, f"{CONNECTION}/CONNECTED", f"{CONFIGURATION}/CM_UPDATED"]
    )
    assert capsys.readouterr().err == ""


# --- ends


def test_a_handler_may_close_the_source(hub: Hub) -> None:
    source = ServiceEvents(hub.admin, filter="(objectClass=x)")
    recorder = hub.record(f"{SERVICE}/*", ranking=-1)
    hub.handle(lambda event: source.close(), f"{SERVICE}/*")
    hub.services.register("x", object())
    hub.services.register("x", object())
    assert len(recorder.events) == 1


def test_the_conventional_names_are_those_of_the_rfc() -> None:
    """RFC 97 5.6.1."""
    names = {value for name, value in vars(EventConstants).items() if name.isupper() and isinstance(value, str)}
    assert names >= {
        *("event", "exception", "exception.class", "exception.message", "message", "timestamp"),
        *("service", "service.id", "service.pid", "service.objectClass"),
    }
