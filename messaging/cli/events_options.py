"""Options that the commands of ``messaging events`` share, and the order of their arguments."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from messaging.cli.context_file import PREFIX as SAVED
from messaging.model.settings import URL_VARIABLE

if TYPE_CHECKING:
    from messaging.cli.connecting import Broker

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


def split(broker: Broker, words: list[str]) -> tuple[Broker, list[str]]:
    """Return the broker, and the arguments that follow it.

    The first argument is the broker, unless ``--url`` or the environment names it and the argument is no URL.

    Args:
        broker: the options of the broker; its ``url`` is the first argument.
        words: the other arguments.
    """
    first = broker.url
    if first is None or "://" in first or first.startswith(SAVED):
        return broker, words
    if broker.url_option is None and not os.environ.get(URL_VARIABLE):
        return broker, words  # connecting reports the fault
    return replace(broker, url=None), [first, *words]
