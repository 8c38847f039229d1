"""Connect a command: choose its broker, name its instance, report losses and returns of the connection on stderr."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from messaging.cli import context_file, options
from messaging.cli.context_file import PREFIX, SavedContext
from messaging.environment import URL_VARIABLE
from messaging.errors import ArgumentError, ConfigurationError, InvalidOptionError

if TYPE_CHECKING:
    from messaging.connection import ConnectionState
    from messaging.instance import Messaging

logger = logging.getLogger(__name__)

#: reports the return of a connection itself when INFO is enabled
_CORE_LOGGER: Final = logging.getLogger("messaging.connection")


@dataclass(frozen=True)
class BrokerOptions:
    """The options that name a broker and its settings."""

    url: options.Url = None
    url_option: options.UrlOption = None
    client_id: options.ClientId = None
    option: options.Settings = None

    @property
    def is_named(self) -> bool:
        """Return whether the command line names a broker, by argument or option."""
        return self.url is not None or self.url_option is not None

    @functools.cached_property
    def target(self) -> SavedContext:
        """The one broker that is given by argument, option or environment variable: a URL or a saved context.

        Raises:
            ArgumentError: two brokers are given, or the name of a saved context without its ``@``.
            ConfigurationError: no broker is given, or the context is not saved.
        """
        if self.url is not None and self.url_option is not None:
            raise ArgumentError("two broker URLs: give one, or --url, not both")
        url = self.url if self.url is not None else self.url_option
        if url is None:
            url = os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"no broker URL: give one, such as mqtt://localhost, or set {URL_VARIABLE}")
        if url.startswith(PREFIX):
            return context_file.get(url.removeprefix(PREFIX))
        if "://" not in url:
            with contextlib.suppress(ConfigurationError):  # the file is malformed
                if url in context_file.load():
                    raise ArgumentError(f"{url!r} is not a broker URL; did you mean the saved context {PREFIX}{url}?")
        return SavedContext(url)

    def connect(self, role: str, *, report_return: bool = True, **defaults: Any) -> Messaging:
        """Connect to the broker.

        Settings of ``--option`` and ``--id`` win over those of a saved context, which win over those in the URL.

        Args:
            role: the name of the command. With the process id it becomes the name of the instance, which tells one
                run from another in logs and in the broker's list of clients.
            report_return: report on stderr when a lost connection is back.
            defaults: settings that apply unless the command line gives them; they win over the URL, too.

        Raises:
            ArgumentError: a setting is given twice.
            MessagingError: as ``messaging.connect``.
        """
        from messaging.instance import connect  # importing them is slow, and help and completion do not need them
        from messaging.model import parse_url

        given: dict[str, Any] = options.settings(self.option, self.client_id)
        for parameter in ("url", "services"):
            if parameter in given:  # parameters of connect(), not settings
                raise InvalidOptionError(parameter, f"unknown option {parameter!r}")
        target = self.target
        settings = {**target.settings, **defaults, **given}
        url = parse_url(target.url)
        if "name" not in settings and "name" not in url.options and "MESSAGING_NAME" not in os.environ:
            prefix = "" if target.name is None else f"{target.name}-"
            settings["name"] = f"{prefix}{role}-{os.getpid()}"
        m = connect(target.url, **settings)
        if report_return and not _CORE_LOGGER.isEnabledFor(logging.INFO):
            m.connection_state.subscribe(_return_reporter(f"{url.scheme} {m.name!r}"))
        return m


def _return_reporter(instance: str) -> Callable[[ConnectionState], None]:
    """Return an observer of connection states that logs when a lost connection of ``instance`` is back, and where."""
    was_up = False
    lost_at: float | None = None

    def on_next(state: ConnectionState) -> None:
        nonlocal was_up, lost_at
        if state.is_up:
            if lost_at is not None:
                seconds = state.since - lost_at
                logger.info("%s (%s): connected again after %.1f s", instance, state.host, seconds)
            was_up, lost_at = True, None
        elif was_up and lost_at is None and state.cause is not None:  # a planned close has no cause
            lost_at = state.since

    return on_next


def identity(m: Messaging) -> str:
    """Return the name of an instance on stderr: the broker URL, and the client id at the broker if there is one."""
    dto = m.runtime.get_runtime_dto()
    return f"{dto.connection_uri} as {dto.connection.client_id or dto.instance_id}"


def warn_of_memory(m: Messaging) -> None:
    """Log a warning if the broker is ``memory://``, which no other process reaches."""
    url = m.runtime.get_runtime_dto().connection_uri
    if url.startswith("memory://"):
        logger.warning("%s is a broker inside this process: no other process reaches it; use mqtt:// or amqp://", url)


def split(broker: BrokerOptions, words: list[str]) -> tuple[BrokerOptions, list[str]]:
    """Return the broker, and the arguments that follow it.

    The first argument is the broker, unless ``--url`` or the environment names it and the argument is no URL.

    Args:
        broker: the options of the broker; its ``url`` is the first argument.
        words: the other arguments.
    """
    first = broker.url
    if first is None or "://" in first or first.startswith(PREFIX):
        return broker, words
    if broker.url_option is None and not os.environ.get(URL_VARIABLE):
        return broker, words  # connecting reports the fault
    return replace(broker, url=None), [first, *words]


def following(broker: BrokerOptions, words: list[str] | None, names: str) -> tuple[BrokerOptions, list[str]]:
    """Return the broker, and the arguments that follow it, one for each of ``names``; see :func:`split`.

    Raises:
        ArgumentError: there are more arguments, or fewer.
    """
    broker, found = split(broker, words or [])
    count = len(names.split())
    if len(found) < count:
        raise ArgumentError(f"arguments are missing: URL {names}")
    if len(found) > count:
        raise ArgumentError(f"one argument more than URL {names}: {found[count]!r}")
    return broker, found
