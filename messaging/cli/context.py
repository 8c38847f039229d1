"""``messaging context``: save brokers under names, which stand for the broker as ``@NAME``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from messaging.cli import completion, context_file, options
from messaging.cli.context_file import PREFIX, SavedContext
from messaging.cli.options import argument, flag
from messaging.cli.output import ExitCode, dump, show_pairs, write
from messaging.errors import ArgumentError

logger = logging.getLogger(__name__)

#: most characters of a password that is read from stdin
_LONGEST: Final = 65_536

context = options.CommandGroup("context")

_Name = Annotated[str, argument("NAME", "Name of the context.", autocompletion=completion.contexts)]


@context.command()
def add(
    context_name: _Name,
    url: Annotated[str, argument("URL", "Broker URL.")],
    client_id: options.ClientId = None,
    option: options.Settings = None,
    password_stdin: Annotated[
        bool, flag("--password-stdin", "Read the password from the first line of stdin.")
    ] = False,
    replace: Annotated[bool, flag("--replace", "Replace a context of that name.")] = False,
) -> int:
    """Save a broker. Checks the URL and the settings, but connects to nothing.

    Example: messaging context add plant mqtts://joe@broker --option cafile=ca.pem --password-stdin
    """
    context_file.check_name(context_name)
    settings = options.settings(option, client_id)
    if password_stdin:
        if "password" in settings:
            raise ArgumentError("--option password is given twice: --password-stdin is the same")
        settings["password"] = _password()
    saved = _checked(url, settings)

    def change(known: dict[str, SavedContext]) -> None:
        if context_name in known and not replace:
            raise ArgumentError(f"context {context_name!r} is saved already; --replace replaces it")
        known[context_name] = saved

    file = context_file.change(change)
    logger.info("context %r is saved in %s; use it as %s%s", context_name, file, PREFIX, context_name)
    return ExitCode.OK


def _password() -> str:
    if sys.stdin is None:
        raise ArgumentError("--password-stdin: stdin is closed")
    password = sys.stdin.readline(_LONGEST).rstrip("\r\n")
    if not password:
        raise ArgumentError("--password-stdin: stdin has no password in its first line")
    return password


def _checked(text: str, settings: Mapping[str, str]) -> SavedContext:
    """Return what to save: file names become absolute, and the query of the URL becomes settings.

    Raises an error for what connecting would refuse: the URL, a setting or a value.
    """
    from messaging.instance import find_adapter
    from messaging.model import parse_url
    from messaging.model.settings import load_settings

    url = parse_url(text)
    if url.password is not None and "password" in settings:
        raise ArgumentError("the password is given twice: in the URL and beside it")
    for key in settings:
        if key in url.options:
            raise ArgumentError(f"setting {key} is given twice: in the URL and beside it")
    kind = find_adapter(url.scheme).settings_type
    found = {**url.options, **settings}
    for key, value in found.items():
        field = kind.model_fields.get(key)
        if field is not None and "Path" in str(field.annotation):
            found[key] = str(Path(value).expanduser().absolute())
    base = text.partition("?")[0]
    load_settings(kind, parse_url(base), found)
    return SavedContext(base, found)


@context.command("list")
def list_contexts(json: options.Json = False) -> int:
    """List the saved contexts, without passwords."""
    known = dict(sorted(context_file.load().items()))
    if json:
        write(dump([*map(_shown, known.values())]))
    elif known:
        show_pairs({name: each.shown_url for name, each in known.items()})
    return ExitCode.OK


@context.command("show")
def show_context(context_name: _Name, json: options.Json = False) -> int:
    """Show a saved context, without passwords."""
    saved = context_file.get(context_name)
    if json:
        write(dump(_shown(saved)))
    else:
        show_pairs({"url": saved.shown_url, **saved.shown_settings})
    return ExitCode.OK


def _shown(saved: SavedContext) -> dict[str, object]:
    return {"name": saved.name, "url": saved.shown_url, "settings": saved.shown_settings}


@context.command()
def remove(
    context_names: Annotated[
        list[str], argument("NAME...", "Names of the contexts.", autocompletion=completion.contexts)
    ],
) -> int:
    """Remove saved contexts: all of them, or none if one is not saved."""

    def change(known: dict[str, SavedContext]) -> None:
        for name in dict.fromkeys(context_names):
            context_file.check_saved(name, known)
            del known[name]

    context_file.change(change)
    return ExitCode.OK
