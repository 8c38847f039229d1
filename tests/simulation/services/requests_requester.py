"""The role that makes requests: for one reply and for many, on threads and on event loops."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import messaging
from messaging import MessagingError
from messaging.errors import TooManyRequestsError
from messaging.execution import clock
from messaging.services import ServiceRegistry
from tests.simulation.services.requests_ledger import CLOSED, SLACK, Instance
from tests.simulation.simulation import Role

if TYPE_CHECKING:
    from tests.simulation.services.requests import Requests
    from tests.simulation.services.requests_ledger import Ask


class Requester(Role):
    """Makes requests that are numbered through all its lives."""

    simulation: Requests
    pace = 1.0  # there is nothing to do meanwhile

    def open(self) -> None:
        """Connect."""
        self.simulation.killed(self)
        self.number = getattr(self, "number", 0)
        self.is_checked = False
        self.promises: dict[Ask, Any] = {}
        self.streams: dict[Ask, Any] = {}
        self._connect()

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["requester"])
        if options["has_sessions"] and self.simulation.protocol.startswith("mqtt"):
            settings |= {"client_id": self.name, "clean_start": False}
            if self.simulation.protocol == "mqtt5":
                settings["session_expiry"] = 86_400
        self.note(f"connect {settings}")
        self.m = messaging.connect(self.simulation.url(), retry_connect=True, services=ServiceRegistry(), **settings)
        self.instance = Instance(self.m)

    def _new(self, channel: str, verb: str, **terms: Any) -> Ask:
        self.number += 1
        return self.simulation.ask(self, f"{self.name}:{self.number}", channel, verb, **terms)

    # --- one reply

    def do_ask(self, channel: str, verb: str, count: int, way: str, is_given: bool, **terms: Any) -> None:
        """Step: make so many requests."""
        asks = [self._new(channel, verb, **terms) for _ in range(count)]
        if way == "loop":
            self.process.start(lambda: asyncio.run(self._ask_on_loop(asks, is_given)), "loop")
        else:
            for ask in asks:
                self._request(ask, is_given)

    def _request(self, ask: Ask, is_given: bool) -> Any:
        """Make a request, and return its promise; ``None`` if the call was refused."""
        simulation, instance = self.simulation, self.instance
        keywords: dict[str, Any] = {"reply_to": f"replies/{self.name}"} if is_given else {}
        if ask.qos is not None:
            keywords |= simulation.qos(ask.qos)
        ask.instance = instance
        waiting = sum(each.instance is instance and not each.is_many for each in simulation.ledger.waiting) - 1
        instance.calls = calls = instance.calls + 1
        try:
            promise = instance.m.request(ask.channel, ask.payload, timeout=ask.timeout, **keywords)
        except MessagingError as error:
            ask.state = f"raised {type(error).__name__}"
            self.note(f"{ask.name} is refused: {type(error).__name__}")
            is_alone = calls == instance.calls  # another thread may have asked as well
            if isinstance(error, TooManyRequestsError) and is_alone and waiting < simulation.most_pending:
                simulation.broken(f"{ask.name} is one too many, although only {waiting} wait")
            return None
        self.promises[ask] = promise
        promise.add_done_callback(lambda promise: self._done(ask, promise))
        return promise

    def _done(self, ask: Ask, promise: Any) -> None:
        self.promises.pop(ask, None)
        error = promise.exception(0)
        self.simulation.settled(ask, error, None if error is not None else promise.result(0).payload)

    async def _ask_on_loop(self, asks: list[Ask], is_given: bool) -> None:
        async def each(ask: Ask) -> None:
            promise = self._request(ask, is_given)
            if promise is not None:
                with contextlib.suppress(MessagingError):
                    await promise

        await asyncio.gather(*map(each, asks))

    def do_cancel(self, way: str) -> None:
        """Step: cancel all requests that wait."""
        for ask, promise in [*self.promises.items()]:
            ask.is_cancelled = True
            ask.due = min(ask.due, self.world.scheduler.now + SLACK)
            promise.cancel()

    def do_wait(self) -> None:
        """Step: wait for all outcomes."""
        for ask, promise in [*self.promises.items()]:
            promise.exception(timeout=ask.timeout + SLACK)

    # --- many replies

    def do_ask_many(
        self, channel: str, verb: str, way: str, slow: float, buffer_size: int | None, **terms: Any
    ) -> None:
        """Step: make a request for many replies, and take them on a thread of its own."""
        self._ask_many(self._new(channel, verb, is_many=True, **terms), way, slow, buffer_size)

    def _ask_many(self, ask: Ask, way: str, slow: float, buffer_size: int | None) -> None:
        keywords: dict[str, Any] = {} if buffer_size is None else {"buffer_size": buffer_size}
        if ask.qos is not None:
            keywords |= self.simulation.qos(ask.qos)
        if way == "loop":
            self.process.start(lambda: asyncio.run(self._take_on_loop(ask, slow, keywords)), "loop")
            return
        stream = self._stream(ask, keywords)
        if stream is not None:
            self.process.start(lambda: self._take(ask, stream, slow), "taker")

    def _stream(self, ask: Ask, keywords: dict[str, Any]) -> Any:
        ask.instance = self.instance
        try:
            stream = self.m.request_many(ask.channel, ask.payload, timeout=ask.timeout, **keywords)
        except MessagingError as error:
            ask.state = f"raised {type(error).__name__}"
            self.note(f"{ask.name} is refused: {type(error).__name__}")
            return None
        self.streams[ask] = stream
        return stream

    def _take(self, ask: Ask, stream: Any, slow: float) -> None:
        error: MessagingError | None = None
        try:
            with stream:
                for message in stream:
                    self._took(ask, message.payload)
                    if slow:
                        clock.pause(slow)
                    if ask.taken is not None and len(ask.items) >= ask.taken:
                        break
        except MessagingError as found:
            error = found
        self._ended(ask, error)

    async def _take_on_loop(self, ask: Ask, slow: float, keywords: dict[str, Any]) -> None:
        stream = self._stream(ask, keywords)
        if stream is None:
            return
        error: MessagingError | None = None
        try:
            async with stream:
                async for message in stream:
                    self._took(ask, message.payload)
                    if slow:
                        await clock.sleep(slow)
                    if ask.taken is not None and len(ask.items) >= ask.taken:
                        break
        except MessagingError as found:
            error = found
        self._ended(ask, error)

    def _took(self, ask: Ask, payload: bytes) -> None:
        name, _, number = payload.decode().rpartition("=")
        if name != ask.name:
            self.simulation.broken(f"the replies to {ask.name} hold {payload!r}")
        ask.items.append(int(number))
        ask.due = self.world.scheduler.now + ask.timeout + SLACK

    def _ended(self, ask: Ask, error: MessagingError | None) -> None:
        self.streams.pop(ask, None)
        is_closed = ask.taken is not None and len(ask.items) >= ask.taken
        self.simulation.stream_ended(ask, error, CLOSED if is_closed else "")

    def do_close_streams(self) -> None:
        """Step: close all streams of replies, while their consumers wait for more."""
        for ask, stream in [*self.streams.items()]:
            ask.is_cancelled = True
            stream.close()

    # --- the instance

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self._close()
        self._connect()

    def _close(self) -> None:
        open_before = [*self.promises.items()]
        self.instance.close()
        for ask, promise in open_before:
            if not promise.done():
                self.simulation.broken(f"{ask.name} has no outcome after close()")

    def look(self) -> None:
        """Make a request on each channel: all faults are over, and each has to be answered. On a thread."""
        clock.pause(self.simulation.notice)
        while not all(each.is_online for each in self.simulation.responders):
            clock.pause(0.2)
        while self.m.runtime.get_runtime_dto().connection.state != "connected":
            clock.pause(0.2)
        self._count()
        asks = []
        for _ in range(2):
            for channel, verb in self.simulation.probes():
                ask = self._new(channel, verb, qos=1, timeout=300.0, count=3, is_many=verb == "items", is_probe=True)
                asks.append(ask)
                if ask.is_many:
                    self._ask_many(ask, "iterate", 0.0, None)
                else:
                    self._request(ask, False)
                while self.simulation.most_pending < 10_000 and not ask.state:
                    clock.pause(0.1)
            while not all(ask.state for ask in asks):
                clock.pause(0.1)
        self._count()
        self.is_checked = True

    def _count(self) -> None:
        """Compare the counters of the instance with what its promises said."""
        instance = self.instance
        while any(each.instance is instance and not each.is_many for each in self.simulation.ledger.waiting):
            clock.pause(0.1)
        found = self.m.runtime.get_runtime_dto().requests
        told = (found.pending, found.answered, found.faults, found.failed)
        expected = (0, instance.answered, instance.faults, instance.failed)
        if told != expected:
            self.simulation.broken(
                f"{self.name} counts {told} pending, answered, faulted and failed requests, and made {expected}"
            )
        if found.foreign and not self.simulation.may_get_foreign:
            self.simulation.broken(f"{self.name} counts {found.foreign} replies to requests of others")

    def close(self) -> None:
        """Close the instance."""
        self._close()
