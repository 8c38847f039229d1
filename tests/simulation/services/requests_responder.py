"""The role that answers requests, by handlers of all kinds."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

import reactivex
from reactivex.disposable import Disposable

import messaging
from messaging import MessagingError, Promise
from messaging.execution import clock
from messaging.replyto import CHANNEL, CONCURRENCY, EXTENSIONS, DeferredReply, ReplyToSingleSubscriptionHandler
from messaging.services import ServiceRegistry
from tests.simulation.services.requests_ledger import SLACK, Instance, Served
from tests.simulation.simulation import Role
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from messaging import Message, MessageContextBuilder
    from tests.simulation.services.requests import Requests
    from tests.simulation.services.requests_ledger import Ask

#: requests that a handler works on at a time by default: functions, and coroutine functions
_THREADS: Final = 8
_TASKS: Final = 64
#: how long a handler waits for the reply to a request of its own, seconds: the probes at the end outlast many of them
_INNER: Final = 5.0
#: names of extensions, by keyword
_KEYS: Final = {"buffer_size": "bufferSize", "auto_acknowledge": "autoAcknowledge"}


class Responder(Role):
    """Answers requests on the channels of the plan."""

    simulation: Requests
    pace = 1.0  # there is nothing to do meanwhile

    def open(self) -> None:
        """Connect, and register a handler for each channel."""
        self.simulation.killed(self)
        self.is_online = False
        self.asked = getattr(self, "asked", 0)
        self._connect()

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["responder"])
        if options["has_sessions"] and self.simulation.protocol.startswith("mqtt"):
            settings |= {"client_id": self.name, "clean_start": False}
            if self.simulation.protocol == "mqtt5":
                settings["session_expiry"] = 86_400
        self.note(f"connect {settings}")
        if options["is_durable"]:
            settings["outbox_path"] = str(self.world.disk.folder / self.name)
        self.m = messaging.connect(self.simulation.url(), retry_connect=True, services=ServiceRegistry(), **settings)
        self.instance = Instance(self.m)
        self.registered: dict[str, tuple[Served, Any]] = {}
        for name in options["channels"]:
            self.do_register(name)

    # --- registering

    def do_register(self, name: str) -> None:
        """Step: register the handler of a channel, as often as it takes: the broker may refuse its subscription."""
        while name not in self.registered:
            try:
                self._register(name)
            except MessagingError as error:
                self.note(f"cannot register {name}: {type(error).__name__}: {error}")
                clock.pause(0.5)

    def _register(self, name: str) -> None:
        terms = self.simulation.plan.options["channels"][name]
        way, concurrency = terms["way"], terms["concurrency"]
        default = _TASKS if way in ("coroutine", "async generator") else _THREADS
        served = Served(terms["channel"], concurrency or default, self.instance)
        self.simulation.ledger.served.append(served)
        extensions = dict(terms["extensions"])
        handler = getattr(self, "_" + way.replace(" ", "_"))(served)
        if way == "service":
            keys = {_KEYS.get(key, key): value for key, value in extensions.items()}
            properties: dict[str, Any] = {CHANNEL: served.channel, EXTENSIONS: keys}
            if concurrency is not None:
                properties[CONCURRENCY] = concurrency
            registration: Any = self.m.services.register(ReplyToSingleSubscriptionHandler, handler, properties)
            try:
                self.m.whiteboard.ready(registration.reference).result(SLACK)
            except MessagingError:
                registration.unregister()
                raise
        else:
            registration = self.m.reply(
                served.channel,
                handler,
                concurrency=concurrency,
                ranking=terms["ranking"],
                expected=PlannedError if terms["is_expected"] else (),
                many=True if way == "list" else None,
                **extensions,
            )
        self.registered[name] = served, registration

    def do_unregister(self, name: str) -> None:
        """Step: unregister the handler of a channel."""
        if name in self.registered:
            served, registration = self.registered.pop(name)
            registration.unregister()
            served.ended = self.world.scheduler.now

    def do_rank(self, name: str, ranking: int) -> None:
        """Step: change the ranking of a handler."""
        if name in self.registered:
            registration = self.registered[name][1]
            registration.update({**registration.reference.properties, "service.ranking": ranking})

    def do_restore(self) -> None:
        """Step: register all handlers that are not registered."""
        for name in self.simulation.plan.options["channels"]:
            self.do_register(name)

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.instance.close()
        self._connect()

    # --- handlers

    @contextlib.contextmanager
    def _work(self, request: bytes, served: Served) -> Iterator[tuple[Ask, dict[str, Any]]]:
        told = json.loads(request)
        simulation = self.simulation
        ask = simulation.ledger.asks.get(told["id"])
        if ask is None:
            simulation.broken(f"a request arrived that was not made: {request!r}")
            raise PlannedError("not made")
        now = self.world.scheduler.now
        if served.instance.is_closed:
            simulation.broken(f"a handler of {served.channel} began with {ask.name} after its instance was closed")
        if served.ended is not None and now > served.ended + SLACK:
            simulation.broken(f"a handler of {served.channel} began with {ask.name} long after it was unregistered")
        ask.handled += 1
        ask.handlers.add(self.name)
        self.note(f"{ask.name} begins" + (f" for the {ask.handled}. time" if ask.handled > 1 else ""))
        served.active += 1
        if served.active > served.limit:
            simulation.broken(f"a handler of {served.channel} works on {served.active} requests, not {served.limit}")
        try:
            yield ask, told
        finally:
            served.active -= 1
            self.note(f"{ask.name} ends")

    def _function(self, served: Served) -> Callable[[bytes], Any]:
        def handle(request: bytes) -> Any:
            with self._work(request, served) as (ask, told):
                if told["verb"] in ("later", "never"):
                    return self._later(ask, told)
                if told["pause"]:
                    clock.pause(told["pause"])
                if told["verb"] == "ask":
                    return self._ask(ask)
                return _reply(ask, told)

        return handle

    def _coroutine(self, served: Served) -> Callable[[bytes], Any]:
        async def handle(request: bytes) -> Any:
            with self._work(request, served) as (ask, told):
                if told["verb"] in ("later", "never"):
                    return self._later(ask, told)
                if told["pause"]:
                    await clock.sleep(told["pause"])
                if told["verb"] == "ask":
                    return await self._ask_async(ask)
                return _reply(ask, told)

        return handle

    def _service(self, served: Served) -> Any:
        responder = self

        class Single:
            def handle_response(self, request: Message, builder: MessageContextBuilder) -> Any:
                with responder._work(request.payload, served) as (ask, told):
                    if told["pause"]:
                        clock.pause(told["pause"])
                    return builder.content(_reply(ask, told)).build_message()

        return Single()

    def _later(self, ask: Ask, told: dict[str, Any]) -> DeferredReply:
        promise: Promise[bytes] = Promise(f"the answer to {ask.name}")

        def resolve() -> None:
            clock.pause(told["pause"])
            promise.resolve(ask.reply())

        if told["verb"] == "later":
            self.process.start(resolve, "timer")
        return DeferredReply(promise)

    # --- handlers that ask

    def _ask(self, ask: Ask) -> bytes:
        inner = self._inner(ask)
        try:
            promise = self.m.request(inner.channel, inner.payload, timeout=inner.timeout, **self.simulation.qos(1))
        except MessagingError as error:
            inner.state = type(error).__name__
            return ask.reply()
        try:
            message = promise.result(inner.timeout + SLACK)
        except MessagingError as error:
            self.simulation.settled(inner, error, None)
        else:
            self.simulation.settled(inner, None, message.payload)
        return ask.reply()

    async def _ask_async(self, ask: Ask) -> bytes:
        inner = self._inner(ask)
        try:
            promise = self.m.request(inner.channel, inner.payload, timeout=inner.timeout, **self.simulation.qos(1))
        except MessagingError as error:
            inner.state = type(error).__name__
            return ask.reply()
        try:
            message = await promise
        except MessagingError as error:
            self.simulation.settled(inner, error, None)
        else:
            self.simulation.settled(inner, None, message.payload)
        return ask.reply()

    def _inner(self, ask: Ask) -> Ask:
        self.asked += 1
        name = f"{ask.name}.{self.name}.{self.asked}"
        return self.simulation.ask(
            self, name, "svc/two", "echo", qos=1, timeout=_INNER, instance=self.instance, is_inner=True
        )

    # --- handlers with many replies

    def _generator(self, served: Served) -> Callable[[bytes], Any]:
        def handle(request: bytes) -> Iterator[bytes]:
            with self._work(request, served) as (ask, told):
                if told["verb"] != "items":  # a request with one reply, which another handler answers as a rule
                    clock.pause(told["pause"])
                    yield _reply(ask, told)
                    return
                for number in range(told["count"]):
                    _fail_at(number, told)
                    yield ask.reply(number)
                    if told["pause"]:
                        clock.pause(told["pause"])
                _fail_at(told["count"], told)

        return handle

    def _async_generator(self, served: Served) -> Callable[[bytes], Any]:
        async def handle(request: bytes) -> AsyncIterator[bytes]:
            with self._work(request, served) as (ask, told):
                for number in range(told["count"]):
                    _fail_at(number, told)
                    yield ask.reply(number)
                    if told["pause"]:
                        await clock.sleep(told["pause"])
                _fail_at(told["count"], told)

        return handle

    def _list(self, served: Served) -> Callable[[bytes], Any]:
        def handle(request: bytes) -> Any:
            with self._work(request, served) as (ask, told):
                if told["fail_at"] is not None:
                    raise PlannedError("as planned, before the first reply")
                return [ask.reply(number) for number in range(told["count"])]

        return handle

    def _observable(self, served: Served) -> Callable[[bytes], Any]:
        def handle(request: bytes) -> Any:
            def subscribe(observer: Any, _: Any = None) -> Any:
                is_over: list[bool] = []

                def emit() -> None:
                    with self._work(request, served) as (ask, told):
                        try:
                            for number in range(told["count"]):
                                _fail_at(number, told)
                                if is_over:
                                    return
                                observer.on_next(ask.reply(number))
                                if told["pause"]:
                                    clock.pause(told["pause"])
                            _fail_at(told["count"], told)
                        except PlannedError as error:
                            observer.on_error(error)
                            return
                    observer.on_completed()

                self.process.start(emit, "emitter")
                return Disposable(lambda: is_over.append(True))

            return reactivex.create(subscribe)

        handle.__annotations__["return"] = reactivex.Observable
        served.limit = 1_000_000  # an observable outlives the call: its concurrency is that of subscribing
        return handle

    # --- the end

    def look(self) -> None:
        """Wait until the channels of all handlers are subscribed to. On a thread, when all faults are over."""
        clock.pause(self.simulation.notice)
        while not self.is_online:
            found = self.m.runtime.get_runtime_dto()
            self.is_online = found.connection.state == "connected" and all(
                each.request_channel.connected for each in found.reply_to_subscriptions
            )
            if not self.is_online:
                clock.pause(0.2)

    def close(self) -> None:
        """Close the instance."""
        self.instance.close()


def _reply(ask: Ask, told: dict[str, Any]) -> bytes:
    if told["verb"] == "fail":
        raise PlannedError("as planned")
    return ask.reply()


def _fail_at(number: int, told: dict[str, Any]) -> None:
    if told["fail_at"] == number:
        raise PlannedError("as planned, among the replies")
