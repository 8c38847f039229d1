"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import typer

from messaging.cli.output import set_verbosity
from messaging.errors import ArgumentError
from messaging.model.settings import URL_VARIABLE

#: the panel of ``--help`` for what every command has
_COMMON: Final = "Connection and diagnostics"


def _quiet(value: bool) -> bool:
    if value:
        set_verbosity(logging.ERROR)
    return value


def _debug(value: bool) -> bool:
    if value:
        set_verbosity(logging.DEBUG)
    return value


Url = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help=f"Broker, such as mqtt://localhost, or a saved context, @NAME; or --url, or ${URL_VARIABLE}.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", "-u", metavar="URL", rich_help_panel=_COMMON, help="Broker, the other way to give it."),
]
ClientId = Annotated[
    str | None,
    typer.Option("--id", "-i", metavar="ID", rich_help_panel=_COMMON, help="Client id; generated if not given."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        rich_help_panel=_COMMON,
        help="A setting, as in the query of the URL: version=3.1.1, cafile=ca.pem, timeout=5. Repeatable.",
    ),
]
NoNewline = Annotated[bool, typer.Option("--no-newline", "-N", help="Write no newline after a payload.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", callback=_quiet, rich_help_panel=_COMMON, help="Only errors on stderr.")
]
Debug = Annotated[bool, typer.Option("--debug", "-d", callback=_debug, rich_help_panel=_COMMON, help="Logs on stderr.")]
Topics = Annotated[
    list[str],
    typer.Option(
        "--topic", "-t", metavar="PATTERN", show_default=False, help="Channel or pattern with + and #. Repeatable."
    ),
]
Qos = Annotated[
    str | None,
    typer.Option("--qos", "-q", metavar="0|1|2", help="Quality of service; by default the adapter's."),
]
RoutingKey = Annotated[
    str | None,
    typer.Option("--routing-key", metavar="KEY", help="Beside the channel, where the protocol has that: AMQP."),
]
Extensions = Annotated[
    list[str] | None,
    typer.Option(
        "--extension",
        "-x",
        metavar="KEY=VALUE",
        help="An extension, such as timeToLive=5 (pub) or deadLetterChannel=dead (sub). JSON or else text. Repeatable.",
    ),
]


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Split what a repeatable ``KEY=VALUE`` option was given.

    Raises:
        ArgumentError: no '=', no key, or a key twice. Values are not repeated: they may be secrets.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ArgumentError(f"{option} takes KEY=VALUE")
        if key in found:
            raise ArgumentError(f"{option} {key} is given twice")
        found[key] = value
    return found


def check_timeout(timeout: float | None, most: float = sys.float_info.max) -> None:
    """Refuse what ``--timeout`` cannot be.

    Raises:
        ArgumentError: it is not above 0 seconds, or above ``most``.
    """
    if timeout is not None and not 0 < timeout <= most:
        raise ArgumentError("--timeout must be a number of seconds above 0")


def extensions(given: Iterable[str] | None, **flags: Any) -> dict[str, Any]:
    """The extensions of a context: those of ``-x``, and of the options that stand for one.

    Args:
        given: what ``-x`` was given.
        flags: key -> value; ``None`` for an option that was not given.

    Raises:
        ArgumentError: malformed, or one extension in two ways.
    """
    found: dict[str, Any] = {}
    for key, text in pairs(given, "--extension").items():
        try:
            found[key] = json.loads(text)
        except (ValueError, RecursionError):
            found[key] = text
    for key, value in flags.items():
        if value is not None:
            if key in found:
                raise ArgumentError(f"extension {key} is given twice: by --extension and by an option of its own")
            found[key] = value
    return found


def headers(given: Iterable[str] | None) -> Mapping[str, str] | None:
    """User headers, or ``None`` if there are none."""
    return pairs(given, "--header") or None
