"""Calls between processes: the operations of one object, behind one request channel of a messaging instance.

Leases, generators, agents, mailboxes and transactions of remote events are called with it. The caller needs the channel
only. An :class:`Interface` declares the operations of an object once: its servers are :class:`CallServer` objects, and
its stubs are :class:`RemoteObject` classes.

**Messages.** A request has one line of JSON, and after it the body, which may be empty::

    {"operation":"renew","leases":[["6f1c",30.0]]}\\n
    body, as the operation defines it

The reply is JSON: ``{"result": …}``, in portable form (:mod:`messaging.dispatch.eventdata`), or ``{"error": [class,
text]}`` for an error that keeps its class on the way, and for a failure of the disk, which its caller gets as
``ReplyError``. Any other exception makes it an error reply of the instance.

**Threads.** Operations run on worker threads, several at a time. An operation that has to wait returns a promise: it
occupies none of these threads, and no credit of the subscription, so waiting calls delay no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from messaging import errors
from messaging.dispatch.eventdata import from_portable, read_json, to_portable, write_json
from messaging.errors import ArgumentError, BoundReachedError, ClosedError, DecodeError, MessagingError, ReplyError
from messaging.errors.text import SafeLog, brief
from messaging.execution import Closeable, Promise, converted, seconds
from messaging.model import Features, Message, check_name
from messaging.replyto import DeferredReply

if TYPE_CHECKING:
    from messaging.instance import Messaging

logger = SafeLog(__name__)

#: operations of one object that run at a time, and calls whose results are pending at a time
CONCURRENCY: Final = 64
MAX_PENDING: Final = 10_000
#: errors that keep their class on the way to the caller; others become ``ReplyError``
_KEPT: Final[Mapping[str, type[MessagingError]]] = {
    each.__name__: each
    for each in (
        errors.ArgumentError,
        errors.CannotAbortError,
        errors.CannotCommitError,
        errors.CannotJoinError,
        errors.BoundReachedError,
        errors.ClosedError,
        errors.DeadlineError,
        errors.DecodeError,
        errors.InvalidEventError,
        errors.InvalidIteratorError,
        errors.LeaseDeniedError,
        errors.ListenerGoneError,
        errors.OutcomeUnknownError,
        errors.PermissionDeniedError,
        errors.UnknownEventError,
        errors.UnknownLeaseError,
        errors.UnknownTransactionError,
    )
}

#: features with which the broker tells that a call reached no server
_TOLD: Final = frozenset({Features.EXTENSION_MANDATORY, Features.EXTENSION_GUARANTEED_DELIVERY})
#: longest time that brokers keep a call for a server that is away, seconds: AMQP takes no longer one
_MAX_TIME_TO_LIVE: Final = 4_294_967.0

#: an operation as a server executes it: it gets the arguments and the body, and returns the result or a promise of it
Function: TypeAlias = Callable[[Mapping[str, Any], bytes], Any]


def _as_it_is(value: Any) -> Any:
    return value


class WireForm(NamedTuple):
    """The form in which the values of an argument or a result travel.

    Attributes:
        what: the values, for errors.
        write: returns the portable form of a value.
        read: returns the value of a portable form. Any exception but a ``MessagingError`` becomes a ``DecodeError``.
        missing: portable form of an argument that the caller has left out.
    """

    what: str = "a value"
    write: Callable[[Any], Any] = _as_it_is
    read: Callable[[Any], Any] = _as_it_is
    missing: Any = None

    def argument(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the value of an argument of a call. Raises ``DecodeError``."""
        value = arguments.get(name, self.missing)
        try:
            return self.read(value)
        except errors.InvalidChannelError as error:  # its class is not kept on the way
            raise ArgumentError(f"`{name}` cannot be reached: {error}") from None
        except MessagingError:
            raise
        except Exception:  # noqa: BLE001  # of a value from another process
            raise DecodeError(f"`{name}` must be {self.what}, not {brief(value)}") from None


#: values that are portable themselves
PLAIN: Final = WireForm()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


TEXT: Final = WireForm("a text", read=_text)
#: results that tell no more than the success
NOTHING: Final = WireForm("null", read=lambda _value: None)


def list_of(wire: WireForm) -> WireForm:
    """Return the form of lists."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError
        return [wire.read(each) for each in value]

    return WireForm(f"a list, each of it {wire.what}", lambda values: [wire.write(each) for each in values], read)


def outcome_of(wire: WireForm) -> WireForm:
    """Return the form of values that may be errors instead: ``[class, text]``."""

    def write(value: Any) -> Any:
        return described(value) if isinstance(value, MessagingError) else wire.write(value)

    def read(value: Any) -> Any:
        return error_of(value) if isinstance(value, list) else wire.read(value)

    return WireForm(f"{wire.what}, or an error", write, read)


class Operation:
    """An operation of an object, as its stubs and its servers see it.

    Args:
        result: form of the result.
        has_body: whether bytes follow the arguments, which are the last parameter of the function.
        **arguments: forms of the arguments, in the order of the parameters of the function.
    """

    def __init__(self, result: WireForm = PLAIN, *, has_body: bool = False, **arguments: WireForm) -> None:
        self.result = result
        self.arguments = arguments
        self._has_body = has_body

    def execute(self, function: Callable[..., Any], arguments: Mapping[str, Any], body: bytes) -> Any:
        """Call ``function`` with what has arrived; return the portable form of its result, or a promise of that."""
        values = [wire.argument(name, arguments) for name, wire in self.arguments.items()]
        found = function(*values, body) if self._has_body else function(*values)
        if not isinstance(found, Promise):
            return self.result.write(found)
        if self.result is PLAIN:
            return found
        made = converted(found, self.result.write, "the result of a call")
        made.was_retrieved = True  # by the caller
        return made


class Interface(dict[str, Operation]):
    """The operations of an object by name."""

    def served(self, **functions: Callable[..., Any]) -> dict[str, Function]:
        """Return operations for a :class:`CallServer`; the functions get the arguments, and may return promises."""
        return {name: partial(self[name].execute, each) for name, each in functions.items()}


class RemoteObject:
    """The way to an object in another process. Thread safe. Subclasses have the operations of its interface as methods.

    Args:
        messaging: an instance that is connected to the broker of the object, with requests.
        channel: of its server.
        timeout: seconds until a call fails; ``None``: the setting ``timeout`` of the instance.

    Raises:
        ArgumentError, InvalidChannelError: an argument is not as described.
    """

    interface: ClassVar[Interface]

    def __init__(self, messaging: Messaging, channel: str, *, timeout: float | None = None) -> None:
        self.messaging = checked_instance(messaging)
        self.channel = check_name(channel)
        self.timeout = None if timeout is None else seconds(timeout)

    def call(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes = b"",
        *,
        timeout: float | None = None,
        convert: Callable[[Any], Any] = _as_it_is,
    ) -> Promise[Any]:
        """Call an operation; see :func:`call`.

        Args:
            operation: its name.
            arguments: their values by name.
            body: follows the arguments as it is.
            timeout: seconds for all of it; ``None``: that of this object.
            convert: makes the result of the declared one.
        """
        declared = self.interface[operation]
        written = {name: declared.arguments[name].write(value) for name, value in arguments.items()}
        limit = self.timeout if timeout is None else timeout

        def read(result: Any) -> Any:
            return convert(declared.result.read(result))

        return call(self.messaging, self.channel, operation, written, body, timeout=limit, convert=read)


class CallServer(Closeable):
    """Answers the calls to one object. Thread safe; a context manager, which closes it.

    Args:
        messaging: the instance that the requests arrive at.
        channel: of the requests. Two servers of one channel would share its requests.
        operations: the operations by name. They run on worker threads, up to 64 at a time. While 10,000 of the promises
            that they have returned are pending, further calls fail with ``BoundReachedError``.

    Attributes:
        ready: resolves when the broker has confirmed the subscription. Calls that are made before may fail.

    Raises:
        ArgumentError, InvalidChannelError: the channel cannot be one of requests.
        UnsupportedFeatureError: the instance does not announce ``replyTo``.
        SubscriptionRefusedError: the broker refused the subscription.
    """

    def __init__(self, messaging: Messaging, channel: str, operations: Mapping[str, Function]) -> None:
        self.messaging = checked_instance(messaging)
        self.channel = check_name(channel)
        self._operations = dict(operations)
        #: changed by any thread
        self._pending: set[Promise[Any]] = set()
        self._registration = messaging.reply(channel, self._answer, concurrency=CONCURRENCY)
        self.ready: Promise[None] = self._registration.ready

    def close(self) -> None:
        """Answer no further calls. Idempotent."""
        with contextlib.suppress(ClosedError):
            self._registration.unregister()

    def _answer(self, request: Message) -> Any:
        try:
            found = self._execute(request.payload)
        except MessagingError as error:
            return write_error(error)
        if not isinstance(found, Promise):
            return write_result(found)
        if found.done():
            return write_outcome(found)
        self._pending.add(found)
        found.listen(lambda: self._pending.discard(found))
        return DeferredReply(found, write_outcome)

    def _execute(self, payload: bytes) -> Any:
        """Return the result of the call in the payload of a request, or a promise of it. Raises ``MessagingError``."""
        line, _, body = payload.partition(b"\n")
        arguments = from_portable(read_json(line))
        if not isinstance(arguments, dict) or not isinstance(arguments.get("operation"), str):
            raise DecodeError("not a call: its first line must be a JSON object with an 'operation'")
        name = arguments["operation"]
        operation = self._operations.get(name)
        if operation is None:
            known = ", ".join(self._operations)
            raise ArgumentError(f"{self.channel!r}: no operation {name!r:.80}; there are {known}")
        if len(self._pending) >= MAX_PENDING:
            raise BoundReachedError(f"{self.channel!r}: {MAX_PENDING} calls are pending already")
        return operation(arguments, body)


def checked_instance(value: Any) -> Messaging:
    """Return ``value`` if it is a messaging instance; raise ``ArgumentError``."""
    if not callable(getattr(value, "request", None)) or not callable(getattr(value, "reply", None)):
        raise ArgumentError(f"a messaging instance is needed, not {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def checked_limit(timeout: float) -> float:
    """Return the seconds until a call fails; raise ``ArgumentError`` unless they are above 0."""
    found = seconds(timeout)
    if found <= 0:
        raise ArgumentError(f"timeout must be above 0 seconds, not {timeout!r:.80}")
    return found


def call(
    messaging: Messaging,
    channel: str,
    operation: str,
    arguments: Mapping[str, Any] | None = None,
    body: bytes = b"",
    *,
    timeout: float | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> Promise[Any]:
    """Call an operation of an object that a :class:`CallServer` serves.

    Args:
        messaging: sends the request.
        channel: of the object.
        operation: name of the operation.
        arguments: values with a portable form.
        body: follows the arguments as it is.
        timeout: seconds for all of it; ``None``: the setting ``timeout`` of the instance.
        convert: makes the result of the reply; runs on the event loop of the engine, so it must be quick.

    Returns:
        The promise of the result. It fails with the error of the operation (``ReplyError`` for a class that is not
        known here), or as :meth:`Messaging.request <messaging.Messaging.request>` does: with ``UnroutableError`` at
        once where no server has subscribed, unless the protocol is MQTT 3.1.1.

    Raises:
        InvalidEventError: an argument has no portable form.
        MessagingError: as ``Messaging.request``; nothing was sent.
    """
    if not isinstance(operation, str) or not operation.isprintable():
        raise ArgumentError(f"operation must be a printable text, not {type(operation).__name__}")
    payload = write_json(to_portable({"operation": operation, **(arguments or {})})) + b"\n" + body
    request = messaging.request(channel, payload, timeout=timeout, **_guarantees(messaging, timeout))

    def read(reply: Message) -> Any:
        result = read_result(reply.payload)
        try:
            return result if convert is None else convert(result)
        except MessagingError:
            raise
        except Exception as error:  # noqa: BLE001  # for a reply that is not as it must be
            raise DecodeError(f"{operation} at {channel!r}: malformed reply ({type(error).__name__})") from None

    return converted(request, read, lambda: f"{operation} at {channel!r}")


def _guarantees(messaging: Messaging, timeout: float | None) -> dict[str, Any]:
    """Return extensions with which the broker tells that a call reached no server, and keeps none beyond its time."""
    features = messaging.features
    found: dict[str, Any] = {}
    if features >= _TOLD:  # the second one is missing with a broker that takes no QoS 1
        found["qos"] = 1
    if Features.EXTENSION_TIME_TO_LIVE in features:
        found["time_to_live"] = min(messaging.timeout if timeout is None else seconds(timeout), _MAX_TIME_TO_LIVE)
    return found


def described(error: MessagingError) -> list[str]:
    """Return an error as it travels within a result."""
    return [error.kind, error.reason] if isinstance(error, ReplyError) else [type(error).__name__, str(error)]


def error_of(value: Any) -> MessagingError:
    """Return an error that has travelled within a result: ``ReplyError`` if it is not one that keeps its class.

    Raises ``DecodeError``.
    """
    match value:
        case [str(kind), str(reason)]:
            known = _KEPT.get(kind)
            return ReplyError(kind, reason) if known is None else known(reason)
    raise DecodeError(f"not an error: {brief(value)}")


def write_result(result: Any) -> bytes:
    """Return the payload of a reply. Raises ``InvalidEventError`` for a result without a portable form."""
    return write_json({"result": to_portable(result)})


def write_outcome(promise: Promise[Any]) -> bytes:
    """Return the payload of a reply, for a promise with an outcome. Raises as :func:`write_error`."""
    error = promise.exception(0)
    return write_result(promise.result(0)) if error is None else write_error(error)


def write_error(error: MessagingError) -> bytes:
    """Return the payload of a reply that reports ``error``; raise ``error`` if its class is not kept on the way.

    A failure of the disk is no defect of the program: it is logged in a line. Its caller gets ``ReplyError``.
    """
    if isinstance(error, errors.JournalError):
        logger.warning("a call has failed: %s; its caller is told", error)
    elif type(error).__name__ not in _KEPT:
        raise error
    return write_json({"error": described(error)})


def read_result(payload: bytes) -> Any:
    """Return the result in the payload of a reply.

    Raises:
        MessagingError: the error in it.
        DecodeError: it is no reply of a call.
    """
    value = read_json(payload)
    if isinstance(value, dict):
        if "result" in value:
            return from_portable(value["result"])
        if "error" in value:
            raise error_of(value["error"])
    raise DecodeError("not the reply of a call: it must be a JSON object with a 'result' or an 'error'")
