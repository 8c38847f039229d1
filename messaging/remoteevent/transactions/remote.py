"""Managers in other processes: a server beside the manager, and the way to it.

**Threads.** Operations run on worker threads. A commit occupies none while it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from messaging.dispatch.calls import (
    PLAIN,
    TEXT,
    CallServer,
    Interface,
    Operation,
    RemoteObject,
    WireForm,
    checked_limit,
)
from messaging.errors import (
    ArgumentError,
    BoundReachedError,
    CannotAbortError,
    CannotCommitError,
    CannotJoinError,
    ClosedError,
    DeadlineError,
    UnknownTransactionError,
)
from messaging.errors.checks import check_instance
from messaging.errors.text import brief, tolerant
from messaging.execution import Closeable, Promise, refuse_in_loop, result_of, workers
from messaging.leases import (
    LEASE,
    SECONDS,
    Lease,
    lease_from_value,
    lease_operations,
    lease_time,
    seconds_of,
    value_of,
)
from messaging.leases.lease import check_duration
from messaging.model import check_name
from messaging.remoteevent.transactions.manager import TIME_LIMIT, TransactionManager
from messaging.remoteevent.transactions.participant import TransactionState, unnamed
from messaging.remoteevent.transactions.remote_participant import ParticipantServers, RemoteParticipant
from messaging.remoteevent.transactions.transaction import (
    Transaction,
    check_join,
    check_participant_name,
    check_timeout,
)
from messaging.remoteevent.transactions.two_phases import EndCallbacks

if TYPE_CHECKING:
    from messaging.instance import Messaging

#: a client waits longer than both phases of a manager with the default time limit, seconds
_TIMEOUT: Final = 3 * TIME_LIMIT
#: lease of a transaction that another process holds, before it is known, seconds
_ASSUMED: Final = 300.0
#: how long a participant waits for the state of a transaction whose lease is over, seconds
_ASK_TIMEOUT: Final = 5.0
#: longest wait of one request for the participants, seconds
_LONGEST: Final = 1e9


def _write_created(transaction: Transaction) -> dict[str, Any]:
    assert transaction.lease is not None  # noqa: S101  # it was created just now
    return {"id": transaction.id, "lease": LEASE.write(transaction.lease)}


def _read_joined(value: Any) -> float | None:
    return seconds_of(value.get("remaining")) if isinstance(value, dict) else None


_ID: Final = TEXT._replace(what="the id of a transaction")
_NAME: Final = WireForm("a name", read=check_participant_name)
_CHANNEL: Final = WireForm("the channel of a participant", read=check_name)
#: whether all participants have confirmed the outcome
_IS_CONFIRMED: Final = WireForm("a boolean", read=lambda value: value is True)
#: the operations of a manager; the leases of its transactions are served on the same channel
TRANSACTIONS: Final = Interface(
    create=Operation(WireForm("a transaction", _write_created), duration=SECONDS._replace(missing=Lease.ANY)),
    # seconds that are left of the lease; managers of earlier versions return nothing
    join=Operation(
        WireForm("the lease", lambda remaining: {"remaining": value_of(remaining)}, _read_joined),
        transaction=_ID,
        name=_NAME,
        crash_count=WireForm(missing=0),
        channel=_CHANNEL,
    ),
    commit=Operation(_IS_CONFIRMED, transaction=_ID, timeout=PLAIN),
    abort=Operation(_IS_CONFIRMED, transaction=_ID, timeout=PLAIN),
    state=Operation(WireForm("a state", int, TransactionState), transaction=_ID),
    # ids of the transactions that are not completed
    recover=Operation(name=_NAME, channel=_CHANNEL),
)


class TransactionServer(CallServer):
    """Makes a transaction manager available to other processes. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance with requests. It also reaches the participants.
        channel: of the manager.
        manager: stays as it is when the server is closed.

    Raises:
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, manager: TransactionManager) -> None:
        check_instance("manager", manager, TransactionManager)
        self._manager = manager
        operations = TRANSACTIONS.served(
            create=manager.create,
            join=self._join,
            commit=partial(self._end, TransactionState.COMMITTED),
            abort=partial(self._end, TransactionState.ABORTED),
            state=manager.state,
            recover=self._recover,
        )
        super().__init__(messaging, channel, {**operations, **lease_operations(manager.landlord)})

    def _participant(self, channel: str) -> RemoteParticipant:
        return RemoteParticipant(self.messaging, channel, timeout=self._manager.time_limit)

    def _join(self, transaction_id: str, name: str, crash_count: int, channel: str) -> float:
        transaction = self._manager.get(transaction_id)
        participant = self._participant(channel)
        transaction.join(participant, name=name, crash_count=crash_count, reference=channel)
        return transaction.remaining

    def _end(self, wanted: TransactionState, transaction_id: str, timeout: Any) -> bool | Promise[bool]:
        """Return whether all participants have confirmed the outcome; promise it for a transaction that goes on."""
        try:
            transaction = self._manager.get(transaction_id)
        except (ClosedError, UnknownTransactionError):
            return self._ended(transaction_id, wanted)
        is_commit = wanted is TransactionState.COMMITTED
        ended = transaction.commit_soon(timeout) if is_commit else transaction.abort_soon(timeout)
        promise: Promise[bool] = Promise(f"end transaction {transaction_id}")

        def settle() -> None:
            error = ended.exception(0)
            if error is None or type(error) is DeadlineError:
                promise.resolve(error is None)
            else:
                promise.reject(error)

        ended.listen(settle)
        return promise

    def _ended(self, transaction_id: str, wanted: TransactionState) -> bool:
        """Answer a client that asks again, because the first answer was lost."""
        state = self._manager.state(transaction_id)
        if state is wanted:
            return True
        if wanted is TransactionState.COMMITTED:
            raise CannotCommitError(f"transaction {transaction_id} is aborted")
        raise CannotAbortError(f"transaction {transaction_id} is committed")

    def _recover(self, name: str, channel: str) -> Promise[list[str]]:
        return self._manager.recover_soon(name, self._participant(channel), channel)


class RemoteTransactionManager(RemoteObject, Closeable):
    """The way to a transaction manager in another process. Thread safe; a context manager, which closes it.

    Args:
        messaging: an instance that is connected to the broker of the manager, with requests.
        channel: of its :class:`TransactionServer`.
        timeout: seconds until a request fails; longer than the time limit of the participants.

    Raises:
        ArgumentError, InvalidChannelError: an argument is not as described.
    """

    interface = TRANSACTIONS

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float = _TIMEOUT) -> None:
        super().__init__(messaging, channel, timeout=checked_limit(timeout))
        #: the servers of the participants of this process. For transactions
        self.servers = ParticipantServers(messaging, self._unfinished)

    def create(self, duration: float = Lease.ANY) -> RemoteTransaction:
        """Create a transaction, and wait for the answer; see ``TransactionManager.create``.

        Raises:
            ArgumentError: ``duration`` is not one of leases.
            LeaseDeniedError, MessagingError: it is not created.
            WouldBlockError: the thread runs an event loop: ``await`` :meth:`create_soon`. Nothing was done.
        """
        return result_of(lambda: self.create_soon(duration), "the answer of the manager", "`await` create_soon()")

    def create_soon(self, duration: float = Lease.ANY) -> Promise[RemoteTransaction]:
        """Create a transaction; return the promise of it. Fails as :meth:`create` raises."""
        asked = check_duration(duration)
        asked_at = lease_time()

        def convert(result: Any) -> RemoteTransaction:
            found = result["lease"]
            lease = lease_from_value(self.messaging, self.channel, found, asked, asked_at, timeout=self.timeout)
            return RemoteTransaction(str(result["id"]), lease, self)

        return self.call("create", {"duration": asked}, convert=convert)

    def transaction(self, transaction_id: str, lease: Lease | None = None) -> RemoteTransaction:
        """Return the way to a transaction that another process created, by its id. It may be unknown or ended."""
        if not isinstance(transaction_id, str) or not transaction_id or not transaction_id.isprintable():
            raise ArgumentError(f"the id of a transaction must be a printable text, not {brief(transaction_id)}")
        return RemoteTransaction(transaction_id, lease, self)

    def state(self, transaction_id: str) -> Promise[TransactionState]:
        """Return the promise of the state of a transaction. Fails with ``UnknownTransactionError``."""
        return self.call("state", {"transaction": transaction_id})

    def recover(self, name: str, participant: Any, *, channel: str | None = None) -> Promise[list[str]]:
        """Make a participant reachable again, and have the manager tell it the outcomes.

        Args:
            name: under which it joined.
            participant: of this process.
            channel: on which a :class:`ParticipantServer` of the application serves it; ``None``: one is made.

        Returns:
            The promise of the ids of its transactions that are not completed, see ``TransactionManager.recover``. It
            resolves when the manager has stored where the participant is now, and fails if it cannot: call it again.

        Raises:
            WouldBlockError: the thread runs an event loop, and no ``channel`` is given. Nothing was done.
        """
        check_participant_name(name)
        return self._unfinished(name, channel or self.reach(name, participant))

    def reach(self, name: str, participant: Any) -> str:
        """Return a channel of a participant of this process, which is served until :meth:`close`."""
        return self.servers.named(name, participant)

    def _unfinished(self, name: str, channel: str) -> Promise[list[str]]:
        """Ask for the transactions of a participant that are not completed."""
        return self.call("recover", {"name": name, "channel": channel})

    def waiting(self, seconds: float) -> float:
        """Return the timeout of a call that waits up to ``seconds`` at the manager. For transactions."""
        return (self.timeout or _TIMEOUT) + min(max(seconds, 0.0), _LONGEST)

    def close(self) -> None:
        """Make the participants of this process unreachable. Idempotent."""
        self.servers.close()


class RemoteTransaction:
    """A transaction of a manager in another process. Thread safe. ``RemoteTransactionManager`` makes it.

    Attributes:
        id: of the transaction.
        lease: of the transaction; ``None`` if another process holds it.
        state: as far as it is known here; :meth:`RemoteTransactionManager.state` asks the manager.
    """

    def __init__(self, transaction_id: str, lease: Lease | None, manager: RemoteTransactionManager) -> None:
        check_instance("manager", manager, RemoteTransactionManager)
        self.id = transaction_id
        self.lease = lease
        self.state = TransactionState.ACTIVE
        self._manager = manager
        self._callbacks = EndCallbacks(transaction_id)
        #: time of the lease clock at which the lease ends, where another process holds it
        self._ends = lease_time() + _ASSUMED

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends, as far as it is known here; 0 if it has ended."""
        return max(0.0, self._ends - lease_time()) if self.lease is None else self.lease.remaining

    def ask_state(self) -> Promise[TransactionState]:
        """Ask the manager for the state; return the promise of it, which fails after 5 s. For participants."""
        limit = min(_ASK_TIMEOUT, self._manager.timeout or _ASK_TIMEOUT)
        return self._manager.call("state", {"transaction": self.id}, timeout=limit)

    def join(
        self, participant: Any, *, name: str | None = None, crash_count: int = 0, reference: str | None = None
    ) -> None:
        """Let a participant take part, and wait for the answer; see :meth:`Transaction.join`.

        Args:
            participant: of this process, or a :class:`RemoteParticipant`.
            name, crash_count: see there.
            reference: channel on which a :class:`ParticipantServer` of the application serves the participant;
                ``None``: one is made. It is closed with the manager; without a name, when the participant knows the
                outcome of the transaction, and the manager does not tell it again.

        Raises:
            ArgumentError, CannotJoinError: see there.
            UnknownTransactionError: the transaction has ended.
            MessagingError: as requests do.
            WouldBlockError: the thread runs an event loop.
        """
        _, count = check_join(participant, name, crash_count)
        refuse_in_loop("the answer of the manager", "join on a worker thread")
        servers = self._manager.servers
        if reference is not None:
            channel = reference
        elif name is not None:
            channel = servers.named(name, participant)
        else:
            channel = servers.unnamed(self.id, participant)
        found = unnamed(type(participant).__name__, channel) if name is None else name
        arguments = {"transaction": self.id, "name": found, "crash_count": count, "channel": channel}
        asked_at = lease_time()
        try:
            remaining = self._manager.call("join", arguments).result()
        except (CannotJoinError, UnknownTransactionError, ArgumentError, BoundReachedError):
            servers.abandon(self.id, channel)
            raise
        if remaining is not None:
            self._ends = asked_at + remaining

    def commit(self, timeout: float | None = None) -> None:
        """Commit, see :meth:`Transaction.commit`; also raises as requests do, and ``UnknownTransactionError``.

        The request has ``timeout`` seconds beyond the timeout of the manager.
        """
        result_of(lambda: self.commit_soon(timeout), "the answer of the manager", "`await` commit_soon()")

    def abort(self, timeout: float | None = None) -> None:
        """Abort, see :meth:`Transaction.abort`; also raises as requests do, and ``UnknownTransactionError``."""
        result_of(lambda: self.abort_soon(timeout), "the answer of the manager", "`await` abort_soon()")

    def commit_soon(self, timeout: float | None = None) -> Promise[None]:
        """Commit; return the promise that :meth:`commit` has returned. It may be called again after a failure."""
        return self._end("commit", timeout, TransactionState.COMMITTED)

    def abort_soon(self, timeout: float | None = None) -> Promise[None]:
        """Abort; return the promise that :meth:`abort` has returned."""
        return self._end("abort", timeout, TransactionState.ABORTED)

    def _end(self, operation: str, timeout: float | None, wanted: TransactionState) -> Promise[None]:
        limit = check_timeout(timeout)
        patience = self._manager.waiting(limit or 0.0)
        answer = self._manager.call(operation, {"transaction": self.id, "timeout": limit}, timeout=patience)
        promise: Promise[None] = Promise(f"{operation} transaction {self.id}")

        def settle() -> None:
            error = answer.exception(0)
            if error is None:
                is_told = answer.result(0)
                self._note(wanted)
                if not is_told:
                    promise.reject(
                        DeadlineError(
                            f"transaction {self.id} is {wanted.name.lower()}, and not confirmed by all participants "
                            f"within {limit or 0:g} s"
                        )
                    )
                else:
                    promise.resolve(None)
                return
            if isinstance(error, CannotCommitError):
                self._note(TransactionState.ABORTED)
            elif isinstance(error, CannotAbortError):
                self._note(TransactionState.COMMITTED)
            elif isinstance(error, UnknownTransactionError):
                workers().submit(lambda: self._manager.servers.end(self.id))
            promise.reject(error)

        answer.listen(settle)
        return promise

    def when_ended(self, callback: Callable[[TransactionState], object]) -> None:
        """Call ``callback`` on a worker thread when the outcome is known here: by :meth:`commit` or :meth:`abort`.

        A participant of this process learns the outcome by its own methods, whichever process ends the transaction.
        """
        self._callbacks.add(callback)

    def _note(self, state: TransactionState) -> None:
        """Note the outcome. On the loop of the engine."""
        self.state = state
        self._callbacks.run(state)
        workers().submit(lambda: self._manager.servers.end(self.id))

    @tolerant
    def __repr__(self) -> str:
        return f"<RemoteTransaction {self.id} at {self._manager.channel!r}: {self.state.name}>"
