"""What a birth defines: names, aliases and types of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from messaging.errors import DecodeError
from messaging.sparkplug.model import Metric, Template

if TYPE_CHECKING:
    from messaging.sparkplug.datatypes import DataType

#: characters of the name of a metric that is kept
MAX_NAME: Final = 1000


class Definition:
    """A metric of a birth. Immutable."""

    __slots__ = ("members", "name", "type")

    def __init__(self, name: str, type: DataType, members: Definitions | None) -> None:  # noqa: A002  # Sparkplug's word
        self.name = name
        self.type = type
        #: of a template
        self.members = members


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
