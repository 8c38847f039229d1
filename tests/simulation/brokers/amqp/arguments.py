"""Arguments of queues and exchanges: checked when one is declared, compared when it is declared again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.simulation.brokers.amqp import tables
from tests.simulation.brokers.amqp.errors import AmqpError, precondition_failed
from tests.simulation.brokers.amqp.messages import MAX_MILLISECONDS
from tests.simulation.brokers.amqp.tables import Field, Table

DEAD_LETTER_EXCHANGE: Final = "x-dead-letter-exchange"
DEAD_LETTER_KEY: Final = "x-dead-letter-routing-key"
QUEUE_TYPE: Final = "x-queue-type"
TYPES: Final = ("classic", "quorum")

#: the arguments that are compared, in RabbitMQ's order
_COMPARED: Final = {
    "classic": (
        "x-expires", "x-message-ttl", DEAD_LETTER_EXCHANGE, DEAD_LETTER_KEY, "x-max-length", "x-max-length-bytes",
        "x-max-priority", "x-overflow", "x-queue-mode", "x-queue-version", "x-single-active-consumer", QUEUE_TYPE,
        "x-queue-master-locator",
    ),
    "quorum": (
        DEAD_LETTER_EXCHANGE, DEAD_LETTER_KEY, "x-dead-letter-strategy", "x-expires", "x-max-length",
        "x-max-length-bytes", "x-overflow", "x-single-active-consumer", QUEUE_TYPE, "x-quorum-initial-group-size",
        "x-delivery-limit", "x-message-ttl", "x-queue-leader-locator",
    ),
}  # fmt: skip
#: arguments that a queue of this type refuses
_UNSUPPORTED: Final = {
    "classic": ("x-delivery-limit", "x-dead-letter-strategy", "x-quorum-initial-group-size", "x-max-age",
                "x-stream-max-segment-size-bytes", "x-initial-cluster-size"),
    "quorum": ("x-max-priority", "x-queue-mode", "x-queue-master-locator", "x-max-age",
               "x-stream-max-segment-size-bytes", "x-initial-cluster-size"),
}  # fmt: skip


def queue_type(arguments: Table) -> str:
    """Return the type that the arguments of a queue ask for; "classic" if it is malformed."""
    field = arguments.get(QUEUE_TYPE)
    if field is None or field.kind != "S":
        return "classic"
    kind: str = field.value.decode("utf-8", "replace")
    return kind


# --- checks: each returns what is wrong, as RabbitMQ prints it, or nothing


def _type_of(field: Field) -> str:
    return f"{{unacceptable_type,{tables.TYPE_NAMES[field.kind]}}}"


def _integer(field: Field) -> str | None:
    return None if field.kind in tables.INTEGERS else f'"expected integer, got {tables.TYPE_NAMES[field.kind]}"'


def _count(field: Field) -> str | None:
    return _integer(field) or (f"{{value_negative,{field.value}}}" if field.value < 0 else None)


def _time(field: Field) -> str | None:
    wrong = _count(field)
    if wrong is None and field.value > MAX_MILLISECONDS:
        return f"{{value_too_large,{field.value}}}"
    return wrong


def _lease(field: Field) -> str | None:
    return _integer(field) or ("{value_zero,0}" if field.value == 0 else _time(field))


def _priority(field: Field) -> str | None:
    return _count(field) or (f"{{max_value_exceeded,{field.value}}}" if field.value > 255 else None)


def _text(field: Field) -> str | None:
    return None if field.kind == "S" else _type_of(field)


def _one_of(wrong: str, *values: bytes) -> Callable[[Field], str | None]:
    def check(field: Field) -> str | None:
        return _text(field) or (None if field.value in values else wrong)

    return check


def _kind(field: Field) -> str | None:
    if field.kind != "S":
        return _type_of(field)
    kind = field.value.decode("utf-8", "replace")
    return None if kind in TYPES else f"\"unsupported queue type '{kind}'\""


_CHECKS: Final[Mapping[str, Callable[[Field], str | None]]] = {
    "x-expires": _lease,
    "x-message-ttl": _time,
    DEAD_LETTER_EXCHANGE: _text,
    DEAD_LETTER_KEY: _text,
    "x-dead-letter-strategy": _one_of("invalid_dlx_strategy", b"at-most-once", b"at-least-once"),
    "x-max-length": _count,
    "x-max-length-bytes": _count,
    "x-max-priority": _priority,
    "x-overflow": _one_of("invalid_overflow", b"drop-head", b"reject-publish", b"reject-publish-dlx"),
    "x-single-active-consumer": lambda field: None if field.kind == "t" else _type_of(field),
    QUEUE_TYPE: _kind,
}


def check_queue(what: str, arguments: Table, *, durable: bool, exclusive: bool, auto_delete: bool) -> None:
    """Refuse the declaration of a new queue; ``what`` names it in texts.

    Raises:
        AmqpError: 406.
    """
    exchange = arguments.get(DEAD_LETTER_EXCHANGE)
    if exchange is not None and exchange.kind != "S":
        name = tables.TYPE_NAMES[exchange.kind]
        raise precondition_failed(f"invalid type '{name}' for arg '{DEAD_LETTER_EXCHANGE}' in {what}")
    for name, check in _CHECKS.items():
        field = arguments.get(name)
        wrong = None if field is None else check(field)
        if wrong is None and field is not None and name == DEAD_LETTER_KEY and exchange is None:
            wrong = "routing_key_but_no_dlx_defined"
        if wrong is not None:
            raise _invalid(what, name, wrong)
    kind = queue_type(arguments)
    for name in _UNSUPPORTED[kind]:
        if name in arguments:
            raise precondition_failed(f"invalid arg '{name}' for {what} of queue type rabbit_{kind}_queue")
    if kind == "quorum":
        for is_wrong, name in (
            (auto_delete, "auto-delete"),
            (exclusive, "exclusive-owner"),
            (not durable, "non-durable"),
        ):
            if is_wrong:
                raise precondition_failed(f"invalid property '{name}' for {what}")


def _invalid(what: str, name: str, wrong: str) -> AmqpError:
    return precondition_failed(f"invalid arg '{name}' for {what}: {wrong}")


def check_consumer(what: str, arguments: Table) -> None:
    """Refuse arguments of a consumer. Raises as :func:`check_queue`."""
    field = arguments.get("x-priority")
    wrong = None if field is None else _integer(field)
    if wrong is not None:
        raise _invalid(what, "x-priority", wrong)


def check_exchange(what: str, arguments: Table) -> None:
    """Refuse arguments of a new exchange. Raises as :func:`check_queue`."""
    field = arguments.get("alternate-exchange")
    if field is not None and field.kind != "S":
        name = tables.TYPE_NAMES[field.kind]
        raise precondition_failed(f"invalid type '{name}' for arg 'alternate-exchange' in {what}")


def check_flag(what: str, name: str, current: bool, received: bool) -> None:
    """Refuse a flag that differs from that of the declaration. Raises as :func:`check_queue`."""
    check_same(what, name, _flag(current), _flag(received))


def _flag(value: bool) -> str:
    return "true" if value else "false"


def check_same(what: str, name: str, current: str, received: str) -> None:
    """Refuse a value that differs from that of the declaration. Raises as :func:`check_queue`."""
    if current != received:
        raise precondition_failed(
            f"inequivalent arg '{name}' for {what}: received '{received}' but current is '{current}'"
        )


def check_queue_arguments(what: str, kind: str, current: Table, received: Table) -> None:
    """Refuse arguments that differ from those of the declaration. Raises as :func:`check_queue`."""
    for name in _COMPARED[kind]:
        if name == QUEUE_TYPE and queue_type(current) == queue_type(received):
            continue  # classic is the default
        check_argument(what, name, current.get(name), received.get(name))


def check_argument(what: str, name: str, current: Field | None, received: Field | None) -> None:
    """Refuse an argument that differs from that of the declaration. Raises as :func:`check_queue`."""
    if _comparable(current) == _comparable(received):
        return
    if current is not None and received is not None:
        raise precondition_failed(
            f"inequivalent arg '{name}' for {what}: received '{_plain(received)}' but current is '{_plain(current)}'"
        )
    raise precondition_failed(
        f"inequivalent arg '{name}' for {what}: received {_with_type(received)} but current is {_with_type(current)}"
    )


def _comparable(field: Field | None) -> object:
    if field is None:
        return None
    return ("integer" if field.kind in tables.INTEGERS else field.kind, field.value)


def _plain(field: Field) -> str:
    if field.kind == "S":
        text: str = field.value.decode("utf-8", "replace")
        return text
    return _flag(field.value) if field.kind == "t" else str(field.value)


def _with_type(field: Field | None) -> str:
    return "none" if field is None else f"the value '{_plain(field)}' of type '{tables.TYPE_NAMES[field.kind]}'"
