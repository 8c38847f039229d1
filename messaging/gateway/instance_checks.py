"""Checks of the instances of a gateway: their URLs and settings, files, secrets and client ids."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import SecretStr

from messaging.errors import InvalidOptionError, MessagingError
from messaging.gateway.settings import FOLDER_OPTIONS, PATH_OPTIONS
from messaging.instance import find_adapter
from messaging.model import parse_url
from messaging.model.settings import PASSWORD_SOURCES, is_secret, load_settings
from messaging.properties import announced

if TYPE_CHECKING:
    from collections.abc import Collection

    from messaging.adapter import Adapter
    from messaging.gateway.problems import KeyPath, Problems
    from messaging.gateway.settings import GatewaySettings, InstanceSettings
    from messaging.model import BrokerUrl, Capabilities
    from messaging.model.settings import Settings

#: headers of a WebSocket request that hold credentials
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie"})


class Broker(NamedTuple):
    """What is known of an instance without connecting it."""

    adapter: Adapter
    capabilities: Capabilities
    #: those of the adapter, and of the core
    features: frozenset[str]
    #: equal for instances of one broker
    place: Any


def check_instances(
    settings: GatewaySettings, problems: Problems, from_environment: Collection[KeyPath]
) -> dict[str, Broker]:
    """Record the problems of instances; return what is known of those without errors, by name."""
    checks = _InstanceChecks(settings, problems, from_environment)
    for name, instance in settings.instances.items():
        checks.check(name, instance)
    checks.check_names()
    checks.check_client_ids()
    return checks.brokers


class _InstanceChecks:
    def __init__(self, settings: GatewaySettings, problems: Problems, from_environment: Collection[KeyPath]) -> None:
        self._settings = settings
        self._problems = problems
        self._from_environment = from_environment
        self.brokers: dict[str, Broker] = {}

    def check(self, name: str, instance: InstanceSettings) -> None:
        path, problems = ("instances", name), self._problems
        if instance.password_file is not None and instance.credential is not None:
            problems.error((*path, "credential"), "password_file and credential exclude each other: give one of them")
            return
        extra = dict(instance.model_extra or {})
        refusals = [*instance.refusals()]
        for key, text in refusals:
            problems.error((*path, key), text)
        if refusals:
            return
        # a credential is a file that systemd makes for the run
        source, file = ("password_file", instance.password_file) if instance.credential is None else (
            "credential", Path(instance.credential)
        )  # fmt: skip
        given = instance.model_copy(update={"password_file": file, "credential": None})
        try:
            url = parse_url(instance.url)
            adapter = unconnected(instance.url, given.keywords(f"{self._settings.name}-{name}"))
        except InvalidOptionError as error:
            key = error.option if error.option in extra else "url"
            if error.option in PASSWORD_SOURCES and key == "url" and file is not None:
                key = source
            problems.error((*path, key), str(error).replace("'password_file'", repr(source)))
            return
        except MessagingError as error:
            problems.error((*path, "url"), str(error))
            return
        self._check_paths(path, instance, adapter.settings)
        self._check_secrets(path, extra, url, type(adapter.settings))
        place = (url.scheme.rstrip("s"), tuple(host.key() for host in url.hosts), url.path)
        self.brokers[name] = Broker(adapter, adapter.capabilities, announced(adapter), place)

    def _check_paths(self, path: KeyPath, instance: InstanceSettings, settings: object) -> None:
        """Record files that are missing, and folders that are missing or cannot be made."""
        for option in PATH_OPTIONS:
            value = getattr(settings, option, None)
            key = option if option in instance.model_fields_set else "url"
            if value is None or (option == "password_file" and instance.credential is not None):
                continue
            if option in FOLDER_OPTIONS:
                check_folder(self._problems, (*path, key), value)
            else:
                is_folder = option == "capath"
                # first the access: asking for the kind raises where a name is too long
                is_readable = os.access(value, os.R_OK | (os.X_OK if is_folder else 0))
                if not (is_readable and (value.is_dir() if is_folder else value.is_file())):
                    what = "folder" if is_folder else "file"
                    self._problems.error((*path, key), f"{option}: cannot read the {what} {value!s:.200}")

    def _check_secrets(self, path: KeyPath, extra: Mapping[str, Any], url: BrokerUrl, kind: type[Settings]) -> None:
        """Warn of secrets that the file itself holds."""
        found = [] if url.password is None else [("url", "password")]
        found += [("url", option) for option, value in url.options.items() if _is_plain_secret(kind, option, value)]
        found += [(option, option) for option, value in extra.items() if _is_plain_secret(kind, option, value)]
        for key, option in found:
            place = (*path, key)
            if any(each[: len(place)] == place for each in self._from_environment):
                continue
            what, way_out = "secret", ""
            if option == "password":
                what, way_out = option, "password_file, credential, or "
            self._problems.warning(place, f"the file holds a {what}: use {way_out}${{NAME}} of the environment")
            return

    def check_names(self) -> None:
        seen: dict[str, str] = {}
        for name, broker in self.brokers.items():
            given = broker.adapter.settings.name or ""
            if given in seen:
                key = "name" if "name" in self._settings.instances[name].model_fields_set else "url"
                self._problems.error(
                    ("instances", name, key),
                    f"the instances '{seen[given]}' and '{name}' have the same name; give each its own",
                )
            seen.setdefault(given, name)

    def check_client_ids(self) -> None:
        """Record client ids that are there twice. With ``keep_session`` the name is one, unless another is given."""
        seen: dict[Any, str] = {}
        # first those that are their names: the problem is reported where a client id is given
        for name, broker in sorted(self.brokers.items(), key=lambda item: not _is_named_client(item[1])):
            client_id = broker.adapter.settings.client_id
            if not client_id:
                continue
            key = (broker.place, client_id)
            first = seen.setdefault(key, name)
            if first != name and not _is_named_client(broker):  # equal names are a problem of their own
                is_extra = "client_id" in self._settings.instances[name].model_fields_set
                self._problems.error(
                    ("instances", name, "client_id" if is_extra else "url"),
                    f"the instances '{first}' and '{name}' have the same client_id at one broker, which "
                    "disconnects one for the other; give each its own, or leave it out",
                )


def _is_named_client(broker: Broker) -> bool:
    return broker.adapter.settings.client_id == broker.adapter.settings.name


def unconnected(url: str, keywords: Mapping[str, Any]) -> Adapter:
    """Return the adapter of an instance that is not made: it tells what the instance can do.

    Raises:
        InvalidUrlError, UnknownSchemeError, InvalidOptionError, MissingExtraError: as they say.
    """
    parsed = parse_url(url)
    kind = find_adapter(parsed.scheme)
    settings = load_settings(kind.settings_type, parsed, keywords)
    return kind(parsed, settings, settings.name or parsed.scheme)


def check_folder(problems: Problems, path: KeyPath, folder: Path) -> None:
    """Record that a folder is none, or cannot be made or written to."""
    at = folder
    try:
        while not at.exists() and at != at.parent:
            at = at.parent
    except OSError as error:  # a name that is too long, say
        problems.error(path, f"the folder cannot be made: {error.strerror}")
        return
    if not at.is_dir():
        problems.error(path, f"{at} is no folder")
    elif not os.access(at, os.W_OK | os.X_OK):
        problems.error(path, f"cannot write to the folder {at}; choose another one, or change its owner")


def _is_plain_secret(kind: type[Settings], option: str, value: object) -> bool:
    """Return whether an option holds a secret as text. A proxy may have no password, and headers no credentials."""
    if option == "ws_headers":
        return isinstance(value, Mapping) and not _SECRET_HEADERS.isdisjoint(str(each).lower() for each in value)
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return isinstance(text, str) and is_secret(kind, option) and (option != "proxy" or "@" in text)
