"""What was asked, what became of it, and which handlers worked on it: the books of the service ``requests``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from messaging import Messaging

#: time that a promise may take beyond its deadline, virtual seconds. Threads are held up for up to 20 s at each point
SLACK: Final = 60.0
#: the requester was killed before there was an outcome
KILLED: Final = "killed"
ANSWERED: Final = "answered"
#: a stream of replies that its consumer closed before its end
CLOSED: Final = "closed"
#: errors of requests that are known not to have reached a handler
NEVER_HANDLED: Final = frozenset({"DeadlineError", "UnroutableError"})


@dataclass(slots=True, eq=False)
class Instance:
    """An instance of a role, from ``connect`` to ``close``.

    Attributes:
        m: the instance.
        calls: number of calls of ``request``.
        answered, faults, failed: number of its requests with one reply, by outcome.
        is_closing: ``close()`` was called.
        is_closed: ``close()`` has returned.
    """

    m: Messaging
    calls: int = 0
    answered: int = 0
    faults: int = 0
    failed: int = 0
    is_closing: bool = False
    is_closed: bool = False

    def close(self) -> None:
        """Close the instance."""
        self.is_closing = True
        self.m.close()
        self.is_closed = True


@dataclass(slots=True, eq=False)
class Served:
    """A registered request handler.

    Attributes:
        channel: of its requests.
        limit: how many requests it may work on at a time.
        instance: that it is registered with.
        active: number of requests that it works on.
        ended: when ``unregister`` returned; ``None`` before.
    """

    channel: str
    limit: int
    instance: Instance
    active: int = 0
    ended: float | None = None


@dataclass(slots=True, eq=False)
class Ask:
    """A request.

    Attributes:
        name: its id.
        requester: name of the role.
        channel: where to.
        verb: what the handler is to do: ``echo``, ``fail``, ``ask``, ``later``, ``never`` or ``items``.
        count: number of replies, of ``items``.
        is_many: whether it was made by ``request_many``.
        qos: of the request.
        timeout: seconds.
        taken: replies after which the requester closes the stream; ``None``: it takes all.
        asked, ended: virtual times at which it was made, and had its outcome.
        due: virtual time until which it needs an outcome; of many replies: until which the next one has to come.
        state: ``""`` while it waits, :data:`ANSWERED`, :data:`KILLED`, :data:`CLOSED`, or the name of an error.
        reason: kind of the ``ReplyError``.
        handled: how many times a handler has begun to work on it.
        handlers: names of the roles whose handlers have.
        items: of many replies, their numbers.
        is_cancelled: the requester has cancelled it.
        is_probe: it was made when all faults were over: nothing excuses its failure.
        is_inner: a handler has made it, with the instance that its own requests come to.
    """

    name: str
    requester: str
    channel: str
    verb: str
    pause: float = 0.0
    count: int = 1
    fail_at: int | None = None
    is_many: bool = False
    qos: int | None = None
    timeout: float = 60.0
    taken: int | None = None
    asked: float = 0.0
    ended: float = 0.0
    due: float = 0.0
    state: str = ""
    reason: str = ""
    handled: int = 0
    handlers: set[str] = field(default_factory=set)
    items: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    is_probe: bool = False
    is_inner: bool = False
    instance: Instance | None = None

    @property
    def payload(self) -> bytes:
        """The request as it is sent."""
        told: dict[str, Any] = {"id": self.name, "verb": self.verb, "pause": self.pause}
        if self.verb == "items":
            told |= {"count": self.count, "fail_at": self.fail_at}
        return json.dumps(told).encode()

    def reply(self, number: int = 0) -> bytes:
        """Return the reply of this number."""
        return f"{self.name}={number}".encode()

    @property
    def fails(self) -> bool:
        """Whether the handler is to fail."""
        return self.verb == "fail" or self.fail_at is not None

    @property
    def is_given_up(self) -> bool:
        """Whether the requester has cancelled it, or closed the instance that it was made with."""
        return self.is_cancelled or (self.instance is not None and self.instance.is_closing)


class Ledger:
    """All requests and handlers of a run.

    Attributes:
        asks: the requests by name.
        served: the handlers.
        held: begin and end of the waits of handlers for replies that a full window of MQTT kept from them.
    """

    def __init__(self) -> None:
        self.asks: dict[str, Ask] = {}
        self.served: list[Served] = []
        self.held: list[tuple[float, float]] = []
        #: the requests that had no outcome when that was asked last
        self._waiting: list[Ask] = []

    def add(self, ask: Ask) -> None:
        """Enter a request."""
        self.asks[ask.name] = ask
        self._waiting.append(ask)

    @property
    def waiting(self) -> list[Ask]:
        """The requests without an outcome."""
        self._waiting = [ask for ask in self._waiting if not ask.state]
        return self._waiting
