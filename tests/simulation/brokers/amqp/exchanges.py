"""Exchanges and bindings: which destinations a message matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from tests.simulation.brokers.amqp import tables
from tests.simulation.brokers.amqp.errors import precondition_failed
from tests.simulation.brokers.amqp.tables import Field, Table

TYPES: Final = ("direct", "fanout", "topic", "headers")
PREDECLARED: Final = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.rabbitmq.trace": "topic",
}
_MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")


class Destination(NamedTuple):
    """The queue or exchange that a binding leads to."""

    is_queue: bool
    name: str


class Binding:
    """A binding of an exchange.

    Args:
        arguments: with their types.

    Attributes:
        identity: two bindings of one exchange with the same identity are one.
    """

    __slots__ = ("arguments", "destination", "identity", "key", "words")

    def __init__(self, destination: Destination, key: str, arguments: Table) -> None:
        self.destination = destination
        self.key = key
        self.arguments = arguments
        self.words = _words(key)
        self.identity = (destination, key, tables.write_table(tables.sort(arguments)))


class Exchange:
    """An exchange.

    Attributes:
        bindings: from this exchange, by identity.
        is_bound_ever: whether an auto-delete exchange may be deleted with its last binding.
    """

    def __init__(
        self, name: str, kind: str, *, durable: bool, auto_delete: bool, internal: bool, arguments: Table
    ) -> None:
        self.name = name
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments
        alternate = arguments.get("alternate-exchange")
        self.alternate: str | None = None if alternate is None else alternate.value.decode("utf-8", "surrogateescape")
        self.bindings: dict[object, Binding] = {}
        self._match: Callable[[tuple[str, ...], Callable[[], Table]], Iterator[Destination]] = {
            "direct": self._match_direct,
            "fanout": self._match_all,
            "topic": self._match_topic,
            "headers": self._match_headers,
        }[kind]

    def matches(self, keys: tuple[str, ...], headers: Callable[[], Table]) -> list[Destination]:
        """Return the destinations that match, each once."""
        return list(dict.fromkeys(self._match(keys, headers)))

    def check_binding(self, arguments: Table) -> None:
        """Refuse arguments that the type of this exchange does not know.

        Raises:
            AmqpError: 406.
        """
        match = arguments.get("x-match")
        if self.kind != "headers" or match is None:
            return
        if match.kind != "S":
            name = tables.TYPE_NAMES[match.kind]
            raise precondition_failed(f"Invalid x-match field type {name} (value {match.value!r}); expected longstr")
        value = match.value.decode("utf-8", "replace")
        if value not in _MATCHES:
            raise precondition_failed(
                f'Invalid x-match field value <<"{value}">>; expected all, any, all-with-x, or any-with-x'
            )

    def _match_direct(self, keys: tuple[str, ...], _headers: object) -> Iterator[Destination]:
        return (each.destination for each in self.bindings.values() if each.key in keys)

    def _match_all(self, _keys: object, _headers: object) -> Iterator[Destination]:
        return (each.destination for each in self.bindings.values())

    def _match_topic(self, keys: tuple[str, ...], _headers: object) -> Iterator[Destination]:
        words = [_words(key) for key in keys]
        return (
            each.destination for each in self.bindings.values() if any(_topic_matches(each.words, key) for key in words)
        )

    def _match_headers(self, _keys: object, headers: Callable[[], Table]) -> Iterator[Destination]:
        found = headers()
        return (each.destination for each in self.bindings.values() if _headers_match(each.arguments, found))


def _words(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


def _topic_matches(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(_topic_matches(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _topic_matches(rest, words[1:])


def _headers_match(wanted: Table, headers: Table) -> bool:
    match = wanted.get("x-match", tables.text("all")).value.decode("utf-8", "replace")
    names: Iterable[str] = (
        (name for name in wanted if name != "x-match")
        if match.endswith("-with-x")
        else (name for name in wanted if not name.startswith("x-"))
    )
    found = (_is_equal(wanted[name], headers.get(name)) for name in names)
    return any(found) if match.startswith("any") else all(found)


def _is_equal(wanted: Field, header: Field | None) -> bool:
    """Compare values of whatever type, except that a bool is no number."""
    if header is None or wanted.kind == "V":
        return header is not None
    return bool(wanted.value == header.value) and (wanted.kind == "t") == (header.kind == "t")
