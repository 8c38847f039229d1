"""``messaging events publish``: the data of an event, and the members that were notified of it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.cli.events_network import MemberObserver, grammar_of, joined, settings_of
from messaging.cli.options import Grammar, NetworkOptions
from messaging.cli.output import ExitCode, report
from messaging.dispatch.eventdata import WireEvent, from_portable, read_json
from messaging.dispatch.eventnetwork import DISPATCH, DeliveryNotification, framework_uuid
from messaging.distributedeventing.qos import STANDARD, QosReader, supported_by
from messaging.errors import ArgumentError, DecodeError, NullEventError, PartialNotificationError, PayloadTooLargeError
from messaging.errors.text import did_you_mean

if TYPE_CHECKING:
    from messaging.cli.connecting import BrokerOptions
    from messaging.dispatch.eventnetwork.other_members import OtherMember

logger = logging.getLogger(__name__)

#: bytes of a payload that is read: members refuse larger events by default
MAX_BYTES: Final = 16 << 20
#: deadline of a notification, seconds
NOTIFYING: Final = 30.0
#: with these, JSON begins that is no number and no name
_JSON: Final = ("{", "[", '"')


class CountedNotification(DeliveryNotification):
    """A notification that knows the members it waited for. Thread safe."""

    __slots__ = ("members",)

    def __init__(self, what: str, timeout: float) -> None:
        super().__init__(what, timeout)
        #: the members that were waited for, by id
        self.members: dict[str, str] = {}

    def expect(self, members: Iterable[OtherMember]) -> None:
        """See ``DeliveryNotification``."""
        found = [*members]
        self.members |= {each.id: str(each) for each in found}
        super().expect(found)


def read_payload(text: str | None, file: Path | None) -> bytes:
    """Return the payload that the command line names: a text, ``-`` for stdin, or a file.

    Raises:
        ArgumentError: none is given, or two; it cannot be read.
        PayloadTooLargeError: it has more than ``MAX_BYTES``.
    """
    if (text is None) == (file is None):
        raise ArgumentError("say what to publish with exactly one of PAYLOAD, - (stdin) and --file")
    if file is not None:
        try:
            with file.open("rb") as source:
                found = source.read(MAX_BYTES + 1)
        except OSError as error:
            raise ArgumentError(f"cannot read {str(file)!r}: {error.strerror}") from error
    elif text == "-":
        if sys.stdin is None:
            raise ArgumentError("stdin is closed")
        found = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        found = str(text).encode(errors="surrogateescape")
    if len(found) > MAX_BYTES:
        raise PayloadTooLargeError(len(found), MAX_BYTES, "an event; there may be more")
    return found


def data_of(payload: bytes, grammar: Grammar, *, is_text: bool) -> Any:
    """Return the data of an event in portable form.

    Args:
        payload: JSON, or another text.
        grammar: the events of Typed Event are maps.
        is_text: whether it is text even if it is JSON.

    Raises:
        ArgumentError: the payload is not as described.
        NullEventError: it is ``null``.
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise ArgumentError('the payload is not UTF-8; events carry bytes as JSON: {"$bytes": "<base64>"}') from None
    data = text if is_text else _parsed(text)
    if data is None:
        raise NullEventError("the payload is null")
    if grammar is Grammar.TYPED and not isinstance(from_portable(data), dict):
        raise ArgumentError('the events of --grammar typed are JSON objects, such as {"id": 7}')
    return data


def _parsed(text: str) -> Any:
    try:
        found = read_json(text)
    except DecodeError:
        if text.lstrip().startswith(_JSON):
            raise ArgumentError("the payload begins like JSON and is none; --text publishes it as text") from None
        return text
    try:
        from_portable(found)
    except DecodeError as error:
        raise ArgumentError(f"the payload: {error}; --text publishes it as text") from None
    return found


def check_qos(names: Iterable[str]) -> list[str]:
    """Return the names of qualities of service as RFC 214 writes them.

    Raises:
        ArgumentError: a name is unknown.
    """
    found = [each.upper() for each in names]
    for each in found:
        if each not in STANDARD:
            hint = did_you_mean(each, STANDARD) or f"there are {', '.join(STANDARD)}"
            raise ArgumentError(f"--qos: unknown quality of service {each!r:.80}; {hint}")
    return found


def publish_event(
    broker: BrokerOptions,
    network: NetworkOptions,
    event: WireEvent,
    qos: Iterable[str],
    notify: float | None,
) -> ExitCode:
    """Publish an event, and wait for the broker's confirmation.

    Args:
        broker: the options of the broker.
        network: the options of the network.
        event: the event, without its time and origin.
        qos: names of qualities of service.
        notify: how long to wait until every consumer is notified, seconds; ``None``: not at all.

    Raises:
        InvalidTopicError: the topic breaks the grammar.
        UnsupportedFeatureError: the instance does not keep a quality of service.
        MessagingError: the event cannot be published.
    """
    grammar_of(network).check_topic(event.topic)
    settings_of(network)  # a wrong one is an error before anything is connected
    with broker.connect("events-publish") as m:
        wanted = QosReader(m.name, supported_by(m)).read(qos)
        with joined(m, network, MemberObserver()) as node:
            event.time = time.time_ns() // 1_000
            event.origin = str(framework_uuid())
            notification = None
            if notify is not None:
                notification = CountedNotification(f"publishing to {event.topic!r} with notification", notify)
            sent = node.sender.send(
                event,
                lambda: from_portable(event.data),
                qos=wanted.message_qos,
                is_stored=wanted.is_persistent,
                notification=notification,
            )
            if sent is not None:
                sent.result()
            if notification is None:
                return ExitCode.OK
            notification.release(DISPATCH)
            return _outcome(event.topic, notification)


def _outcome(topic: str, notification: CountedNotification) -> ExitCode:
    """Wait for a notification; report the members on stderr, and return the exit code."""
    try:
        notification.promise.result()
    except PartialNotificationError as error:
        members = len(notification.members)
        missing = ", ".join(error.missing) or "the answers of the members"
        is_late = notification.is_expired
        why = f"within {notification.timeout:g} s" if is_late else "and a process was lost"
        report(f"notified {members - len(error.missing)} of {members} members {why}; missing: {missing}")
        return ExitCode.TIMED_OUT if is_late else ExitCode.FAILED
    names = sorted(notification.members.values())
    if names:
        logger.info("notified %d member%s: %s", len(names), "s" * (len(names) > 1), ", ".join(names))
    else:
        logger.warning("notified no member: no consumer of %r is known", topic)
    return ExitCode.OK
