"""``messaging info``: the features and the state of an instance, the states of a connection, or the installation."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Final

from messaging.adapter import ENTRY_POINT_GROUP
from messaging.cli import options
from messaging.cli.connecting import BrokerOptions  # read at run time by options.command
from messaging.cli.options import flag
from messaging.cli.output import LOOK, ExitCode, ReaderGoneError, dump, is_reader_gone, show, show_table, write
from messaging.codecs import codec_for, content_types
from messaging.connection import ConnectionState
from messaging.environment import URL_VARIABLE
from messaging.errors import ArgumentError, BrokerError, MessagingError
from messaging.instance import Messaging, find_adapter
from messaging.model import Features, parse_url
from messaging.model.settings import load_settings

if TYPE_CHECKING:
    from rich.table import Table


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


@options.command
def info(
    broker: BrokerOptions,
    json: Annotated[bool, flag("--json", "Write one JSON object; with --watch, one per state.")] = False,
    features: Annotated[bool, flag("--features", "List every known feature, and whether it is announced.")] = False,
    watch: Annotated[
        bool, flag("--watch", "Write the states of the connection as they change, until interrupted.")
    ] = False,
) -> int:
    """Show the features and the state of an instance connected to URL; without a URL, the installation.

    Example: messaging info mqtt://localhost --features
    """
    if watch:
        if features:
            raise ArgumentError("--watch and --features: give one of them")
        return _watch_states(broker, json=json)
    if not broker.is_named and not os.environ.get(URL_VARIABLE):
        if features:
            raise ArgumentError("--features needs a broker URL: the announced features depend on the broker")
        found: Mapping[str, Any] = _installed()
        is_installation = True
    else:
        with broker.connect("info") as m:
            announced = {name: name in m.features for name in sorted(_kinds().keys() | m.features)}
            found = announced if features else dataclasses.asdict(m.runtime.get_runtime_dto())
        is_installation = False
    if json:
        write(dump(found))
        return ExitCode.OK
    if is_installation:
        show(*_installation_tables(found))
    elif features:
        kinds = _kinds()
        rows = [
            [name, kinds.get(name, "adapter's own"), "yes" if is_announced else "no"]
            for name, is_announced in found.items()
        ]
        show_table(["feature", "kind", "announced"], rows)
    else:
        show(_table("", _flat(found)))
    return ExitCode.OK


def _kinds() -> dict[str, str]:
    """Return the kinds of the known features."""
    known = {name: value for name, value in vars(Features).items() if name.isupper()}
    return {value: "extension" if name.startswith("EXTENSION_") else "functional" for name, value in known.items()}


# --- the states of a connection


def _watch_states(broker: BrokerOptions, *, json: bool) -> int:
    """Write each state of the connection as it changes. Wait for a broker that is not there yet.

    Raises:
        MessagingError: the connection has failed and is not retried.
        ReaderGoneError: the reader of stdout has closed it.
    """
    states: queue.SimpleQueue[ConnectionState] = queue.SimpleQueue()

    async def start() -> Messaging:
        # with a running event loop, connect() returns before there is a connection
        return broker.connect("info", report_return=False, retry_connect="true")

    with asyncio.run(start()) as m:
        m.connection_state.subscribe(states.put)
        while True:
            try:
                state = states.get(timeout=LOOK)
            except queue.Empty:
                if is_reader_gone():
                    raise ReaderGoneError from None
                continue
            write(_state_line(state, json=json))
            if state.name == "closed":
                if state.cause is not None:
                    raise state.cause
                return ExitCode.OK


def _state_line(state: ConnectionState, *, json: bool) -> bytes:
    if not json:
        since = datetime.fromtimestamp(state.since, UTC).isoformat(timespec="milliseconds")
        where = f" ({state.host})" if state.is_up and state.host is not None else ""
        return f"{since} {state}{where}\n".encode()
    cause = state.cause
    return dump(
        {
            "state": state.name,
            "since": state.since,
            "cause": None if cause is None else str(cause),
            "error": None if cause is None else type(cause).__name__,
            "code": cause.code if isinstance(cause, BrokerError) else None,
            "host": state.host,
        }
    )


# --- the installation


def _installed() -> dict[str, Any]:
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "adapters": {
            scheme: {"adapter": point.value, "status": _status(_create_adapter, scheme)}
            for scheme, point in sorted(points.items())
        },
        "codecs": {name: _status(codec_for, name) for name in content_types()},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _create_adapter(scheme: str) -> None:
    """Create an adapter, which connects nothing but fails where a package is missing."""
    kind = find_adapter(scheme)
    url = parse_url(f"{scheme}://localhost")
    kind(url, load_settings(kind.settings_type, url, {}), "info")


def _status(create: Callable[[str], object], name: str) -> str:
    """Return ``ok`` if an adapter or codec can be created, otherwise the reason why not."""
    try:
        create(name)
    except MessagingError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # a broken package must not hide the others
        return f"broken: {type(error).__name__}: {error}"
    return "ok"


# --- tables; rich takes as long to import as many commands to run


def _installation_tables(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the installation."""
    rows = {
        "versions": {name: version or "not installed" for name, version in found["versions"].items()},
        "adapters": {
            f"{scheme}://": "{status} ({adapter})".format(**each) for scheme, each in found["adapters"].items()
        },
        "codecs": found["codecs"],
    }
    return [_table(title, each.items()) for title, each in rows.items()]


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
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if title:
        table.add_row(Text(title, style="bold"), "")
    for name, value in rows:
        table.add_row(Text(("  " if title else "") + name), Text(value))
    return table
