"""One request: the promise of its reply, and its message on the way out (RFC 5.7.2)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from messaging.errors import MessagingError, RequestCancelledError
from messaging.execution import Promise
from messaging.model import V
from messaging.publishing import Publication

if TYPE_CHECKING:
    from messaging.connection import Connection


class Requester(Protocol):
    """The side that waits for the reply, or the replies, to a request."""

    def unsent(self, error: MessagingError) -> None:
        """Fail: the message of the request failed. On the loop."""


class PendingRequests(Protocol):
    """The collection that a request belongs to until it is settled."""

    connection: Connection

    def fail(self, request: Request[Any], error: MessagingError) -> None:
        """Fail ``request``, unless it is settled. On the loop."""


class RequestInbox(Protocol):
    """The subscription that receives the reply of a request, and of others.

    Attributes:
        reply_to: its reply channel.
        pending: correlation id -> the request that waits.
        early: requests to be published when it is subscribed to.
    """

    reply_to: str
    pending: dict[str, Request[Any]]
    early: dict[Request[Any], None]


class RequestPublication(Publication):
    """The message of a request: its requester is told if it fails."""

    __slots__ = ("requester",)

    requester: Requester

    def reject(self, error: MessagingError, cause: BaseException | None = None) -> bool:
        """See ``Promise``."""
        self._looked_at = True
        first = super().reject(error, cause)
        self.requester.unsent(error)
        return first


class Request(Promise[V]):
    """A request that was published: the promise of its reply.

    :meth:`cancel` cancels it; so does cancelling the task that awaits it.
    """

    __slots__ = ("correlation_id", "deadline", "inbox", "model", "publication", "requests")

    def __init__(self, requests: PendingRequests, correlation_id: str, deadline: float, model: Any) -> None:
        super().__init__()
        self.requests = requests
        self.correlation_id = correlation_id
        #: monotonic seconds
        self.deadline = deadline
        self.model = model
        #: the subscription that receives its reply; set before the request is published
        self.inbox: RequestInbox | None = None
        self.publication: RequestPublication

    @property
    def what(self) -> str:
        """See ``Promise``."""
        return f"request to {self.publication.context.channel!r}"

    def result(self, timeout: float | None = None) -> V:
        """Wait as ``Promise.result``, and return the reply, or its value if the request was made with a model.

        Raises:
            DecodeError: the reply does not fit the model.
        """
        message: Any = super().result(timeout)
        found: V = message if self.model is None else message.value(self.model)
        return found

    def cancel(self) -> None:
        """Fail the request with ``RequestCancelledError``, unless it is settled."""
        self._looked_at = True
        self.requests.connection.engine.call(
            self.requests.fail, self, RequestCancelledError(f"{self.what} was cancelled")
        )

    def __await__(self) -> Generator[Any, None, V]:
        try:
            return (yield from super().__await__())
        except BaseException:
            if not self.done():
                self.cancel()
            raise

    def unsent(self, error: MessagingError) -> None:
        """See ``Requester``."""
        self.requests.fail(self, error)
