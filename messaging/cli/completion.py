"""Shell completion: the candidates for the word at the cursor.

The script of a shell runs the program with the environment variable ``_MESSAGING_COMPLETE`` set to the name of the
shell, and the command line up to the cursor as arguments. Candidates go to stdout, one per line; zsh and fish also get
a tab and a short explanation. A candidate that ends with ``=`` or ``/`` is incomplete, so no space follows it. Without
candidates, the shells complete file names.

Modules of the commands are imported only where their options are completed: completion must be fast.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from messaging.adapter import Adapter

#: bash starts a new word after each of these characters, and replaces only the text after the last one
_BASH_BREAKS: Final = "=:"


class Candidate(NamedTuple):
    """A word that may replace the one at the cursor.

    Attributes:
        help: a short explanation; may be empty.
    """

    value: str
    help: str = ""


def answer(shell: str, arguments: Sequence[str]) -> str:
    """Return the candidates in the form that the script of ``shell`` expects.

    Args:
        shell: one of :data:`~messaging.cli.completion_scripts.SCRIPTS`.
        arguments: for bash the whole line up to the cursor; for the others its words after the program's name.
    """
    words = _split(arguments[0])[1:] if shell == "bash" else [*arguments]
    incomplete = words.pop() if words else ""
    found = candidates(words, incomplete)
    if shell == "bash":
        kept = max(incomplete.rfind(char) for char in _BASH_BREAKS) + 1
        return "".join(f"{each.value[kept:]}\n" for each in found)
    return "".join(f"{each.value}\t{each.help}\n" if each.help else f"{each.value}\n" for each in found)


def _split(line: str) -> list[str]:
    """Split a command line that may end within quotes; the last word is at the cursor and may be empty."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return words if closing or not line[-1:].isspace() else [*words, ""]
    return line.split(" ")


def candidates(words: Sequence[str], incomplete: str) -> list[Candidate]:
    """Return the words that may replace ``incomplete`` after ``words``."""
    if words and words[-1] in ("--install-completion", "--show-completion"):
        from messaging.cli.completion_scripts import SCRIPTS

        return _starting(map(Candidate, SCRIPTS), incomplete)
    command: Any = None
    path: list[str] = []
    rest = [*words]
    while command is None or _subcommands(command) is not None:
        named = next((index for index, word in enumerate(rest) if not word.startswith("-")), None)
        if named is None:
            return _starting(_of_group(command, incomplete), incomplete)
        command = _find(command, rest[named])
        if command is None:
            return []
        path.append(rest[named])
        rest = rest[named + 1 :]
    return _starting(_of_command(command, path[0], words, rest, incomplete), incomplete)


def _starting(found: Iterable[Candidate], incomplete: str) -> list[Candidate]:
    return [each for each in found if each.value.startswith(incomplete)]


# --- commands


def _program() -> Any:
    import typer

    from messaging.cli.app import app

    return typer.main.get_command(app)


def _subcommands(command: Any) -> Any:
    return getattr(command, "commands", None)


def _find(parent: Any, name: str) -> Any:
    """Return the command ``name`` of the group ``parent``, ``None`` for the program; ``None`` if there is none."""
    from messaging.cli.commands import OWN, load_own

    if parent is not None:
        return _subcommands(parent).get(name)
    if name in OWN:
        return load_own(name)
    return _program().get_command(None, name)


def _of_group(command: Any, incomplete: str) -> Iterator[Candidate]:
    from messaging.cli.commands import OWN, found

    if incomplete.startswith("-"):
        yield from _option_names(command if command is not None else _program(), ())
    elif command is None:
        yield from map(Candidate, OWN, OWN.values())
        for name in found():  # listing them imports none of their packages
            if name not in OWN:
                yield Candidate(name)
    else:
        for name, each in _subcommands(command).items():
            yield Candidate(name, each.get_short_help_str(80))


def _options(command: Any) -> Iterator[Any]:
    return (each for each in command.params if each.param_type_name == "option" and not each.hidden)


def _option_names(command: Any, words: Sequence[str]) -> Iterator[Candidate]:
    for option in _options(command):
        names = [*option.opts, *option.secondary_opts]
        if option.multiple or not any(name in words for name in names):
            for name in names:
                if name.startswith("--"):
                    yield Candidate(name, " ".join((option.help or "").split()))
    yield Candidate("--help", "Show the options and exit.")


def _of_command(
    command: Any, name: str, words: Sequence[str], rest: Sequence[str], incomplete: str
) -> Iterator[Candidate]:
    by_name = {opt: option for option in _options(command) for opt in (*option.opts, *option.secondary_opts)}
    takes_value = {opt for opt, option in by_name.items() if not option.is_flag}
    if rest and rest[-1] in takes_value:
        yield from _values(by_name[rest[-1]], name, words)
        return
    if incomplete.startswith("--") and "=" in incomplete:
        opt = incomplete.partition("=")[0]
        if opt in takes_value:
            for each in _values(by_name[opt], name, words):
                yield Candidate(f"{opt}={each.value}", each.help)
        return
    if incomplete.startswith("-"):
        yield from _option_names(command, rest)
        return
    given = sum(
        not word.startswith("-") and not (index and rest[index - 1] in takes_value) for index, word in enumerate(rest)
    )
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    if given < len(arguments):
        yield from _values(arguments[given], name, words)


# --- values


def _values(parameter: Any, command: str, words: Sequence[str]) -> Iterator[Candidate]:
    """Yield the known values of ``parameter`` of ``command``."""
    match parameter.name:
        case "url" | "url_option":
            yield from _brokers()
        case "context_name" | "context_names":
            yield from (Candidate(name, url) for name, url in _contexts())
        case "extension":
            yield from _extensions(command, _adapter(words))
        case "option":
            yield from _settings(_adapter(words))
        case "qos":
            yield from map(Candidate, ("0", "1", "2"))
        case "qos_names":
            from messaging.distributedeventing.qos import STANDARD

            yield from map(Candidate, STANDARD)
        case "grammar":
            from messaging.cli.events_options import Grammar

            yield from (Candidate(each.value) for each in Grammar)
        case "type_":
            from messaging.cli.events import EventType

            yield from (Candidate(each.value) for each in EventType)
        case "format_" if command == "events":
            from messaging.cli.events_lines import FORMATS

            yield from map(Candidate, FORMATS)
        case "content_type":
            from messaging.codecs import content_types

            yield from map(Candidate, content_types())
        case "encoding":
            yield from map(Candidate, ("gzip", "zstd"))
        case "mode":
            from messaging.cli.bench import MODES

            yield from map(Candidate, MODES)
        case "ack":
            from messaging.cli.sub import Ack

            yield from (Candidate(each.value) for each in Ack)


def _brokers() -> Iterator[Candidate]:
    from importlib.metadata import entry_points

    from messaging.adapter import ENTRY_POINT_GROUP
    from messaging.cli.context_file import PREFIX

    for scheme in sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}):
        yield Candidate(f"{scheme}://")
    for name, url in _contexts():
        yield Candidate(PREFIX + name, url)


def _contexts() -> Iterator[tuple[str, str]]:
    """Return the name and the URL of each saved context."""
    from messaging.cli.context_file import load

    return ((name, each.shown_url) for name, each in sorted(load().items()))


def _adapter(words: Iterable[str]) -> type[Adapter] | None:
    """Return the adapter of the broker in ``words`` or the environment, or ``None`` without a broker."""
    from messaging.cli.context_file import PREFIX, get
    from messaging.environment import URL_VARIABLE
    from messaging.instance import find_adapter

    url = next((word for word in words if "://" in word or word.startswith(PREFIX)), None)
    url = url or os.environ.get(URL_VARIABLE, "")
    if url.startswith(PREFIX):
        url = get(url.removeprefix(PREFIX)).url
    scheme, separator, _ = url.partition("://")
    return find_adapter(scheme.lower()) if separator else None


def _extensions(command: str, adapter: type[Adapter] | None) -> Iterator[Candidate]:
    from messaging.model import CHECKS, OVERFLOW_POLICIES, PUBLISH_ONLY, SUBSCRIBE_ONLY, boolean

    publishes = command in ("pub", "request")
    checks = {key: check for key, check in CHECKS.items() if key not in (SUBSCRIBE_ONLY if publishes else PUBLISH_ONLY)}
    if adapter is not None:
        checks |= adapter.publish_extensions if publishes else adapter.subscribe_extensions
    for key, check in sorted(checks.items()):
        if check is boolean:
            yield Candidate(f"{key}=true")
            yield Candidate(f"{key}=false")
        elif key == "overflow":
            yield from (Candidate(f"{key}={policy}") for policy in OVERFLOW_POLICIES)
        else:
            yield Candidate(f"{key}=")


def _settings(adapter: type[Adapter] | None) -> Iterator[Candidate]:
    from messaging.model.settings import Settings

    kind = Settings if adapter is None else adapter.settings_type
    for name, field in sorted(kind.model_fields.items()):
        yield Candidate(f"{name}=", field.description or "")
