"""The commands of the program: its own, and those of other packages.

Both are imported when they are run, not before: help and completion must come fast. Commands of other packages are
entry points of the group ``messaging.commands``, each a ``typer.Typer``. One whose package does not load keeps
nothing else from working.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from messaging.errors import ArgumentError, ConfigurationError, MessagingError
from messaging.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "messaging.commands"


class Own(NamedTuple):
    """A command of this project.

    Attributes:
        module: where it is.
        help: the first sentence of its help, which the list of commands shows.
    """

    module: str
    help: str


#: name -> command; in the module there is a function, or a ``typer.Typer``, of the same name
OWN: Final[Mapping[str, Own]] = {
    "pub": Own("messaging.cli.pub", "Publish a message: text, a file, stdin, each line of stdin, or an empty one."),
    "sub": Own(
        "messaging.cli.sub",
        "Write every message that arrives to stdout: its payload as it came and a newline, JSON, or in a format.",
    ),
    "request": Own(
        "messaging.cli.request",
        "Send a request, wait for its reply, and write that to stdout: its payload as it came and a newline, or JSON.",
    ),
    "reply": Own(
        "messaging.cli.reply", "Answer requests with what a command writes to its stdout, whole and as it is."
    ),
    "info": Own(
        "messaging.cli.info", "Show what an instance connected to URL can do; without a URL, what is installed."
    ),
    "context": Own(
        "messaging.cli.context",
        "Save brokers under names: @NAME then stands for the broker's URL and settings in every command.",
    ),
    "bench": Own(
        "messaging.cli.bench",
        "Measure a broker: rates and latencies of publishing, receiving, both at once, or requests.",
    ),
    "demo": Own(
        "messaging.cli.demo", "See it work: a small show on a broker inside this process, or on the one at URL."
    ),
}

#: name of a command in other programs -> the name here
_ALIASES: Final[Mapping[str, str]] = {
    "publish": "pub",
    "send": "pub",
    "produce": "pub",
    "subscribe": "sub",
    "listen": "sub",
    "consume": "sub",
    "req": "request",
    "call": "request",
    "rpc": "request",
    "respond": "reply",
    "serve": "reply",
    "benchmark": "bench",
    "perf": "bench",
    "ctx": "context",
    "contexts": "context",
    "version": "--version",
    "help": "--help",
}


class Commands(TyperGroup):
    """The group of all commands. Own names are never replaced by those of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # the base class's
        """Return the names of all: our own, and behind them those of other packages that load."""
        return [*OWN, *(name for name in found() if name not in OWN and self._loads(name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # the base class's
        """Return the command of that name, or ``None``. Own commands are stubs with name and help, for lists.

        Raises:
            ConfigurationError: it is of another package and does not load.
        """
        if cmd_name in OWN:
            return TyperCommand(cmd_name, help=OWN[cmd_name].help)
        return self._load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ARG002  # the base class's
        """Return name, command and arguments of the command to run.

        Raises:
            ArgumentError: there is no such command; names the nearest one.
            ConfigurationError: it is of another package and does not load.
        """
        name, *rest = args
        command = load_own(name) if name in OWN else self._load(name)
        if command is None:
            raise ArgumentError(_unknown(name))
        return name, command, rest

    def _load(self, name: str) -> Any:
        point = found().get(name)
        if point is None:
            return None
        if name in self.commands:
            return self.commands[name]
        try:
            command = typer.main.get_command(point.load())
        except MessagingError:
            raise
        except Exception as error:  # whatever a foreign module does when it is imported
            raise ConfigurationError(
                f"the command {point.name} = {point.value} does not load: {type(error).__name__}: {error}"
            ) from error
        command.name = name  # whatever its package calls it
        self.add_command(command, name)
        return command

    def _loads(self, name: str) -> bool:
        try:
            self._load(name)
        except MessagingError as error:
            logger.warning("%s", error)
            return False
        return True


def load_own(name: str) -> Any:
    """Import a command of this project."""
    target = getattr(importlib.import_module(OWN[name].module), name)
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(target)
    command = typer.main.get_command(app)
    command.name = name
    return command


def found() -> Mapping[str, EntryPoint]:
    """Return the commands of other packages by name."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)}


def _unknown(name: str) -> str:
    if "://" in name or name.startswith("@"):
        return f"the command comes before the broker: messaging sub {name} -t CHANNEL"
    known = [*OWN, *(each for each in found() if each not in OWN)]
    if name in _ALIASES:
        return f"no command {name!r}; did you mean {_ALIASES[name]!r}?"
    hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
    return f"no command {name!r}; {hint}"
