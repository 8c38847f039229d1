"""The file of the saved contexts: URL and settings of each broker, by name.

The file is ``messaging/contexts.json`` under ``$XDG_CONFIG_HOME``, by default ``~/.config``. It may hold passwords, so
only its owner may read it. A change takes a lock and replaces the whole file: readers see the old file or the new one,
and no concurrent change is lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from messaging.errors import ConfigurationError
from messaging.errors.text import did_you_mean

logger = logging.getLogger(__name__)

#: marks the name of a context in the place of a broker URL
PREFIX: Final = "@"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION: Final = 1
#: most bytes of the file
_LARGEST: Final = 1_000_000
#: how long to wait for the lock, seconds
_PATIENCE: Final = 10.0


class SavedContext(NamedTuple):
    """A broker under a name.

    Attributes:
        url: without query; it may hold a password.
        settings: settings of ``connect()``; some may be secret.
        name: its name; ``None`` for a broker that is not saved.
    """

    url: str
    settings: Mapping[str, str] = MappingProxyType({})
    name: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL with its password masked."""
        from messaging.model import parse_url  # not at import: help and completion must be fast

        return str(parse_url(self.url))

    @property
    def shown_settings(self) -> dict[str, str]:
        """The settings with secrets masked."""
        from messaging.model import is_secret_option

        return {key: "***" if is_secret_option(key) else value for key, value in sorted(self.settings.items())}


def base_directory(variable: str, default: Path) -> Path:
    """Return a base directory of the user. The XDG specification demands that relative paths are ignored."""
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else default


def path() -> Path:
    """Return the file of the saved contexts; it need not exist."""
    return base_directory("XDG_CONFIG_HOME", Path.home() / ".config") / "messaging" / "contexts.json"


def check_name(name: str) -> None:
    """Refuse a malformed name with a ``ConfigurationError``."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"context name {name!r}: must be 1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
        )


def load() -> dict[str, SavedContext]:
    """Return all saved contexts by name.

    Raises:
        ConfigurationError: the file cannot be read or is malformed.
    """
    file = path()
    try:
        with file.open("rb") as source:
            mode = os.fstat(source.fileno()).st_mode
            data = source.read(_LARGEST + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"saved contexts: cannot read {file}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        logger.warning("saved contexts: other users may read %s, which may hold passwords: chmod 600 %s", file, file)
    if len(data) > _LARGEST:
        raise ConfigurationError(f"saved contexts: {file} is larger than {_LARGEST} bytes; correct or remove it")
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ConfigurationError(f"saved contexts: {file} is not JSON ({where}); correct or remove it") from None
    try:
        return {each.name or "": each for each in _parsed(found)}
    except ValueError as error:
        # the error repeats no values: any of them may be a secret
        raise ConfigurationError(f"saved contexts: {file}: {error}; correct or remove it") from None


def _parsed(found: Any) -> Iterator[SavedContext]:
    """Yield the contexts of the file; a structure that does not fit is a ``ValueError``."""
    if not isinstance(found, dict) or not isinstance(found.get("contexts"), dict):
        raise ValueError("must be an object with an object 'contexts'")
    if found.get("version") != _VERSION:
        raise ValueError(f"'version' must be {_VERSION}; a newer version of this program may have written it")
    for name, each in found["contexts"].items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a name of a context")
        if not isinstance(each, dict) or not isinstance(each.get("url"), str):
            raise ValueError(f"context {name!r} must be an object with a text 'url'")
        settings = each.get("settings", {})
        if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
            raise ValueError(f"'settings' of context {name!r} must be an object of texts")
        yield SavedContext(each["url"], settings, name)


def get(name: str) -> SavedContext:
    """Return one saved context; it is a ``ConfigurationError`` if there is none, or if the file is malformed."""
    known = load()
    check_saved(name, known)
    return known[name]


def check_saved(name: str, known: Mapping[str, SavedContext]) -> None:
    """Refuse a name that is not in ``known`` with a ``ConfigurationError`` that names the nearest one, or all."""
    if name not in known:
        hint = did_you_mean(name, known) or (f"there are {', '.join(sorted(known))}" if known else "none is saved")
        raise ConfigurationError(f"no context {name!r} is saved; {hint}")


def change(function: Callable[[dict[str, SavedContext]], None]) -> Path:
    """Apply ``function`` to the saved contexts and save the result; return the file.

    Raises:
        ConfigurationError: the file is malformed or cannot be written, or another process holds the lock for 10 s.
    """
    from messaging.journal.folders import LocalFolder, lock_file  # not at import: help and completion must be fast

    file = path()
    lock = file.with_suffix(".lock")
    refused = ConfigurationError(f"saved contexts: another process has held {lock} for {_PATIENCE:g} s")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock_file(lock, _PATIENCE, refused):
            known = load()
            function(known)
            contexts = {
                name: {"url": each.url, "settings": dict(each.settings)} for name, each in sorted(known.items())
            }
            text = json.dumps({"version": _VERSION, "contexts": contexts}, indent=2) + "\n"
            target = file.resolve()
            LocalFolder(str(target.parent)).write(target.name, [text.encode()])
    except OSError as error:
        raise ConfigurationError(f"saved contexts: cannot write {file}: {error.strerror}") from error
    return file
