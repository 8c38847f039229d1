"""Options that the commands of ``messaging events`` share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from typer import Option

#: the panel of ``--help`` for the options of the network
_PANEL = "Event network"


class Grammar(enum.StrEnum):
    """The grammar of topics and topic filters."""

    #: RFC 214: ``orders/placed``, ``orders/*``, ``orders/**``
    DISTRIBUTED = "distributed"
    #: Typed Event 1.1: ``orders/placed``, ``orders/+``, ``orders/*``
    TYPED = "typed"


@dataclass(frozen=True)
class NetworkOptions:
    """The options that name an event network at a broker."""

    prefix: Annotated[
        str | None,
        Option("--prefix", metavar="CHANNEL", rich_help_panel=_PANEL, help="First levels of its channels: topics."),
    ] = None
    heartbeat: Annotated[
        float | None,
        Option(
            "--heartbeat",
            metavar="SECONDS",
            rich_help_panel=_PANEL,
            help="Others count this process as lost after twice this time without a sign of life; default: 5.",
        ),
    ] = None
    grammar: Annotated[
        Grammar,
        Option(
            "--grammar",
            metavar="distributed|typed",
            rich_help_panel=_PANEL,
            show_default=False,
            help="Grammar of topics: of RFC 214 (the default), or of Typed Event.",
        ),
    ] = Grammar.DISTRIBUTED

    @property
    def everything(self) -> str:
        """Return the topic filter that matches every public topic."""
        return "*" if self.grammar is Grammar.TYPED else "**"
