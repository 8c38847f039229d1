"""Servers of a test run: started by the process that controls the run, used by all of its workers.

The plugin's fixtures ``mosquitto``, ``rabbitmq``, ``postgresql`` and ``servers`` come from here. With pytest-xdist the
controller has the :class:`Steward`, which starts a server when a worker first asks for it; each worker has
:class:`Servers`, which ask the steward through a socket. Without pytest-xdist both are in the one process.

Shared servers are used by several workers at a time, and cannot be stopped. Each worker has on RabbitMQ a virtual host,
on PostgreSQL the databases that it creates, and a Mosquitto of its own, which starts in 30 ms: Mosquitto 2.0 has no
virtual hosts, since its ``mount_point`` turns the shared subscription ``$share/group/a`` into one of a plain topic of
that name, and hides ``$SYS``.

Borrowed servers are used by one test at a time, which may stop, kill, restart and starve them. They are kept running
for the next test that asks for the same configuration; one that was left broken is started again first.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from messaging.testing.brokers import STARTS, Broker, BrokerError, Mosquitto, RabbitMQ
from messaging.testing.postgresql import PostgreSQL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

B = TypeVar("B", bound=Broker)

#: how long to wait for a borrowed server before another is started, seconds
WAIT_FOR_POOLED: Final = 30.0

#: what a borrower may have the steward do or tell, and what a user of a shared server may
_ANYTHING: Final = frozenset(
    ["start", "stop", "kill", "restart", "end_process", "enable", "add_virtual_host", "pid", "running"]
)
_HARMLESS: Final = frozenset(["start", "enable", "add_virtual_host", "pid", "running"])


class _Pool:
    """Servers of one configuration that are lent to one borrower at a time."""

    def __init__(self) -> None:
        self.idle: list[_Kept] = []
        self.lent = 0


class _Kept:
    """A server in the hands of the steward."""

    def __init__(self, number: int, broker: Broker, allowed: frozenset[str]) -> None:
        self.number = number
        self.broker = broker
        self.allowed = allowed
        self.lock = threading.Lock()
        #: where a borrowed one returns to
        self.pool = _Pool()

    @property
    def description(self) -> tuple[int, type[Broker], dict[str, Any]]:
        """Return what :class:`Servers` make their handle of."""
        return self.number, type(self.broker), self.broker.__getstate__()


class Steward:
    """Starts servers on request, and stops them all at the end. Thread safe.

    Args:
        workers: ids of the workers that are known from the beginning; others may come later.
    """

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self.workers = [*workers]
        self._lock = threading.Lock()  # of the tables; never held while a server starts
        self._freed = threading.Condition(self._lock)
        self._shared: dict[tuple[str, str], _Kept] = {}
        self._starting: dict[tuple[str, str], threading.Lock] = {}
        self._pools: dict[str, _Pool] = {}
        self._kept: dict[int, _Kept] = {}
        self._listener: Listener | None = None
        self._folder: Path | None = None
        self._address: tuple[str, str] | None = None
        self._is_closed = False

    def share(self, kind: str, worker: str) -> _Kept:
        """Return the shared server of a kind, started at the first call.

        Raises:
            BrokerError: it does not start. The next call tries again.
        """
        key = (kind, worker if kind == "mosquitto" else "")
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:
            kept = self._shared.get(key)
            if kept is None:
                kept = self._shared[key] = self._start(_shared(kind, self.workers), _HARMLESS)
            if worker and isinstance(kept.broker, RabbitMQ):
                kept.broker.add_virtual_host(worker)
            return kept

    def borrow(self, maker: type[Broker], arguments: tuple[Any, ...], options: dict[str, Any], limit: int) -> _Kept:
        """Return a running server for one borrower.

        When ``limit`` servers of this configuration are lent, wait until one is returned. After ``WAIT_FOR_POOLED``
        seconds start another all the same: the borrower may have lent them itself.
        """
        pool = self._pool(maker, arguments, options)
        with self._lock:
            self._freed.wait_for(lambda: pool.idle or pool.lent < limit, WAIT_FOR_POOLED)
            pool.lent += 1
            kept = pool.idle.pop() if pool.idle else None
        try:
            if kept is None:
                kept = self._start(maker(*arguments, **options), _ANYTHING)
            else:
                self._repair(kept)
        except BaseException:
            with self._lock:
                pool.lent -= 1
                self._freed.notify_all()
            raise
        kept.pool = pool
        return kept

    def give_back(self, kept: _Kept) -> None:
        """Lend the server to the next borrower."""
        with self._lock:
            kept.pool.lent -= 1
            kept.pool.idle.append(kept)
            self._freed.notify_all()

    def call(self, number: int, name: str, arguments: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        """Call a method of a server, or read a property; return the outcome and the server's state."""
        kept = self._kept[number]
        if name not in kept.allowed:
            raise BrokerError(
                f"this {kept.broker.name} is shared by the tests of a run: a test that needs {name}() borrows one"
            )
        with kept.lock:
            found = getattr(kept.broker, name)
            return found(*arguments) if callable(found) else found, kept.broker.__getstate__()

    def close(self) -> None:
        """Stop all servers and remove their data. Idempotent."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = [*self._kept.values()], {}
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for each in kept:
            each.broker.kill()  # there is nothing to save
            each.broker.close()

    def _pool(self, maker: type[Broker], arguments: tuple[Any, ...], options: dict[str, Any]) -> _Pool:
        key = repr((maker.__module__, maker.__qualname__, arguments, sorted(options.items())))
        with self._lock:
            return self._pools.setdefault(key, _Pool())

    def _start(self, broker: Broker, allowed: frozenset[str]) -> _Kept:
        broker.__enter__()
        with self._lock:
            if not self._is_closed:
                kept = _Kept(len(self._kept) + 1, broker, allowed)
                self._kept[kept.number] = kept
                return kept
        broker.close()
        raise BrokerError("the test run has ended")

    def _repair(self, kept: _Kept) -> None:
        with kept.lock:
            if not kept.broker.answers:
                kept.broker.kill()
                kept.broker.start()

    # --- for other processes

    def listen(self) -> tuple[str, str]:
        """Serve other processes from now on; return the address and the key for :class:`RemoteServers`. Idempotent."""
        if self._address is None:
            key = secrets.token_bytes(16)
            self._folder = Path(tempfile.mkdtemp(prefix="rx-messaging-run-"))
            self._listener = Listener(str(self._folder / "steward"), "AF_UNIX", backlog=64, authkey=key)
            self._address = (str(self._listener.address), key.hex())
            threading.Thread(target=self._accept, args=(self._listener,), name="steward", daemon=True).start()
        return self._address

    def _accept(self, listener: Listener) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError, EOFError, AuthenticationError):  # one that went away at once
                connection = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="steward", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer a worker until it ends; what it has borrowed is free then, however it ended."""
        borrowed: dict[int, _Kept] = {}
        try:
            with connection, contextlib.suppress(OSError, EOFError):
                while True:
                    request = connection.recv_bytes()
                    try:
                        told = {"answer": _encoded(self._answer(borrowed, *_decoded(json.loads(request))))}
                    except Exception as error:  # noqa: BLE001  # the worker raises it
                        is_known = isinstance(error, BrokerError)
                        told = {"error": str(error) if is_known else f"{type(error).__name__}: {error}"}
                    connection.send_bytes(json.dumps(told).encode())
        finally:
            for kept in borrowed.values():
                self.give_back(kept)

    def _answer(self, borrowed: dict[int, _Kept], what: str, *arguments: Any) -> object:
        if what == "share":
            return self.share(*arguments).description
        if what == "borrow":
            kept = self.borrow(*arguments)
            borrowed[kept.number] = kept
            return kept.description
        if what == "give_back":
            (number,) = arguments
            if number in borrowed:  # else it is free since its borrower lost the connection
                self.give_back(borrowed.pop(number))
            return None
        return self.call(*arguments)


class Servers:
    """The servers of a run, for the tests of one process. Not thread safe.

    Args:
        steward: in this process.
        worker: the name of this process among the workers of the run; empty if it is the only one.
    """

    def __init__(self, steward: Steward, worker: str = "") -> None:
        self._steward = steward
        self._worker = worker
        self._handles: dict[str, Broker] = {}
        self._borrowed: dict[int, _Kept] = {}

    def mosquitto(self) -> Mosquitto:
        """Return the Mosquitto that the tests of this process share."""
        return self._shared(Mosquitto)

    def rabbitmq(self) -> RabbitMQ:
        """Return the RabbitMQ of the run, with a virtual host of this process."""
        found = self._shared(RabbitMQ)
        found.virtual_host = self._worker or "/"
        return found

    def postgresql(self) -> PostgreSQL:
        """Return the PostgreSQL of the run. Databases of its ``create_database`` are the caller's alone."""
        return self._shared(PostgreSQL)

    @contextlib.contextmanager
    def borrow(self, maker: Callable[..., B], *arguments: Any, limit: int = 2, **options: Any) -> Iterator[B]:
        """Lend a running server that the test may stop, kill and restart; it has ports and data of earlier borrowers.

        Args:
            maker: a class of brokers.
            arguments, options: for ``maker``. Servers that are made of equal ones are interchangeable.
            limit: of servers of this configuration in the run; one more borrower waits.

        Raises:
            BrokerError: it does not start.
        """
        handle = self._handle(self._ask("borrow", maker, arguments, options, limit))
        try:
            yield cast("B", handle)
        finally:
            self._ask("give_back", handle.__dict__["_number"])

    def close(self) -> None:
        """End the use of the servers; they go on running."""

    def _shared(self, kind: type[B]) -> B:
        if kind.name not in self._handles:
            self._handles[kind.name] = self._handle(self._ask("share", kind.name, self._worker))
        return cast("B", self._handles[kind.name])

    def _handle(self, description: Any) -> Broker:
        number, kind, state = description
        made: Broker = object.__new__(type(kind.__name__, (_Handle, kind), {}))
        made.__dict__.update(state, _number=number, _ask=self._ask)
        return made

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._steward._answer(self._borrowed, what, *arguments)


class RemoteServers(Servers):
    """Servers whose steward is in another process.

    Args:
        address, key: of :meth:`Steward.listen`.
        worker: see :class:`Servers`.
    """

    def __init__(self, address: str, key: str, worker: str) -> None:
        self._worker = worker
        self._handles = {}
        self._lock = threading.Lock()
        self._address = address
        self._key = bytes.fromhex(key)
        self._connection: Connection | None = None

    def close(self) -> None:
        """End the use of the servers; they go on running, and what is borrowed still is free."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, what: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = Client(self._address, "AF_UNIX", authkey=self._key)
                self._connection.send_bytes(json.dumps(_encoded([what, *arguments])).encode())
                told = json.loads(self._connection.recv_bytes())
            except BaseException as error:
                # After an interrupt, such as a time-out of pytest, the answer must not be taken for the next one.
                self.close()
                if isinstance(error, (OSError, EOFError)):
                    reason = f"the process that controls the test run does not answer: {error}"
                    raise BrokerError(reason) from error
                raise
        if "error" in told:
            raise BrokerError(told["error"])
        return _decoded(told["answer"])


class _Handle:
    """What a process has of a server of the steward: looks like a broker of its own, and has the steward control it."""

    _number: int
    _ask: Callable[..., Any]

    def _control(self, name: str, *arguments: Any) -> Any:
        outcome, state = self._ask("call", self._number, name, arguments)
        state.pop("virtual_host", None)  # each user has its own
        self.__dict__.update(state)
        return outcome

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it running."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__dict__['host']}:{self.__dict__['port']} of the run>"

    @property
    def pid(self) -> int:
        return int(self._control("pid"))

    @property
    def running(self) -> bool:
        return bool(self._control("running"))

    def start(self) -> None:
        self._control("start")

    def stop(self) -> None:
        self._control("stop")

    def kill(self) -> None:
        self._control("kill")

    def restart(self) -> None:
        self._control("restart")

    def end_process(self, how: int) -> None:
        self._control("end_process", how)

    def enable(self, *plugins: str) -> None:
        self._control("enable", *plugins)

    def add_virtual_host(self, name: str) -> None:
        self._control("add_virtual_host", name)

    def close(self) -> None:
        """Leave it running: it is the steward's."""


def _encoded(value: Any) -> Any:
    """Return what JSON has of a value: classes by their names, objects by their attributes.

    Raises:
        BrokerError: the value is of another kind.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [*map(_encoded, value)]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, type):
        return {"class": [value.__module__, value.__qualname__]}
    try:
        state = value.__getstate__()
    except TypeError:
        state = None
    if not isinstance(state, dict):
        raise BrokerError(f"a {type(value).__name__} cannot be described to another process")
    return {"object": [_encoded(type(value)), _encoded(state)]}


def _decoded(value: Any) -> Any:
    """Return the value that :func:`_encoded` returned ``value`` for."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "list":
            return [*map(_decoded, content)]
        case "tuple":
            return tuple(map(_decoded, content))
        case "dict":
            return {_decoded(key): _decoded(each) for key, each in content}
        case "path":
            return Path(content)
        case "class":
            return attrgetter(content[1])(importlib.import_module(content[0]))
        case _:
            kind, state = map(_decoded, content)
            made = object.__new__(kind)
            made.__dict__.update(state)
            return made


def _shared(kind: str, workers: list[str]) -> Broker:
    if kind == "rabbitmq":
        return RabbitMQ(virtual_hosts=workers)
    return PostgreSQL() if kind == "postgresql" else Mosquitto()


class Starts:
    """Counts the starts of brokers in this process and those that it starts, while it is entered."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def begin(self) -> None:
        """Count from now on, unless a process above counts already."""
        if STARTS not in os.environ:
            handle, name = tempfile.mkstemp(prefix="rx-messaging-starts-")
            os.close(handle)
            self._file = Path(name)
            os.environ[STARTS] = name

    def end(self) -> None:
        """Count no more. Idempotent."""
        if self._file is not None:
            os.environ.pop(STARTS, None)
            self._file.unlink(missing_ok=True)
            self._file = None

    def read(self) -> Counter[str]:
        """Return the starts so far, by the kind of broker; later starts of the same broker as ``"rabbitmq again"``."""
        return Counter() if self._file is None else Counter(self._file.read_text().splitlines())

    def __str__(self) -> str:
        """Return a line for people, or nothing if there were no starts."""
        first: list[str] = []
        again: list[str] = []
        for what, count in sorted(self.read().items()):
            kind, _, is_again = what.partition(" ")
            (again if is_again else first).append(f"{kind} {count}")
        told = f"brokers started: {', '.join(first)}" if first else ""
        return f"{told}; started again: {', '.join(again)}" if again else told
