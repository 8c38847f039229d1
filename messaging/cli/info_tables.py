"""The tables of ``messaging info``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def installation(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the installation."""
    rows = {
        "versions": {name: version or "not installed" for name, version in found["versions"].items()},
        "adapters": {
            f"{scheme}://": "{status} ({adapter})".format(**each) for scheme, each in found["adapters"].items()
        },
        "codecs": found["codecs"],
    }
    return [_table(title, each.items()) for title, each in rows.items()]


def state(found: Mapping[str, Any]) -> Table:
    """Return the table of the state of an instance."""
    return _table("", _flat(found))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested data as rows of name and value, without service properties, which repeat parts of the DTO."""
    for name, each in value.items():
        if isinstance(each, Mapping):
            if name != "service":
                yield from _flat(each, f"{prefix}{name}.")
        elif isinstance(each, (list, tuple)):
            yield prefix + name, ", ".join(map(str, each)) or "-"
        else:
            yield prefix + name, "-" if each is None else str(each)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if title:
        table.add_row(Text(title, style="bold"), "")
    for name, value in rows:
        table.add_row(Text(("  " if title else "") + name), Text(value))
    return table


def features(found: Mapping[str, bool], kinds: Mapping[str, str]) -> Table:
    """Return the table of announced features."""
    table = Table("feature", "kind", "announced", box=None, pad_edge=False, header_style="bold")
    for name, announced in found.items():
        table.add_row(name, kinds.get(name, "adapter's own"), "yes" if announced else "no")
    return table
