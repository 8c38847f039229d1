"""Faults that a plan draws, for all services alike; and the connections that were lost."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import PublishRefusedError
from tests.simulation.brokers.amqp import AmqpBroker
from tests.simulation.plans import Fault
from tests.simulation.simulation import AMQP_FAULTS, MQTT_FAULTS, Simulation, span

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from tests.simulation.brokers.amqp.connection import AmqpConnection
    from tests.simulation.brokers.host import Broker, Connection, Peer
    from tests.simulation.world.scheduler import Scheduler

#: faults of the AMQP broker after which a queue of one connection may be gone, although the connection is not
CHANNEL_FAULTS: Final = ("close_channel", "cancel_consumer", "internal_error", "force_close")
#: faults by which only the client loses its connection. docs/faults.md: "RabbitMQ holds the unsettled messages of the
#: old consumer until it notices, too … those messages come after newer ones"
HALF_LOSSES: Final = frozenset({"black_hole", "stall"})


def draw_faults(
    random: random.Random, protocol: str, roles: Sequence[str], *, until: float = 10.0, least: int = 1
) -> list[Fault]:
    """Return faults in the order of their times; none in one plan of ten.

    Args:
        random: decides.
        protocol: the broker and the network fail only where there are some.
        roles: names of roles whose connections and processes may be hit.
        until: time of the last one, seconds.
        least: least number, in a plan that has any.
    """
    if random.random() < 0.1:
        return []
    some = [*roles, None]
    makers: list[Any] = [
        lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 1.0)}),
        lambda: ("wall_clock", {"role": random.choice(roles), "offset": random.choice((-3600.0, -5.0, 5.0, 86_400.0))}),
    ]
    if protocol != "memory":
        kinds = AMQP_FAULTS if protocol == "amqp" else MQTT_FAULTS
        makers = [
            *makers,
            *[lambda: ("cut", {"role": random.choice(some)})] * 6,
            *[lambda: ("black_hole", {"role": random.choice(some), "seconds": span(random, 0.01, 60.0)})] * 2,
            lambda: ("stall", {"role": random.choice(some), "seconds": span(random, 0.01, 10.0)}),
            lambda: ("refuse", {"seconds": span(random, 0.01, 20.0)}),
            lambda: ("silence", {"seconds": span(random, 0.01, 20.0)}),
            lambda: ("no_names", {"seconds": span(random, 0.01, 20.0)}),
            lambda: ("slow_network", {
                "seconds": span(random, 0.1, 20.0), "longest": span(random, 0.001, 1.0),
                "piece": random.choice((1, 3, 50, 65_536)),
            }),
            *[lambda: ("restart_broker", {"seconds": span(random, 0.01, 10.0), "is_kill": random.random() < 0.5})] * 2,
            *[lambda: ("broker", {"seconds": span(random, 0.1, 20.0), **random.choice(kinds)})] * 3,
            *[lambda: ("kill", {
                "role": random.choice(roles), "seconds": span(random, 0.01, 10.0), "vanishes": random.random() < 0.3,
            })] * 3,
        ]  # fmt: skip
    faults = []
    for _ in range(max(least, random.choice((1, 2, 2, 3, 3, 4, 6)))):
        name, arguments = random.choice(makers)()
        faults.append(Fault(span(random, 1e-3, until), name, arguments))
    return sorted(faults, key=lambda fault: fault.at)


class Breaks:
    """Notes when connections end at a broker, by the role that opened them. Put it between network and broker.

    Attributes:
        times: moments, by role; each connection has one, when its socket ends.
        closing: moments at which an AMQP broker began to close a connection, by role: it gives the unsettled messages
            back then, and waits for ``connection.close-ok`` before the socket ends.
        ended: moments at which an AMQP broker ended a channel or a consumer, but not its connection, by role.
        made: the number of connections, by role.
    """

    def __init__(self, broker: Broker, scheduler: Scheduler) -> None:
        self._broker = broker
        self._scheduler = scheduler
        self.times: dict[str, list[float]] = {}
        self.closing: dict[str, list[float]] = {}
        self.ended: dict[str, list[float]] = {}
        self.made: dict[str, int] = {}
        #: connections that the broker has now, and the times when it had none any more, by role
        self._open: dict[str, list[_Watched]] = {}
        self._away: dict[str, list[tuple[float, float]]] = {}
        #: when the broker last noticed that a connection of a role had ended before the role made another one
        self._noticed: dict[str, float] = {}
        if isinstance(broker, AmqpBroker):
            broker.on_ended = lambda connection: self._note(self.ended, connection)
            broker.on_closing = lambda connection: self._note(self.closing, connection)

    def accept(self, peer: Peer) -> Connection:
        """See ``Broker``."""
        owner: Any = getattr(peer, "owner", None)
        role = "" if owner is None else owner.name.split(".")[0]
        watched = _Watched(peer, role, self._over)
        self.made[role] = self.made.get(role, 0) + 1
        found = self._open.setdefault(role, [])
        for each in found:
            each.is_ghost |= each.is_half_open
        found.append(watched)
        if away := self._away.get(role):
            begin, end = away[-1]
            away[-1] = begin, min(end, self._scheduler.now)
        watched.connection = self._broker.accept(watched)
        return watched

    def _over(self, watched: _Watched, *, is_first: bool) -> None:
        role, now = watched.role, self._scheduler.now
        self.times.setdefault(role, []).append(now)
        if is_first:
            self._open[role].remove(watched)
            if watched.is_ghost:
                self._noticed[role] = now
            if not self._open[role]:
                self._away.setdefault(role, []).append((now, inf))

    def stop(self) -> None:
        """See ``Broker``."""
        self._broker.stop()

    def kill(self) -> None:
        """See ``Broker``."""
        self._broker.kill()

    def start(self) -> None:
        """See ``Broker``."""
        self._broker.start()

    def between(self, role: str, begin: float, end: float) -> bool:
        """Return whether a connection of ``role`` ended in that time, or the broker began to close one."""
        return any(begin <= each <= end for times in (self.times, self.closing) for each in times.get(role, ()))

    def is_away_between(self, role: str, begin: float, end: float) -> bool:
        """Return whether the broker had no connection of ``role`` for a part of that time, but had one before.

        The role may not know: its end of the connection is half open.
        """
        return any(since <= end and begin <= until for since, until in self._away.get(role, ()))

    def ghost_until(self, role: str) -> float:
        """Return until when the broker took an ended connection of ``role`` for open, beside a newer one.

        0 for never, and infinity if it still does.
        """
        return inf if any(each.is_ghost for each in self._open.get(role, ())) else self._noticed.get(role, 0.0)

    def ended_between(self, role: str, begin: float, end: float) -> bool:
        """Return whether the broker ended a channel or a consumer of ``role`` in that time."""
        return any(begin <= each <= end for each in self.ended.get(role, ()))

    def has_refused(self, kind: str, roles: Iterable[str], begin: float, end: float) -> bool:
        """Return whether a ``ReplyError`` of a kind says that the broker refused the reply of one of ``roles``.

        The broker may have closed a channel of it in that time. "The broker does not take the reply …: answered with a
        fault" (``docs/reply-to.md``, Acknowledgement), and a close of the channel with 406 says that it does not
        (``docs/amqp.md``, Errors).
        """
        return kind == PublishRefusedError.__name__ and any(self.ended_between(role, begin, end) for role in roles)

    def _note(self, moments: dict[str, list[float]], connection: AmqpConnection) -> None:
        watched: Any = connection.peer
        moments.setdefault(watched.role, []).append(self._scheduler.now)


def watch_channels(simulation: Simulation) -> Breaks | None:
    """Note when the broker ends channels, if it closes some for no reason in the plan of ``simulation``."""
    service = simulation.service
    if service is None or not any("close_channel" in fault.arguments for fault in simulation.plan.faults):
        return None
    service.broker = breaks = Breaks(simulation.broker, simulation.world.scheduler)
    return breaks


class _Watched:
    """Both ends of a connection, as network and broker see each other."""

    def __init__(self, peer: Peer, role: str, over: Any) -> None:
        self._peer = peer
        self.role = role
        self._over = over
        self._is_open = True
        #: whether its role has a newer connection, and the broker has not noticed the end of this one
        self.is_ghost = False
        self.connection: Connection
        self.name = peer.name

    def _end(self) -> None:
        is_first, self._is_open = self._is_open, False
        self._over(self, is_first=is_first)

    @property
    def is_half_open(self) -> bool:
        """Whether the end of the client is gone."""
        return not getattr(self._peer, "has_client", True)

    def send(self, data: bytes) -> None:
        """See ``Peer``."""
        self._peer.send(data)

    def close(self) -> None:
        """See ``Peer``."""
        self._end()
        self._peer.close()

    def abort(self) -> None:
        """See ``Peer``."""
        self._end()
        self._peer.abort()

    @property
    def unsent(self) -> int:
        """See ``Peer``."""
        return self._peer.unsent

    def received(self, data: bytes) -> None:
        """See ``Connection``."""
        self.connection.received(data)

    def lost(self) -> None:
        """See ``Connection``."""
        self._end()
        self.connection.lost()
