"""Payloads of Sparkplug B as Python values, and what births define. Values must not be changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from messaging.errors import DecodeError
from messaging.sparkplug.datatypes import DataType  # type hints of dataclasses are resolved

#: characters of the name of a metric that is kept
MAX_NAME: Final = 1000


@dataclass(frozen=True, slots=True)
class Property:
    """A property of a metric.

    Attributes:
        type: of the value.
        value: of a basic type, or properties by name for ``PropertySet``, a sequence of those for
            ``PropertySetList``. ``None``: null.
    """

    type: DataType
    value: Any = None


@dataclass(frozen=True, slots=True)
class MetaData:
    """What is known about binary data: of a metric of type ``Bytes`` or ``File``, and of its parts."""

    is_multi_part: bool | None = None
    content_type: str | None = None
    size: int | None = None
    seq: int | None = None
    file_name: str | None = None
    file_type: str | None = None
    md5: str | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True)
class DataSet:
    """A table.

    Attributes:
        columns: names of the columns.
        types: of the columns, basic ones.
        rows: values of each row; ``None`` is null.
    """

    columns: Sequence[str] = ()
    types: Sequence[DataType] = ()
    rows: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a template: a name, a basic type, and a value."""

    name: str
    type: DataType
    value: Any = None


@dataclass(frozen=True, slots=True)
class Template:
    """A type of its own, or a value of it.

    Attributes:
        reference: name of the metric that defines the type; ``None`` for a definition.
        is_definition: whether it defines a type.
        metrics: the members.
    """

    version: str | None = None
    reference: str | None = None
    is_definition: bool = False
    parameters: Sequence[Parameter] = ()
    metrics: Sequence[Metric] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """A value with its name, type and time.

    Attributes:
        name: ``None`` where an alias stands for it.
        value: ``None``: null. ``DateTime`` is milliseconds since the epoch; ``Bytes`` and ``File`` are bytes; arrays
            are tuples. Without a type, a number as it was transmitted: not negative.
        type: ``None`` if the payload does not tell it, as data after a birth may do.
        timestamp: milliseconds since the epoch.
        alias: number that stands for the name.
        properties: by name.
    """

    name: str | None = None
    value: Any = None
    type: DataType | None = None
    timestamp: int | None = None
    alias: int | None = None
    is_historical: bool = False
    is_transient: bool = False
    metadata: MetaData | None = None
    properties: Mapping[str, Property] | None = None

    @property
    def is_null(self) -> bool:
        """Return whether there is no value."""
        return self.value is None


@dataclass(frozen=True, slots=True)
class Payload:
    """The payload of a Sparkplug message.

    Attributes:
        timestamp: when it was sent, milliseconds since the epoch.
        seq: sequence number, 0 to 255; ``None`` for NDEATH and commands.
        uuid: names the schema of ``body``.
        body: bytes in a format of their own.
    """

    timestamp: int | None = None
    metrics: Sequence[Metric] = ()
    seq: int | None = None
    uuid: str | None = None
    body: bytes | None = None


class Definition(NamedTuple):
    """A metric of a birth."""

    name: str
    type: DataType
    #: of a template
    members: Definitions | None


class Definitions:
    """The metrics of a birth. Immutable.

    Args:
        metrics: of the birth, or the members of a template in it.

    Raises:
        DecodeError: a metric has no name or no type, or its name is too long.
    """

    __slots__ = ("_by_alias", "_by_name", "count")

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._by_name: dict[str, Definition] = {}
        self._by_alias: dict[int, Definition] = {}
        ambiguous: set[int] = set()
        #: metrics and members
        self.count = 0
        for each in metrics:
            if not each.name:
                raise DecodeError("a metric of a birth has no name")
            if len(each.name) > MAX_NAME:
                raise DecodeError(f"metric {each.name[:40]!a}...: the name has more than {MAX_NAME} characters")
            if each.type is None:
                raise DecodeError(f"metric {each.name[:90]!a}: a metric of a birth needs its datatype")
            members = Definitions(each.value.metrics) if isinstance(each.value, Template) else None
            made = Definition(each.name, each.type, members)
            self.count += 1 if members is None else 1 + members.count
            self._by_name[each.name] = made
            if each.alias is None:
                continue
            found = self._by_alias.setdefault(each.alias, made)
            if found.name != each.name:
                ambiguous.add(each.alias)
        # an alias that stands for two metrics stands for none: their data would be mistaken for one another
        for alias in ambiguous:
            del self._by_alias[alias]

    def find(self, name: str | None, alias: int | None) -> Definition | None:
        """Return the metric with a name or, without one, with an alias."""
        if name is not None:
            return self._by_name.get(name)
        return None if alias is None else self._by_alias.get(alias)

    @property
    def metrics(self) -> Iterable[Definition]:
        """Return the metrics, without the members of templates."""
        return self._by_name.values()
