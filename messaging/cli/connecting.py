"""Connect a command: choose its broker, name its instance, report losses and returns of the connection on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import messaging
from messaging.cli import contexts
from messaging.cli.contexts import PREFIX
from messaging.cli.options import pairs
from messaging.errors import ArgumentError, ConfigurationError, InvalidOptionError
from messaging.model import Features, parse_url
from messaging.model.settings import URL_VARIABLE

if TYPE_CHECKING:
    from messaging.connection import ConnectionState

logger = logging.getLogger(__name__)

#: says by itself, at this level, when a connection is back
_CORE_LOGGER: Final = logging.getLogger("messaging.connection")
_NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})


class Target(NamedTuple):
    """A broker that a command line names.

    Attributes:
        url: as given or saved; it may hold a password.
        settings: saved with it.
        context: the saved context it comes from, or ``None``.
    """

    url: str
    settings: Mapping[str, str] = _NO_SETTINGS
    context: str | None = None


def choose_target(argument: str | None, option: str | None) -> Target:
    """Return the one broker that was given, by argument, option or environment variable: a URL or a saved context.

    Raises:
        ArgumentError: two were given, or the name of a saved context without its ``@``.
        ConfigurationError: none was given, or no such context is saved.
    """
    if argument is not None and option is not None:
        raise ArgumentError("two broker URLs: give one, or --url, not both")
    url = argument if argument is not None else option
    if url is None:
        url = os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigurationError(f"no broker URL: give one, such as mqtt://localhost, or set {URL_VARIABLE}")
    if url.startswith(PREFIX):
        name = url.removeprefix(PREFIX)
        saved = contexts.get(name)
        return Target(saved.url, saved.settings, name)
    if "://" not in url:
        with contextlib.suppress(ConfigurationError):  # of a bad file
            if url in contexts.load():
                raise ArgumentError(f"{url!r} is not a broker URL; did you mean the saved context {PREFIX}{url}?")
    return Target(url)


def connect(
    target: Target,
    command: str,
    client_id: str | None,
    settings: Iterable[str] | None,
    *,
    tell: bool = True,
    **defaults: Any,
) -> messaging.Messaging:
    """Connect to ``target`` with the settings of the command line.

    Args:
        target: where to.
        command: the name of the command. With the process id it is the name of the instance, so that logs and the
            broker's list of clients tell one run from another.
        client_id: the value of ``--id``.
        settings: the values of ``--option``. They win over those of a saved context, which win over those in the URL.
        tell: whether stderr says when a lost connection is back.
        defaults: settings for which the command line names no value; they win over the URL, too.

    Raises:
        ArgumentError: a setting is given twice.
        MessagingError: as ``messaging.connect``.
    """
    given: dict[str, Any] = pairs(settings, "--option")
    if client_id is not None:
        if "client_id" in given:
            raise ArgumentError("--option client_id is given twice: --id is the same")
        given["client_id"] = client_id
    for parameter in ("url", "services"):
        if parameter in given:  # of connect() itself
            raise InvalidOptionError(parameter, f"unknown option {parameter!r}")
    keywords = {**target.settings, **defaults, **given}
    url = parse_url(target.url)
    if "name" not in keywords and "name" not in url.options and "MESSAGING_NAME" not in os.environ:
        prefix = "" if target.context is None else f"{target.context}-"
        keywords["name"] = f"{prefix}{command}-{os.getpid()}"
    m = messaging.connect(target.url, **keywords)
    if tell and not _CORE_LOGGER.isEnabledFor(logging.INFO):
        m.connection_state.subscribe(_Returns(url.label(m.name)))
    return m


class _Returns:
    """Logs when a connection that was lost is back. An observer of the states of one connection."""

    def __init__(self, label: str) -> None:
        self._label = label
        #: when the connection was lost, seconds since the epoch; ``None`` while it is up
        self._lost_at: float | None = None
        self._was_up = False

    def on_next(self, state: ConnectionState) -> None:
        if state.is_up:
            if self._lost_at is not None:
                logger.info("%s: connected again after %.1f s", self._label, state.since - self._lost_at)
            self._was_up, self._lost_at = True, None
        elif self._was_up and self._lost_at is None and state.cause is not None:  # without a cause it was planned
            self._lost_at = state.since

    def on_error(self, error: Exception) -> None:
        """States have no errors."""

    def on_completed(self) -> None:
        """There are no more."""


def identity(m: messaging.Messaging) -> str:
    """Return how stderr names an instance: the URL of its broker, and the client id there if it has one."""
    dto = m.runtime.get_runtime_dto()
    return f"{dto.connection_uri} as {dto.connection.client_id or dto.instance_id}"


def warn_of_memory(m: messaging.Messaging) -> None:
    """Warn that ``memory://`` reaches no other process."""
    url = m.runtime.get_runtime_dto().connection_uri
    if url.startswith("memory://"):
        logger.warning("%s is a broker inside this process: no other process reaches it; use mqtt:// or amqp://", url)


def context_builder(m: messaging.Messaging, *, manual: bool = False) -> messaging.MessageContextBuilder:
    """Return a builder of contexts; with ``manual``, acknowledging is left to the consumer, where there is any."""
    if manual and Features.ACKNOWLEDGE in m.features:
        return m.acknowledge_context_builder().message_context_builder()
    return m.context_builder()
