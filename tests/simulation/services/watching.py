"""An interceptor that compares what it is told with what happens (``docs/tracing.md``)."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from messaging.interception import InboundMessage, Interceptor, OutboundMessage, Outcome
from tests.simulation.simulation import Role
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Watching(Interceptor):
    """Watches the messages of one instance, adds a header to each, and refuses some of them.

    Args:
        role: has the instance.
        refused: every so many messages that are published one is refused; 0: none.

    Attributes:
        published: messages whose outcome it has not been told, by their numbers.
        processed: messages that are being processed, by their numbers.
    """

    #: the payload of the message that is being processed
    current: ContextVar[bytes | None] = ContextVar("current", default=None)

    def __init__(self, role: Role, refused: int) -> None:
        self._role = role
        self._refused = refused
        self._process = role.process
        self._number = 0
        self.published: dict[int, bytes] = {}
        self.processed: dict[int, bytes] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the outcome of each message was told, and none is being processed, or the process is dead."""
        return not self._process.is_alive or not (self.published or self.processed)

    def _broken(self, what: str) -> None:
        self._role.simulation.broken(f"the interceptor of {self._role.name}: {what}")

    def intercept_publish(self, outbound: OutboundMessage) -> Callable[[Outcome], object] | None:
        """See ``Interceptor``."""
        self._number += 1
        number = self._number
        payload = outbound.message.payload
        if outbound.add_headers({"number": str(number)}) is not outbound.carries_headers:
            self._broken(f"the header of {payload[:20]!r} is not added as announced")
        if self._refused and number % self._refused == 0:
            raise PlannedError("as planned")
        self.published[number] = payload
        return lambda outcome: self._told(number, payload, outcome)

    def _told(self, number: int, payload: bytes, outcome: Outcome) -> None:
        if self.published.pop(number, None) is None:
            self._broken(f"the outcome of {payload[:20]!r} is told again: {outcome}")

    def intercept_process(self, inbound: InboundMessage) -> contextlib.AbstractContextManager[object]:
        """See ``Interceptor``."""
        return self._processing(inbound)

    @contextlib.contextmanager
    def _processing(self, inbound: InboundMessage) -> Iterator[None]:
        self._number += 1
        number, payload, thread = self._number, inbound.message.payload, threading.get_ident()
        self.processed[number] = payload
        before = self.current.get()
        self.current.set(payload)
        has_raised = True
        try:
            yield
            has_raised = False
        except PlannedError:
            pass
        finally:
            del self.processed[number]
            if self._process.is_alive:
                self._check_exit(inbound, thread, has_raised=has_raised)
            self.current.set(before)

    def _check_exit(self, inbound: InboundMessage, thread: int, *, has_raised: bool) -> None:
        payload = inbound.message.payload
        shown = repr(payload[:20])
        if threading.get_ident() != thread and not inbound.is_pulled:  # another thread may close the stream of a loop
            self._broken(f"{shown} is entered and exited on different threads")
        if self.current.get() != payload:
            self._broken(f"{shown} is exited with another message in its context")
        if inbound.is_manual or inbound.is_pulled:
            wanted: tuple[str, ...] = ("pending", "acknowledged", "rejected")
        else:
            wanted = ("rejected",) if has_raised else ("acknowledged",)
        if inbound.outcome not in wanted:
            self._broken(f"{shown} is exited as {inbound.outcome}, and not as one of {wanted}")


class Watched(Role):
    """A role whose instances have interceptors, if the option ``intercept`` of the plan asks for them."""

    def watched(self, *, may_refuse: bool = False) -> dict[str, Any]:
        """Return arguments of ``connect``.

        Args:
            may_refuse: whether the interceptor refuses messages, if the plan says so.
        """
        options = self.simulation.plan.options.get("intercept")
        if options is None:
            return {}
        self.watching.append(Watching(self, options["refused"] if may_refuse else 0))
        return {"interceptors": [self.watching[-1]]}

    @property
    def watching(self) -> list[Watching]:
        """The interceptors of all instances."""
        found: list[Watching] = self.__dict__.setdefault("_watching", [])
        return found
