"""``messaging info``: what an instance can do, or what is installed."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from messaging import Features, Messaging
from messaging.adapter import ENTRY_POINT_GROUP
from messaging.cli import options  # noqa: TC001  # typer evaluates annotations
from messaging.cli.connecting import choose_target, connect
from messaging.cli.output import ExitCode, dump, show, write
from messaging.cli.watch import watch as watch_connection
from messaging.codecs import codec_for, content_types
from messaging.errors import ArgumentError, MessagingError
from messaging.instance import find_adapter
from messaging.model import parse_url
from messaging.model.settings import URL_VARIABLE, load_settings

_PACKAGES: Final = (
    "rx-messaging",
    "reactivex",
    "pydantic",
    "paho-mqtt",
    "aio-pika",
    "aiormq",
    "uvloop",
    "cbor2",
    "msgpack",
    "zstandard",
)

_Json = Annotated[bool, typer.Option("--json", help="One JSON object; with --watch, one for each state.")]
_Features = Annotated[bool, typer.Option("--features", help="Every known feature, and whether it is announced here.")]

_Watch = Annotated[
    bool, typer.Option("--watch", help="The states of the connection as they change, until interrupted.")
]


def info(
    url: options.Url = None,
    json: _Json = False,
    features: _Features = False,
    watch: _Watch = False,
    url_option: options.UrlOption = None,
    client_id: options.ClientId = None,
    option: options.Settings = None,
    quiet: options.Quiet = False,  # noqa: ARG001  # its callback did it
    debug: options.Debug = False,  # noqa: ARG001
) -> int:
    """Show what an instance connected to URL can do; without a URL, what is installed.

    Example: messaging info mqtt://localhost --features
    """
    if watch:
        if features:
            raise ArgumentError("--watch and --features: give one of them")
        return watch_connection(choose_target(url, url_option), client_id, option, json=json)
    if url is None and url_option is None and not os.environ.get(URL_VARIABLE):
        if features:
            raise ArgumentError("--features needs a broker URL: what is announced depends on the broker")
        found: Mapping[str, Any] = _installed()
        tables = _installation_tables(found)
    else:
        with connect(choose_target(url, url_option), "info", client_id, option) as m:
            found = _feature_table(m) if features else dataclasses.asdict(m.runtime.get_runtime_dto())
        tables = [_features_table(found)] if features else [_table("", _flat(found))]
    if json:
        write(dump(found))
    else:
        show(*tables)
    return ExitCode.OK


def _feature_table(m: Messaging) -> dict[str, bool]:
    known = {value for name, value in vars(Features).items() if name.isupper()}
    return {name: name in m.features for name in sorted(known | m.features)}


# --- what is installed


def _installed() -> dict[str, Any]:
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "adapters": {
            scheme: {"adapter": point.value, "status": _adapter_status(scheme)}
            for scheme, point in sorted(points.items())
        },
        "codecs": {name: _codec_status(name) for name in content_types()},
    }


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, None


def _adapter_status(scheme: str) -> str:
    """``ok``, or why there can be no instance. Making an adapter connects nothing, but shows what it lacks."""
    try:
        kind = find_adapter(scheme)
        url = parse_url(f"{scheme}://localhost")
        kind(url, load_settings(kind.settings_type, url, {}), "info")
    except MessagingError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # one that is broken must not hide the others
        return f"broken: {type(error).__name__}: {error}"
    return "ok"


def _codec_status(content_type: str) -> str:
    try:
        codec_for(content_type)
    except MessagingError as error:
        return str(error)
    return "ok"


# --- for people


def _installation_tables(found: Mapping[str, Any]) -> list[Table]:
    adapters = {f"{scheme}://": each for scheme, each in found["adapters"].items()}
    return [
        _table("versions", {name: each or "not installed" for name, each in found["versions"].items()}.items()),
        _table("adapters", {name: f"{each['status']} ({each['adapter']})" for name, each in adapters.items()}.items()),
        _table("codecs", found["codecs"].items()),
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested data as lines of two columns. The properties of services repeat what is in the DTO already."""
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


def _features_table(found: Mapping[str, bool]) -> Table:
    extensions = {value for name, value in vars(Features).items() if name.startswith("EXTENSION_")}
    functional = {value for name, value in vars(Features).items() if name.isupper()} - extensions
    table = Table("feature", "kind", "announced", box=None, pad_edge=False, header_style="bold")
    for name, announced in found.items():
        kind = "functional" if name in functional else "extension" if name in extensions else "adapter's own"
        table.add_row(name, kind, "yes" if announced else "no")
    return table
