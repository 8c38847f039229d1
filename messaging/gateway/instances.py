"""The messaging instances of a gateway: checks of settings, files, secrets and client ids; connecting them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

import messaging
from messaging import Messaging
from messaging.adapter import Adapter
from messaging.connection import ConnectionState
from messaging.connection.properties import announced
from messaging.errors import ConfigurationError, InvalidOptionError, MessagingError
from messaging.gateway.drain import Target
from messaging.gateway.problems import Finding, KeyPath, Problems, error, warning
from messaging.gateway.settings import FOLDER_OPTIONS, PATH_OPTIONS, GatewaySettings, InstanceSettings, StatusSettings
from messaging.gateway.status import last_will
from messaging.instance import find_adapter
from messaging.model import BrokerUrl, Capabilities, parse_url
from messaging.model.settings import PARAMETERS, PASSWORD_SOURCES, Settings, is_secret, load_settings

#: how long closing an instance may take, seconds
_CLOSE_TIMEOUT: Final = 3.0
#: headers of a WebSocket request that hold credentials
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie"})


class UnconnectedInstance(NamedTuple):
    """What is known of an instance without connecting it."""

    adapter: Adapter
    capabilities: Capabilities
    #: those of the adapter, and of the core
    features: frozenset[str]
    #: equal for instances of one broker
    place: Any


def check_instances(
    settings: GatewaySettings, problems: Problems, from_environment: Collection[KeyPath]
) -> dict[str, UnconnectedInstance]:
    """Record the problems of instances; return what is known of those without errors, by name."""
    known: dict[str, UnconnectedInstance] = {}
    for name, given in settings.instances.items():
        path = ("instances", name)
        refused = [*_refused_keys(given)]
        problems.add_all(refused, path)
        if refused:
            continue
        url, adapter, wrong = _made(given, f"{settings.name}-{name}")
        if url is None or adapter is None:
            problems.add_all(wrong, path)
            continue
        problems.add_all(_unusable_paths(given, adapter.settings), path)
        variables = {each[2] for each in from_environment if each[:2] == path and len(each) > 2}
        problems.add_all(_plain_secrets(given, url, type(adapter.settings), variables), path)
        place = (url.scheme.rstrip("s"), tuple(host.key() for host in url.hosts), url.path)
        known[name] = UnconnectedInstance(adapter, adapter.capabilities, announced(adapter), place)
    problems.add_all(_equal_names(settings, known), ("instances",))
    problems.add_all(_equal_client_ids(settings, known), ("instances",))
    return known


def _refused_keys(given: InstanceSettings) -> Iterator[Finding]:
    if given.password_file is not None and given.credential is not None:
        yield error(("credential",), "password_file and credential exclude each other: give one of them")
        return
    for key, text in given.refusals():
        yield error((key,), text)


def _made(given: InstanceSettings, name: str) -> tuple[BrokerUrl | None, Adapter | None, list[Finding]]:
    """Return URL and adapter of an instance, or the problem."""
    # a credential is a file that systemd makes for the run
    source, file = ("password_file", given.password_file) if given.credential is None else (
        "credential", Path(given.credential)
    )  # fmt: skip
    plain = given.model_copy(update={"password_file": file, "credential": None})
    try:
        return parse_url(given.url), unconnected(given.url, plain.keywords(name)), []
    except InvalidOptionError as wrong:
        key = wrong.option if wrong.option in (given.model_extra or {}) else "url"
        if wrong.option in PASSWORD_SOURCES and key == "url" and file is not None:
            key = source
        return None, None, [error((key,), str(wrong).replace("'password_file'", repr(source)))]
    except MessagingError as wrong:
        return None, None, [error(("url",), str(wrong))]


def _unusable_paths(given: InstanceSettings, settings: object) -> Iterator[Finding]:
    """Find files that are missing, and folders that are missing or cannot be made."""
    for option in PATH_OPTIONS:
        value = getattr(settings, option, None)
        key = option if option in given.model_fields_set else "url"
        if value is None or (option == "password_file" and given.credential is not None):
            continue
        if option in FOLDER_OPTIONS:
            yield from unusable_folder(value, key)
        else:
            is_folder = option == "capath"
            # first the access: asking for the kind raises where a name is too long
            is_readable = os.access(value, os.R_OK | (os.X_OK if is_folder else 0))
            if not (is_readable and (value.is_dir() if is_folder else value.is_file())):
                what = "folder" if is_folder else "file"
                yield error((key,), f"{option}: cannot read the {what} {value!s:.200}")


def _plain_secrets(
    given: InstanceSettings, url: BrokerUrl, kind: type[Settings], variables: Collection[str | int]
) -> Iterator[Finding]:
    """Find a secret that the file itself holds: the first one."""
    found = [] if url.password is None else [("url", "password")]
    found += [("url", option) for option, value in url.options.items() if _is_plain_secret(kind, option, value)]
    extra = given.model_extra or {}
    found += [(option, option) for option, value in extra.items() if _is_plain_secret(kind, option, value)]
    for key, option in found:
        if key not in variables:
            what, way_out = ("password", "password_file, credential, or ") if option == "password" else ("secret", "")
            yield warning((key,), f"the file holds a {what}: use {way_out}${{NAME}} of the environment")
            return


def _equal_names(settings: GatewaySettings, known: Mapping[str, UnconnectedInstance]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for name, instance in known.items():
        first = seen.setdefault(instance.adapter.settings.name or "", name)
        if first != name:
            key = "name" if "name" in settings.instances[name].model_fields_set else "url"
            yield error((name, key), f"the instances '{first}' and '{name}' have the same name; give each its own")


def _equal_client_ids(settings: GatewaySettings, known: Mapping[str, UnconnectedInstance]) -> Iterator[Finding]:
    """Find client ids that are there twice. With ``keep_session`` the name is one, unless another is given."""
    seen: dict[Any, str] = {}
    # first those that are their names: the problem is reported where a client id is given
    for name, instance in sorted(known.items(), key=lambda item: not _is_named_client(item[1])):
        client_id = instance.adapter.settings.client_id
        if not client_id:
            continue
        first = seen.setdefault((instance.place, client_id), name)
        if first != name and not _is_named_client(instance):  # equal names are a problem of their own
            is_extra = "client_id" in settings.instances[name].model_fields_set
            yield error(
                (name, "client_id" if is_extra else "url"),
                f"the instances '{first}' and '{name}' have the same client_id at one broker, which "
                "disconnects one for the other; give each its own, or leave it out",
            )


def _is_named_client(instance: UnconnectedInstance) -> bool:
    return instance.adapter.settings.client_id == instance.adapter.settings.name


def unconnected(url: str, keywords: Mapping[str, Any]) -> Adapter:
    """Return the adapter of an instance that is not made: it tells what the instance can do.

    Raises:
        InvalidUrlError, UnknownSchemeError, InvalidOptionError, MissingExtraError: as they say.
    """
    parsed = parse_url(url)
    kind = find_adapter(parsed.scheme)
    settings = load_settings(kind.settings_type, parsed, keywords)
    return kind(parsed, settings, settings.name or parsed.scheme)


def unusable_folder(folder: Path, key: str) -> Iterator[Finding]:
    """Find that a path, the value of ``key``, is not a folder, or that the folder cannot be made or written to."""
    at = folder
    try:
        while not at.exists() and at != at.parent:
            at = at.parent
    except OSError as wrong:  # a name that is too long, say
        yield error((key,), f"the folder cannot be made: {wrong.strerror}")
        return
    if not at.is_dir():
        yield error((key,), f"{at} is no folder")
    elif not os.access(at, os.W_OK | os.X_OK):
        yield error((key,), f"cannot write to the folder {at}; choose another one, or change its owner")


def _is_plain_secret(kind: type[Settings], option: str, value: object) -> bool:
    """Return whether an option holds a secret as text. A proxy may have no password, and headers no credentials."""
    if option == "ws_headers":
        return isinstance(value, Mapping) and not _SECRET_HEADERS.isdisjoint(str(each).lower() for each in value)
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return isinstance(text, str) and is_secret(kind, option) and (option != "proxy" or "@" in text)


class GatewayInstances:
    """The instances of one gateway, by name. Under the lock of the gateway.

    Args:
        gateway: its name.
        arguments: further ones of :func:`messaging.connect`.
        changed: called with the name and the state of an instance when that changes. On a worker thread.

    Attributes:
        by_name: the instances.
        targets: one for each instance.
    """

    def __init__(
        self, gateway: str, arguments: Mapping[str, Any], changed: Callable[[str, ConnectionState], object]
    ) -> None:
        self._gateway = gateway
        self._arguments = arguments
        self._changed = changed
        self.by_name: dict[str, Messaging] = {}
        self.targets: dict[str, Target] = {}

    def prepared(self, name: str, settings: InstanceSettings, status: StatusSettings | None) -> Callable[[], None]:
        """Check the settings of an instance; return what makes it. It is not connected yet then.

        Args:
            name, settings: of the instance.
            status: of the gateway: its end is the last will of the instance that publishes it.

        Raises:
            ConfigurationError: an instance cannot be made of the settings.
        """
        settings.check_password_file()
        for _, text in settings.refusals():
            raise ConfigurationError(f"gateway '{self._gateway}': instances.{name}: {text}")
        arguments = settings.keywords(f"{self._gateway}-{name}") | dict(self._arguments)
        given = {key: value for key, value in arguments.items() if key not in PARAMETERS}
        adapter = unconnected(settings.url, given)
        if status is not None and status.instance == name:
            arguments = {"will": last_will(status, self._gateway, announced(adapter))} | arguments
        return partial(self._connect, name, settings.url, arguments)

    def _connect(self, name: str, url: str, arguments: Mapping[str, Any]) -> None:
        instance = messaging.connect(url, **arguments)
        self.by_name[name] = instance
        self.targets[name] = Target(instance, 1)
        instance.connection_state.subscribe(lambda state: self._changed(name, state))

    def close(self, name: str) -> None:
        """Close an instance, and forget it."""
        if self.targets.pop(name, None) is not None:  # otherwise the last reload could not make it
            self.by_name.pop(name).close(_CLOSE_TIMEOUT)

    def close_all(self) -> None:
        """Close all instances, which are known after that: their reports are asked for."""
        for instance in self.by_name.values():
            instance.close(_CLOSE_TIMEOUT)

    def disconnected(self) -> list[str]:
        """Return the instances that are not connected, each with the cause. From any thread."""
        states = [(name, each.connection_state.value) for name, each in [*self.by_name.items()]]
        return [f"instance '{name}': {state}" for name, state in states if not state.is_up]
