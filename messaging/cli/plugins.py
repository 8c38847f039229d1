"""Commands of other packages: entry points of the group ``messaging.commands``, each a ``typer.Typer``.

They are looked for when somebody asks for help, or for a command that is none of our own. A command whose package does
not load keeps nothing else from working.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperGroup

from messaging.errors import ConfigurationError, MessagingError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "messaging.commands"


class CommandsOfOthers(TyperGroup):
    """A group of commands that also has those of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all: our own, and behind them those that load."""
        own = list(super().list_commands(ctx))
        return own + [name for name in _found() if name not in own and self._loads(name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or ``None``. Our own names are ours.

        Raises:
            ConfigurationError: it does not load.
        """
        own = super().get_command(ctx, cmd_name)
        return own if own is not None else self._load(cmd_name)

    def _load(self, name: str) -> Any:
        point = _found().get(name)
        if point is None:
            return None
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


def _found() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)}
