"""Participants in other processes: a server beside the participant, and a stub for the manager.

The operations ``prepare``, ``commit`` and ``abort`` (:mod:`messaging.calls`) have the argument ``transaction``. The
result of ``prepare`` is the vote as text.

**Threads.** A participant is called on worker threads of its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from messaging.calls import CallServer, Operation, call
from messaging.execution import Promise
from messaging.model import check_name
from messaging.remoteevent.transactions.participant import Vote

if TYPE_CHECKING:
    from messaging.instance import Messaging


class RemoteParticipant:
    """A stub of a participant in another process. Thread safe.

    Args:
        messaging: an instance that is connected to the broker of the participant, with requests.
        channel: of its :class:`ParticipantServer`.
        timeout: seconds until a call fails; ``None``: the setting ``timeout`` of the instance.

    Raises:
        InvalidChannelError: the channel is malformed.
    """

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        self._messaging = messaging
        self.channel = check_name(channel)
        self._timeout = timeout

    def prepare(self, transaction_id: str, /) -> Promise[Vote]:
        """Promise the vote."""
        return self._call("prepare", transaction_id, Vote)

    def commit(self, transaction_id: str, /) -> Promise[None]:
        """Promise that the transaction is committed."""
        return self._call("commit", transaction_id, _nothing)

    def abort(self, transaction_id: str, /) -> Promise[None]:
        """Promise that the transaction is undone."""
        return self._call("abort", transaction_id, _nothing)

    def _call(self, operation: str, transaction_id: str, convert: Any) -> Promise[Any]:
        arguments = {"transaction": transaction_id}
        return call(self._messaging, self.channel, operation, arguments, timeout=self._timeout, convert=convert)


def _nothing(_result: Any) -> None:
    """Return nothing, whatever the participant returned."""


class ParticipantServer:
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
        self.channel = check_name(channel)
        operations: dict[str, Operation] = {
            "prepare": self._prepare,
            "commit": lambda arguments, _body: participant.commit(_id(arguments)),
            "abort": lambda arguments, _body: participant.abort(_id(arguments)),
        }
        self._server = CallServer(messaging, channel, operations)

    def _prepare(self, arguments: Mapping[str, Any], _body: bytes) -> Any:
        vote = self.participant.prepare(_id(arguments))
        if not isinstance(vote, Promise):
            return _text(vote)
        promise: Promise[str] = Promise("prepare a transaction")

        def settle() -> None:
            error = vote.exception(0)
            if error is not None:
                promise.reject(error)
            else:
                promise.resolve(_text(vote.result(0)))

        vote.listen(settle)
        return promise

    @property
    def ready(self) -> Promise[None]:
        """The promise that the broker has confirmed the subscription."""
        return self._server.ready

    def close(self) -> None:
        """Answer no further calls. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _id(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("transaction", ""))


def _text(vote: Any) -> str:
    return vote.value if isinstance(vote, Vote) else Vote.ABORTED.value
