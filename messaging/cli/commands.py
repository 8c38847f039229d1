"""The commands of the program: its own, and the commands of other packages.

A command is imported when it is run, and imports large parts of this project only then: help and completion must be
fast. Commands of other packages are entry points of the group ``messaging.commands``, each a ``typer.Typer``. A package
that does not load affects only its own command.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from messaging.cli import options
from messaging.errors import ArgumentError, ConfigurationError, MessagingError
from messaging.errors.text import did_you_mean

logger = logging.getLogger(__name__)

#: a short option before its long form, in a help text
_SHORT: Final = re.compile(r"^(  -\w), --", re.MULTILINE)
ENTRY_POINT_GROUP: Final = "messaging.commands"


#: the commands of this project: name -> the first sentence of its help. The module ``messaging.cli.NAME`` defines a
#: function or a ``typer.Typer`` of the same name; the sentence is repeated here for lists, which import no command
OWN: Final[Mapping[str, str]] = {
    "pub": "Publish a message: text, a file, stdin, each line of stdin, or an empty one.",
    "sub": "Write every message that arrives to stdout: its payload unchanged and a newline, JSON, or in a format.",
    "request": "Send a request, wait for its reply, and write the payload and a newline to stdout, or JSON.",
    "reply": "Answer requests with the stdout of a command, whole and unchanged.",
    "events": "Follow, publish and look up the events of an event network, and read past events.",
    "mailbox": "Store remote events for devices that sleep, and take them out.",
    "leases": "Show the leases that generators, agents, mailboxes and other objects at a broker have granted.",
    "gateway": "Run store-and-forward routes between brokers from one file, and look after them.",
    "queue": "Declare, peek at, purge and delete queues at a broker that has them, such as RabbitMQ.",
    "info": "Show the features and the state of an instance connected to URL; without a URL, the installation.",
    "context": "Save brokers under names: @NAME then stands for the broker's URL and settings in every command.",
    "journal": "Show, read, verify, repair, export, trim and purge a journal of messages on disk.",
    "monitor": "Serve a live page of the processes that publish their snapshots at a broker, until interrupted.",
    "outbox": "Relay a transactional outbox: publish the messages that committed transactions left in a database.",
    "bench": "Measure a broker: rates and latencies of publishing, receiving, both at once, or requests.",
    "demo": "Take a short tour of the toolkit, on a broker inside this process or on the one at URL.",
}

#: name of a command in other programs -> its name here
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
    "event": "events",
    "mailboxes": "mailbox",
    "lease": "leases",
    "queues": "queue",
    "ctx": "context",
    "contexts": "context",
    "version": "--version",
    "help": "--help",
}


class Commands(TyperGroup):
    """The group of all commands. A command of another package never replaces one of this project."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands of this project, then of the commands of other packages that load.

        Shell completion loads none of them: it lists all.
        """
        others = (name for name in found() if name not in OWN)
        return [*OWN, *(name for name in others if ctx.resilient_parsing or self._loads(name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command for lists, or ``None``: a stub with name and help if it is not to be loaded.

        Raises:
            ConfigurationError: a command of another package does not load.
        """
        if cmd_name in OWN or ctx.resilient_parsing:
            return TyperCommand(cmd_name, help=OWN.get(cmd_name))
        return self._load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ARG002  # the base class's
        """Return the name, the command to run, and its arguments.

        Raises:
            ArgumentError: no command has that name; the error names the nearest one.
            ConfigurationError: a command of another package does not load.
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
        except Exception as error:  # a foreign module may raise anything when it is imported
            raise ConfigurationError(
                f"the command {point.name} = {point.value} does not load: {type(error).__name__}: {error}"
            ) from error
        command.name = name  # its package may use another name
        if not command.help:
            command.short_help = f"Of {point.value}."
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
    target = getattr(importlib.import_module(f"messaging.cli.{name}"), name)
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = options.group()
        app.command(name)(target)
    command = typer.main.get_command(app)
    command.name = name
    command.help = command.help or OWN[name]
    _align(command)
    return command


def _align(command: Any) -> None:
    """Have the help of a command, and of those in it, write ``-t  --topic`` instead of ``-t, --topic``."""
    plain = command.get_help
    command.get_help = lambda context: _SHORT.sub(r"\1  --", plain(context))
    for each in getattr(command, "commands", {}).values():
        _align(each)


def found() -> Mapping[str, EntryPoint]:
    """Return the entry points of commands of other packages by name."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)}


def _unknown(name: str) -> str:
    if "://" in name or name.startswith("@"):
        return f"the command comes before the broker: messaging sub {name} -t CHANNEL"
    known = [*OWN, *(each for each in found() if each not in OWN)]
    if name in _ALIASES:
        return f"no command {name!r}; did you mean {_ALIASES[name]!r}?"
    hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
    return f"no command {name!r}; {hint}"
