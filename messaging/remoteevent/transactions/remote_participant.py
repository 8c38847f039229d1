"""Participants in other processes: servers beside the participants, and a stub for the manager.

A participant with a name is served until the way to its manager is closed: it may take part in further transactions.
One without a name takes part in one transaction. Its server is closed when the participant knows the outcome, and the
manager says that it does not tell it again: a manager whose process was killed before the end of the transaction was on
its disk tells the participants once more, until each has answered.

**Threads.** A participant is called on worker threads of its process. Any thread may use the servers.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from messaging.dispatch.calls import NOTHING, CallServer, Interface, Operation, RemoteObject, WireForm
from messaging.environment.signals import on_failure
from messaging.errors import ClosedError, MessagingError, UnknownTransactionError
from messaging.execution import Promise, refuse_in_loop, workers
from messaging.remoteevent.transactions.participant import Vote, unnamed
from messaging.remoteevent.transactions.two_phases import after

if TYPE_CHECKING:
    from messaging.instance import Messaging

S = TypeVar("S", bound="ParticipantServer")
#: time between the questions whether the manager tells a participant again that knows the outcome, seconds
GRACE: Final = 60.0


_ID: Final = WireForm("the id of a transaction", read=str, missing="")
#: what a manager asks a participant; the vote travels as text
PARTICIPANTS: Final = Interface(
    prepare=Operation(
        WireForm("a vote", lambda vote: (vote if isinstance(vote, Vote) else Vote.ABORTED).value, Vote), transaction=_ID
    ),
    commit=Operation(NOTHING, transaction=_ID),
    abort=Operation(NOTHING, transaction=_ID),
)


class RemoteParticipant(RemoteObject):
    """A stub of a participant in another process. Thread safe.

    The channel is that of its :class:`ParticipantServer`; see :class:`~messaging.dispatch.calls.RemoteObject`.
    """

    interface = PARTICIPANTS

    def prepare(self, transaction_id: str, /) -> Promise[Vote]:
        """Promise the vote."""
        return self.call("prepare", {"transaction": transaction_id})

    def commit(self, transaction_id: str, /) -> Promise[None]:
        """Promise that the transaction is committed."""
        return self.call("commit", {"transaction": transaction_id})

    def abort(self, transaction_id: str, /) -> Promise[None]:
        """Promise that the transaction is undone."""
        return self.call("abort", {"transaction": transaction_id})


class ParticipantServer(CallServer):
    """Makes a participant of this process available to managers of others. Thread safe; a context manager.

    Args:
        messaging: an instance with requests.
        channel: of the participant: its reference. A persistent participant uses the same one in each run.
        participant: see :class:`~messaging.remoteevent.transactions.TransactionParticipant`.

    Raises:
        InvalidChannelError, UnsupportedFeatureError, SubscriptionRefusedError: as ``CallServer``.
    """

    def __init__(self, messaging: Messaging, channel: str, participant: Any) -> None:
        self.participant = participant
        served = {each: partial(self._ask, each) for each in ("prepare", "commit", "abort")}
        super().__init__(messaging, channel, PARTICIPANTS.served(**served))

    def _ask(self, operation: str, transaction_id: str) -> Any:
        return getattr(self.participant, operation)(transaction_id)


class _UnnamedServer(ParticipantServer):
    """Serves a participant without a name, and notes when it knows the outcome of its transaction.

    Args:
        messaging, channel, participant: see ``ParticipantServer``.
        note: called once when the participant knows the outcome.
    """

    def __init__(self, messaging: Messaging, channel: str, participant: Any, note: Callable[[], object]) -> None:
        self._note = note
        self.is_told = False
        super().__init__(messaging, channel, participant)

    def _ask(self, operation: str, transaction_id: str) -> Any:
        try:
            found = super()._ask(operation, transaction_id)
        except UnknownTransactionError:
            self._answered(operation, None)
            raise
        if isinstance(found, Promise):
            found.listen(lambda: self._settled(operation, *found.peek()))
        else:
            self._answered(operation, found)
        return found

    def _settled(self, operation: str, answer: Any, error: MessagingError | None) -> None:
        if error is None or isinstance(error, UnknownTransactionError):
            self._answered(operation, answer)

    def _answered(self, operation: str, answer: Any) -> None:
        if self.is_told or (operation == "prepare" and answer is Vote.PREPARED):
            return
        self.is_told = True
        self._note()


class ParticipantServers:
    """The servers of the participants of this process. Thread safe.

    Args:
        messaging: an instance with requests.
        unfinished: asks the manager for the transactions of a participant that are not completed; gets its name and
            channel.
    """

    def __init__(self, messaging: Messaging, unfinished: Callable[[str, str], Promise[list[str]]]) -> None:
        self._messaging = messaging
        self._unfinished = unfinished
        self._lock = threading.Lock()  # guards the following
        self._named: dict[str, ParticipantServer] = {}
        #: of participants without a name, by id of the transaction and channel
        self._unnamed: dict[tuple[str, str], _UnnamedServer] = {}

    def __len__(self) -> int:
        """Return the number of servers."""
        return len(self._named) + len(self._unnamed)

    def named(self, name: str, participant: Any) -> str:
        """Return the channel of a participant with a name. Raises as ``ParticipantServer``, and ``WouldBlockError``."""
        if isinstance(participant, RemoteParticipant):
            return participant.channel
        with self._lock:
            server = self._named.get(name)
        if server is not None and server.participant is participant:
            return server.channel
        made = _ready(lambda channel: ParticipantServer(self._messaging, channel, participant))
        with self._lock:
            before = self._named.get(name)
            self._named[name] = made
        if before is not None:
            before.close()
        return made.channel

    def unnamed(self, transaction_id: str, participant: Any) -> str:
        """Return the channel of a participant of one transaction. Raises as :meth:`named`."""
        if isinstance(participant, RemoteParticipant):
            return participant.channel
        with self._lock:
            for (of, channel), each in self._unnamed.items():
                if of == transaction_id and each.participant is participant:
                    return channel

        def serve(channel: str) -> _UnnamedServer:
            note = partial(self._release, (transaction_id, channel))
            return _UnnamedServer(self._messaging, channel, participant, note)

        made = _ready(serve)
        with self._lock:
            self._unnamed[transaction_id, made.channel] = made
        return made.channel

    def end(self, transaction_id: str) -> None:
        """Close the servers of the participants of a transaction that has ended, if the manager tells them no more."""
        with self._lock:
            keys = [key for key, each in self._unnamed.items() if key[0] == transaction_id and each.is_told]
        for key in keys:
            self._close_if_unneeded(key)  # :meth:`_release` asks again

    def _release(self, key: tuple[str, str]) -> None:
        """Ask the manager from time to time, until a server can be closed: its participant was told the outcome."""
        after(GRACE, lambda: workers().submit(lambda: self._close_if_unneeded(key, lambda: self._release(key))))

    def _close_if_unneeded(self, key: tuple[str, str], otherwise: Callable[[], object] = lambda: None) -> None:
        """Close a server if the manager does not tell its participant again. On a worker thread."""
        transaction_id, channel = key
        with self._lock:
            found = self._unnamed.get(key)
        if found is None:
            return
        try:
            answer = self._unfinished(unnamed(type(found.participant).__name__, channel), channel)
        except ClosedError:  # the instance is closed
            self.abandon(transaction_id, channel)
            return
        except MessagingError:
            otherwise()
            return
        answer.was_retrieved = True

        def settle() -> None:
            if answer.exception(0) is None and transaction_id not in answer.result(0):
                workers().submit(lambda: self.abandon(transaction_id, channel))
            else:
                otherwise()

        answer.listen(settle)

    def abandon(self, transaction_id: str, channel: str) -> None:
        """Close the server of a participant without a name that has not joined, or is not called again."""
        with self._lock:
            found = self._unnamed.pop((transaction_id, channel), None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Close all servers. Idempotent."""
        with self._lock:
            servers = [*self._named.values(), *self._unnamed.values()]
            self._named, self._unnamed = {}, {}
        for each in servers:
            each.close()


def _ready(make: Callable[[str], S]) -> S:
    """Return a server on a new channel, when it is reachable."""
    refuse_in_loop("the server of a participant", "serve it by a ParticipantServer, and give its channel")
    made = make(f"participants/{secrets.token_hex(8)}")
    with on_failure(made.close):
        made.ready.result()
    return made
