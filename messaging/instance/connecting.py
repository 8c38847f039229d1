"""``connect(url)``: finds the adapter of a URL, and connects an instance."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any, Final

from messaging.adapter import ENTRY_POINT_GROUP, Adapter
from messaging.environment import URL_VARIABLE
from messaging.errors import ArgumentError, ConfigurationError, MessagingError, UnknownSchemeError
from messaging.errors.text import did_you_mean
from messaging.execution import may_block
from messaging.instance.contexts import Announced
from messaging.instance.messaging import Messaging
from messaging.interception import Interceptor
from messaging.model import concealed, parse_url
from messaging.services import ServiceRegistry, default_registry

#: the distribution of this project
_DISTRIBUTION: Final = "rx-messaging"


def connect(
    url: str | None = None,
    *,
    services: ServiceRegistry | None = None,
    interceptors: Iterable[Interceptor] = (),
    will: Announced | None = None,
    birth: Announced | None = None,
    **settings: Any,
) -> Messaging:
    """Create a messaging instance and connect it.

    On a plain thread this returns when the connection is there. On a thread that runs an event loop it returns at
    once: use ``async with connect(...)`` or ``await connect(...)``. With the setting ``start_offline``, and with
    ``outbox_path`` and ``retry_connect``, it returns at once everywhere: messages wait for the first connection.

    Args:
        url: ``memory://name``, ``mqtt://host``, ``amqp://user:password@host/vhost?option=value`` and so on; without
            it, the environment variable ``MESSAGING_URL``.
        services: the registry the instance's services go to and direct acknowledgement callbacks come from; by
            default the process's one.
        interceptors: see each outgoing message, and wrap the processing of each received one: the first is the
            outermost. Those that are registered in ``services`` now follow, see :mod:`messaging.interception`.
        will: the message that the broker publishes when this instance is lost: a message, a provider, or a mapping
            with ``channel``, ``content`` and the keywords of ``publish``. It goes with the first connection.
        birth: the message that is published after each connection, before anything else; given likewise.
        **settings: settings of the adapter; they win over options in the URL and ``MESSAGING_*`` variables.
            ``credentials`` is a callable or coroutine function that returns :class:`messaging.Credentials`, a pair of
            user name and password, or a password: asked before each connection, and before they expire.

    Raises:
        InvalidUrlError, UnknownSchemeError, InvalidOptionError, MissingExtraError: as they say.
        ArgumentError: ``services`` is no registry, ``interceptors`` are no interceptors, or ``will`` or ``birth`` is
            no message.
        UnsupportedFeatureError: the instance cannot publish ``will`` or ``birth``: AMQP has no last will.
        DuplicateNameError: ``name`` is taken by another instance in ``services``.
        ConnectFailedError: no connection within ``connect_timeout``; ``AuthenticationError`` if the broker refused
            the credentials; ``CredentialsError`` if there are none. Not raised here on a thread that runs an event
            loop, but when the result is awaited.
    """
    settings = concealed(settings)
    if url is None:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"no broker URL: give one to connect(), or set {URL_VARIABLE}")
    try:
        parsed = parse_url(url)
    finally:
        url = None  # a report that shows the variables of this frame must not show the password
    if services is not None and not isinstance(services, ServiceRegistry):
        raise ArgumentError(f"services must be a ServiceRegistry, not {type(services).__name__}")
    kind = find_adapter(parsed.scheme)
    instance: Messaging | None = None
    try:
        registry = services if services is not None else default_registry()
        instance = Messaging(kind, parsed, registry, settings, interceptors, will, birth)
        if may_block() and not instance.starts_offline:
            instance.ready.result()
        return instance
    except BaseException:
        if instance is not None:
            instance.close()
        raise


def find_adapter(scheme: str) -> type[Adapter]:
    """Return the adapter class for ``scheme``, found by its entry point.

    Raises:
        UnknownSchemeError: none does; the error names the installed schemes.
        MissingExtraError: a library the adapter needs is missing.
    """
    found = _own()
    if scheme not in found:  # looking into every installed distribution takes long
        found = {**{point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}, **found}
    point = found.get(scheme)
    if point is None:
        hint = did_you_mean(scheme, found)
        raise UnknownSchemeError(
            f"no adapter for {scheme}:// is installed; installed: {', '.join(sorted(found)) or 'none'}"
            + (f"; {hint}" if hint else "")
        )
    try:
        kind = point.load()
    except MessagingError:
        raise
    except Exception as error:  # whatever a foreign module does when it is imported
        raise ConfigurationError(
            f"the adapter {point.name} = {point.value} does not load: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Adapter)):
        raise ConfigurationError(f"entry point {point.name} = {point.value} is not a messaging.adapter.Adapter")
    return kind


def _own() -> dict[str, EntryPoint]:
    """Return the entry points of this project's adapters, which win over those of others."""
    try:
        points = distribution(_DISTRIBUTION).entry_points
    except PackageNotFoundError:  # the sources are on the path without being installed
        return {}
    return {point.name: point for point in points.select(group=ENTRY_POINT_GROUP)}
