"""Participants of this process that managers of other processes reach: a server for each.

A participant with a name is served until the way to its manager is closed: it may take part in further transactions.
One without a name takes part in one transaction. Its server is closed when the participant knows the outcome, and the
manager says that it does not tell it again: a manager whose process was killed before the end of the transaction was on
its disk tells the participants once more, until each has answered.

**Threads.** Any thread may use the object. Its lock guards the servers.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ClosedError, MessagingError, UnknownTransactionError
from messaging.execution import Promise, refuse_in_loop, workers
from messaging.remoteevent.transactions.enlisted import unnamed
from messaging.remoteevent.transactions.participant import Vote
from messaging.remoteevent.transactions.remote_participant import ParticipantServer, RemoteParticipant
from messaging.remoteevent.transactions.two_phases import after

if TYPE_CHECKING:
    from messaging.instance import Messaging

#: time between the questions whether the manager tells a participant again that knows the outcome, seconds
GRACE: Final = 60.0


class Reach:
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
        self._unnamed: dict[tuple[str, str], _Unnamed] = {}

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
        made = self._serve(participant)
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
                if of == transaction_id and each.told.participant is participant:
                    return channel
        told = _Told(participant, lambda: self._note_told(transaction_id, made.channel))
        made = self._serve(told)
        with self._lock:
            self._unnamed[transaction_id, made.channel] = _Unnamed(made, told)
        return made.channel

    def _serve(self, participant: Any) -> ParticipantServer:
        refuse_in_loop("the server of a participant", "serve it by a ParticipantServer, and give its channel")
        made = ParticipantServer(self._messaging, f"participants/{secrets.token_hex(8)}", participant)
        try:
            made.ready.result()
        except BaseException:
            made.close()
            raise
        return made

    def abandon(self, transaction_id: str, channel: str) -> None:
        """Close the server of a participant that has not joined."""
        self._close((transaction_id, channel))

    def end(self, transaction_id: str) -> None:
        """Close the servers of the participants of a transaction that has ended, if the manager tells them no more."""
        with self._lock:
            keys = [key for key, each in self._unnamed.items() if key[0] == transaction_id and each.told.is_told]
        for key in keys:
            self._ask(key, lambda: None)  # :meth:`_release` goes on

    def _note_told(self, transaction_id: str, channel: str) -> None:
        """Close a server some time after its participant was told the outcome. On a worker thread, or on the loop."""
        self._release((transaction_id, channel))

    def _release(self, key: tuple[str, str]) -> None:
        """Ask the manager from time to time, until the server can be closed."""
        after(GRACE, lambda: workers().submit(lambda: self._ask(key, lambda: self._release(key))))

    def _ask(self, key: tuple[str, str], otherwise: Callable[[], object]) -> None:
        """Close a server if the manager does not tell its participant again. On a worker thread."""
        transaction_id, channel = key
        with self._lock:
            found = self._unnamed.get(key)
        if found is None:
            return
        try:
            answer = self._unfinished(unnamed(type(found.told.participant).__name__, channel), channel)
        except ClosedError:  # the instance is closed
            self._close(key)
            return
        except MessagingError:
            otherwise()
            return
        answer.looked_at = True

        def settle() -> None:
            if answer.exception(0) is None and transaction_id not in answer.result(0):
                workers().submit(lambda: self._close(key))
            else:
                otherwise()

        answer.listen(settle)

    def _close(self, key: tuple[str, str]) -> None:
        with self._lock:
            found = self._unnamed.pop(key, None)
        if found is not None:
            found.server.close()

    def close(self) -> None:
        """Close all servers. Idempotent."""
        with self._lock:
            servers = [*self._named.values(), *(each.server for each in self._unnamed.values())]
            self._named, self._unnamed = {}, {}
        for each in servers:
            each.close()


class _Unnamed:
    """The server of a participant without a name."""

    __slots__ = ("server", "told")

    def __init__(self, server: ParticipantServer, told: _Told) -> None:
        self.server = server
        self.told = told


class _Told:
    """Passes calls to a participant of one transaction, and notes when it knows the outcome.

    Args:
        participant: the participant.
        note: called once when it knows the outcome.
    """

    def __init__(self, participant: Any, note: Callable[[], object]) -> None:
        self.participant = participant
        self._note = note
        self.is_told = False

    def prepare(self, transaction_id: str) -> Any:
        """See ``TransactionParticipant``."""
        return self._call("prepare", transaction_id)

    def commit(self, transaction_id: str) -> Any:
        """See ``TransactionParticipant``."""
        return self._call("commit", transaction_id)

    def abort(self, transaction_id: str) -> Any:
        """See ``TransactionParticipant``."""
        return self._call("abort", transaction_id)

    def _call(self, operation: str, transaction_id: str) -> Any:
        try:
            found = getattr(self.participant, operation)(transaction_id)
        except UnknownTransactionError:
            self._answered(operation, None)
            raise
        if isinstance(found, Promise):
            found.listen(lambda: self._settled(operation, found))
        else:
            self._answered(operation, found)
        return found

    def _settled(self, operation: str, found: Promise[Any]) -> None:
        error = found.exception(0)
        if error is None:
            self._answered(operation, found.result(0))
        elif isinstance(error, UnknownTransactionError):
            self._answered(operation, None)

    def _answered(self, operation: str, answer: Any) -> None:
        if self.is_told or (operation == "prepare" and answer is Vote.PREPARED):
            return
        self.is_told = True
        self._note()
