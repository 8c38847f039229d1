"""``messaging gateway``: run a gateway from a file, check and explain the file, and look after its dead letters."""

from __future__ import annotations

import itertools
import json as json_
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from messaging.cli import options
from messaging.cli.options import argument, flag, option
from messaging.cli.output import (
    ExitCode,
    dump,
    payload_fields,
    set_formatter,
    set_verbosity,
    show_table,
    write,
)
from messaging.errors import ArgumentError, ConfigurationError, ConnectFailedError, GatewaySettingsError
from messaging.errors.text import counted

if TYPE_CHECKING:
    from messaging.gateway.dead_letters import Letter
    from messaging.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

gateway = options.CommandGroup("gateway")
dead_letters = options.CommandGroup(
    "dead-letters", help="List, show, replay and drop the messages that a route could not handle."
)
gateway.add_typer(dead_letters)

#: most characters of a reason in a table
_SHOWN: Final = 60

_File = Annotated[Path, argument("FILE", "Configuration: a .toml, .yaml or .yml file.")]
_Place = Annotated[Path, argument("FILE", "Configuration of the gateway, or its data folder.")]
_Routes = Annotated[list[str] | None, option("--route -r", "NAME", "Of this route. Repeatable; default: all.")]
_Where = Annotated[
    str | None,
    option(
        "--where -w",
        "FILTER",
        "LDAP filter over id, stage, time, reason, channel, message_id and bytes: '(channel=plant/*)'.",
    ),
]
_Ids = Annotated[list[int] | None, option("--id", "N", "Only the dead letter N. Repeatable.")]
_All = Annotated[bool, flag("--all", "Of all dead letters: needed without --id and --where.")]


@gateway.command()
def run(
    file: _File,
    log_format: Annotated[str, option("--log-format", "text|json", "How log lines are written to stderr.")] = "text",
    log_level: Annotated[str, option("--log-level", "LEVEL", "debug, info, warning or error.")] = "info",
) -> int:
    """Run the gateway until SIGTERM or SIGINT. SIGHUP reads the configuration again.

    Tells systemd when it runs (Type=notify, WatchdogSec). A second SIGTERM ends it without publishing what is stored;
    that stays on the disk for the next run.

    Example: messaging gateway run gateway.toml
    """
    from messaging.gateway import Gateway, load
    from messaging.gateway.supervision import supervise
    from messaging.observability.logs import JsonFormatter, formatter, level_number

    formatter(log_format)  # refuses other formats
    set_verbosity(level_number(log_level))
    if log_format == "json":
        set_formatter(JsonFormatter())
    supervise(Gateway(_load(file)), lambda: load(file))
    return ExitCode.OK


@gateway.command()
def check(file: _File, json: options.Json = False) -> int:
    """Check a configuration without running it: one line for each problem, with line, key, and what would be right.

    Exit code 1: it has errors. Warnings do not count.

    Example: messaging gateway check gateway.toml
    """
    from messaging.gateway import Severity, read

    found = read(file)
    if json:
        write(dump({"problems": [each.as_dict() for each in found.problems]}))
    else:
        write("".join(f"{each}\n" for each in found.problems).encode())
    errors = sum(each.severity is Severity.ERROR for each in found.problems)
    if errors:
        logger.error("%s: %s", file, counted(errors, "error"))
        return ExitCode.FAILED
    if not json:
        warnings = len(found.problems)
        write(f"{file}: right{', with ' + counted(warnings, 'warning') if warnings else ''}\n".encode())
    return ExitCode.OK


@gateway.command("plan")
def show_plan(file: _File, json: options.Json = False) -> int:
    """Show what goes where: each route with its source, steps, buffer and target.

    Example: messaging gateway plan gateway.toml
    """
    from messaging.gateway import plan

    found = plan(_load(file))
    if json:
        write(dump(found.as_dict()))
        return ExitCode.OK
    show_table(["instance", "url"], [[name, url] for name, url in found.instances.items()])
    rows = [
        [
            each.kind if each.is_enabled else f"{each.kind} (disabled)", each.name, each.source,
            "; ".join(each.steps), each.buffer, each.target,
        ]
        for each in found.flows
    ]  # fmt: skip
    show_table(["kind", "name", "from", "steps", "buffer", "to"], rows)
    return ExitCode.OK


@gateway.command("schema")
def show_schema() -> int:
    """Write the JSON schema of configurations, for editors.

    Example: messaging gateway schema > gateway.schema.json
    """
    from messaging.gateway import schema

    write(json_.dumps(schema(), indent=2).encode() + b"\n")
    return ExitCode.OK


@gateway.command()
def status(file: _Place, json: options.Json = False) -> int:
    """Show the state of a running gateway on this machine. Exit code 1: it has a problem, or none runs.

    An instance that is not connected is a problem, named with its cause; /readyz of the gateway says the same.

    Example: messaging gateway status gateway.toml
    """
    from messaging.gateway.control import call

    found = call(_data(file), "status", timeout=10.0)
    if json:
        write(dump(found))
    else:
        write(f"gateway {found['name']}: {found['state']}\n".encode())
        rows = [
            [
                each["name"], each["source"], _state(each), each["target"],
                "up" if each["is_target_up"] else "down", str(each["received"]), str(each["published"]),
                str(each["buffer"]["depth"]), f"{each['buffer']['age']:.0f} s", str(each["buffer"]["dead_letters"]),
            ]
            for each in found["routes"]
        ]  # fmt: skip
        columns = ["route", "from", "", "to", "", "received", "published", "stored", "oldest", "dead letters"]
        show_table(columns, rows)
        write("".join(f"problem: {each}\n" for each in found["problems"]).encode())
    return ExitCode.FAILED if found["problems"] else ExitCode.OK


def _state(route: Mapping[str, Any]) -> str:
    if not route["is_source_up"]:
        return "down"
    return "held back" if route["buffer"].get("is_held_back") else "up"


@gateway.command()
def reload(file: _Place) -> int:
    """Have a running gateway read its configuration again, as SIGHUP does, and wait until it has.

    Example: messaging gateway reload gateway.toml
    """
    from messaging.gateway.control import call

    call(_data(file), "reload")
    return ExitCode.OK


# --- dead letters


@dead_letters.command("list")
def list_letters(
    file: _Place, route: _Routes = None, where: _Where = None,
    limit: Annotated[int, option("--limit -n", "N", "At most N of each route.", min=1)] = 100,
    json: Annotated[bool, flag("--json", "Write JSON: one object per dead letter.")] = False,
) -> int:  # fmt: skip
    """List dead letters: route, id, time, stage, channel, reason. Also while the gateway runs.

    Example: messaging gateway dead-letters list gateway.toml --where '(reason=*refused*)'
    """
    rows: list[list[str]] = []
    for name, letter in _letters(file, route, None, where, limit):
        fields = letter.fields()
        if json:
            write(dump({"route": name, **fields}))
            continue
        reason = letter.reason if len(letter.reason) <= _SHOWN else f"{letter.reason[: _SHOWN - 3]}..."
        rows.append([name, str(letter.id), fields["time"], letter.stage, letter.channel, reason])
    if rows:
        show_table(["route", "id", "time", "stage", "channel", "reason"], rows)
    return ExitCode.OK


@dead_letters.command()
def show(
    file: _Place,
    route: Annotated[str, option("--route -r", "NAME", "Name of the route.")],
    id: Annotated[int, option("--id", "N", "Id of the dead letter.")],  # noqa: A002
) -> int:
    """Write one dead letter as JSON: reason, channel, properties and payload.

    Example: messaging gateway dead-letters show gateway.toml --route telemetry --id 7
    """
    for _, letter in _letters(file, [route], [id], None, 1):
        properties = json_.loads(letter.properties) if letter.properties else {}
        write(dump({**letter.fields(), "properties": properties, **payload_fields(letter.payload)}))
        return ExitCode.OK
    raise ArgumentError(f"route '{route}' has no dead letter {id}")


@dead_letters.command()
def replay(
    file: _Place, route: _Routes = None, id: _Ids = None, where: _Where = None, all: _All = False,  # noqa: A002
    rate: Annotated[
        float | None, option("--rate", "N", "At most N messages per second.", show_default="unlimited")
    ] = None,
) -> int:  # fmt: skip
    """Run the rest of the route again for dead letters, by the present configuration. The gateway must run.

    A dead letter is removed when its message is stored. Exit code 1: some failed again.

    Example: messaging gateway dead-letters replay gateway.toml --route telemetry --all --rate 100
    """
    selection = _required_selection(id, where, all)
    if rate is not None and not 0 < rate < 1e9:
        raise ArgumentError("--rate must be above 0")
    from messaging.gateway.control import call

    data, failed = _data(file), False
    for name in _routes(data, route):
        outcome = call(data, "replay", {"route": name, **selection, "rate": rate}, timeout=86_400.0)
        line = f"{name}: {outcome['replayed']} replayed, {outcome['failed']} failed again"
        write(f"{line}{'' if outcome['reason'] is None else ': ' + outcome['reason']}\n".encode())
        failed = failed or outcome["failed"] > 0
    return ExitCode.FAILED if failed else ExitCode.OK


@dead_letters.command()
def drop(
    file: _Place, route: _Routes = None, id: _Ids = None, where: _Where = None, all: _All = False,  # noqa: A002
) -> int:  # fmt: skip
    """Delete dead letters for good, also of a gateway that does not run.

    Example: messaging gateway dead-letters drop gateway.toml --where '(time<=2026-01-01)'
    """
    selection = _required_selection(id, where, all)
    data = _data(file)
    for name in _routes(data, route):
        write(f"{name}: {_drop(data, name, selection)} dropped\n".encode())
    return ExitCode.OK


def _drop(data: Path, route: str, selection: Mapping[str, Any]) -> int:
    from messaging.gateway.control import call
    from messaging.gateway.dead_letters import Selection, letters, route_folders
    from messaging.journal import Journal

    try:
        return int(call(data, "drop", {"route": route, **selection}))
    except ConnectFailedError:  # it does not run, and nothing else changes its journals
        with Journal.open(route_folders(data)[route]) as journal:
            return journal.remove_dead_letters([letter.id for letter in letters(journal, Selection(**selection))])


# --- places


def _data(file: Path) -> Path:
    """Return the data folder of a configuration, or ``file`` itself, if it is a folder."""
    if file.is_dir():
        return file
    return _load(file).data


def _load(file: Path) -> GatewaySettings:
    """Return the settings of a configuration; log each of its problems on a line of its own.

    Raises:
        ConfigurationError: it has errors, or cannot be read.
    """
    from messaging.gateway import load

    try:
        return load(file)
    except GatewaySettingsError as error:
        for problem in error.problems:
            logger.error("%s", problem)
    raise ConfigurationError(f"{file}: the configuration has errors")


def _routes(data: Path, given: list[str] | None) -> list[str]:
    """Return the routes that were asked for, and have a buffer.

    Raises:
        ConfigurationError: one of them has none.
    """
    from messaging.errors.text import did_you_mean
    from messaging.gateway.dead_letters import route_folders

    known = [*route_folders(data)]
    for name in given or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"there are {', '.join(known) or 'none'}"
            raise ConfigurationError(f"no route '{name}' has a buffer in {data}; {hint}")
    return given or known


def _letters(
    file: Path, routes: list[str] | None, ids: list[int] | None, where: str | None, limit: int
) -> Iterator[tuple[str, Letter]]:
    """Yield the dead letters of each route that are asked for, at most ``limit`` of each."""
    from messaging.gateway.dead_letters import Selection, letters, route_folders
    from messaging.journal import Journal

    selection, data = Selection(ids or (), where), _data(file)
    folders = route_folders(data)
    for name in _routes(data, routes):
        with Journal.view(folders[name]) as view:
            for letter in itertools.islice(letters(view, selection), limit):
                yield name, letter


def _required_selection(ids: list[int] | None, where: str | None, every: bool) -> dict[str, Any]:
    from messaging.gateway.dead_letters import Selection

    if every == bool(ids or where):
        raise ArgumentError("give --id or --where for some dead letters, or --all for all of them")
    Selection(ids or (), where)  # checks the filter
    return {"ids": ids or [], "where": where}
