"""Reports as plain values of JSON: bounded in depth, number and length, without secrets and unprintable characters.

Secrets are masked by the names of fields and headers, and by patterns in texts.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import islice
from typing import Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.errors import ArgumentError
from messaging.errors.text import exact, visible
from messaging.runtime import ServiceReferenceDTO
from messaging.services.reporting import HistogramDTO, meanings

#: stands for a secret
MASK: Final = "***"

#: a field whose name contains one of these is masked; case, ``-``, ``_``, ``.`` and spaces in a name do not count
SECRET_NAMES: Final = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "authorization", "credential", "cookie",
    "api key", "access key", "private key", "account key", "shared key", "session key",
)  # fmt: skip

#: a field of exactly this name is masked
_EXACT: Final = frozenset(("auth", "pass", "pin", "jwt"))
#: names given by a user, and their length
_MAX_NAMES: Final = 100
_MAX_NAME: Final = 100
#: nesting of values that is followed; deeper ones are masked
_DEPTH: Final = 32
_SEPARATORS: Final = re.compile(r"[-_. ]+")
#: user information of a URL; the text may have been cut before its ``@``
_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"]*@")
_CUT_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"/]*\Z")
#: values of an Authorization header, and JSON web tokens
_CREDENTIALS: Final = re.compile(r"\b(Bearer|Basic|Digest)\s+[\w.~+/=-]{4,}", re.IGNORECASE)
_JWT: Final = re.compile(r"\beyJ[\w-]{5,}\.[\w-]*(?:\.[\w-]*)?")
_VALUE: Final = r"(?:\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|[{\[].*|[^\s,;&}\])\"']+)"

#: integers beyond this are texts: JavaScript would round them
_MAX_INT: Final = 2**53
#: a number of seconds whose name contains one of these is a time since the epoch
_TIMES: Final = ("start_time", "timestamp")
#: characters of a text that is kept as it is shown
_CACHED: Final = 100
#: fields whose roles are told
_MAX_ROLES: Final = 500


class Masking:
    """Masks what looks like a secret. Thread safe; immutable.

    Args:
        names: further names of fields and headers, in addition to :data:`SECRET_NAMES`. A name that contains one of
            them is masked.

    Raises:
        ArgumentError: a name is no text, has no letter or digit, or is too long; or there are too many.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        words = [*SECRET_NAMES, *checked_names(names)]
        self._words = tuple(_bare(each) for each in words)
        self._known: BoundedCache[str, bool] = BoundedCache(4096)
        #: short texts and their limits -> the texts as they are shown: names and states come again in each snapshot
        self.cleaned: BoundedCache[tuple[str, int], str] = BoundedCache(4096)
        loose = "|".join(r"[-_. ]?".join(map(re.escape, _SEPARATORS.split(each))) for each in words)
        self._assigned = re.compile(
            rf"((?:{loose})[\w.-]{{0,40}}[\"']?\s{{0,8}}[:=]\s{{0,8}}){_VALUE}", re.IGNORECASE | re.DOTALL
        )

    def is_secret(self, name: str) -> bool:
        """Return whether the value of a field or header of this name is masked."""
        known = self._known.get(name)
        if known is None:
            plain = _bare(name)
            known = self._known[name] = plain in _EXACT or any(each in plain for each in self._words)
        return known

    def text(self, text: str, *, is_cut: bool = False) -> str:
        """Return ``text`` with masked user information of URLs, credentials, and values that follow a secret name.

        Args:
            text: any text.
            is_cut: the text is the beginning of a longer one: what may be the start of user information is masked.
        """
        if "://" in text:
            text = _USER_INFO.sub(f"{MASK}@", text)
            if is_cut:
                text = _CUT_USER_INFO.sub(MASK, text)
        text = _CREDENTIALS.sub(rf"\1 {MASK}", text)
        text = _JWT.sub(MASK, text)
        return self._assigned.sub(rf"\1{MASK}", text)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return a copy of a value of JSON in which secrets are masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return MASK if depth >= _DEPTH else [self.value(each, depth + 1) for each in value]
        if isinstance(value, Mapping):
            if depth >= _DEPTH:
                return MASK
            return {
                key: MASK if self.is_secret(str(key)) and each is not None else self.value(each, depth + 1)
                for key, each in value.items()
            }
        return value


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of secret fields that a user gave.

    Raises:
        ArgumentError: see :class:`Masking`.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError("the names of secret fields must be a list of texts, such as ['ssn', 'iban']")
    found: list[str] = []
    for each in names:
        if not isinstance(each, str) or not any(map(str.isalnum, each)) or len(each) > _MAX_NAME:
            raise ArgumentError(f"a name of secret fields must be a text of 1 to {_MAX_NAME} letters and digits")
        found.append(each.strip("-_. "))
        if len(found) > _MAX_NAMES:
            raise ArgumentError(f"at most {_MAX_NAMES} names of secret fields can be given")
    return tuple(found)


def _bare(name: str) -> str:
    return _SEPARATORS.sub("", name).casefold()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one report."""

    #: nesting of mappings and sequences
    depth: int = 8
    #: entries of one mapping or sequence
    items: int = 200
    #: characters of a text, and of a name
    text: int = 300
    label: int = 120
    #: values in total
    values: int = 5_000


@dataclass(slots=True)
class Budget:
    """What the reports of one snapshot may take together: the processor time of a snapshot is bounded by it."""

    values: int = 20_000
    #: of texts, before they are cut
    characters: int = 500_000


class Plain:
    """Converts one report to plain values. For one use.

    Args:
        masking: masks secrets.
        bounds: what is left out, and counted.
        budget: of all reports of the snapshot; ``None``: one of its own.

    Attributes:
        omitted: number of values that were left out or cut.
        roles: dotted name of a field -> its role and unit, such as ``gauge bytes``: of the fields that are no counters,
            or have a unit in which numbers are shown: ``bytes``, ``seconds``, or ``since`` for a time since the epoch.
            See :mod:`messaging.services.reporting`.
    """

    def __init__(self, masking: Masking, bounds: Bounds, budget: Budget | None = None) -> None:
        self._masking = masking
        self._bounds = bounds
        self._left = bounds.values
        self._budget = Budget() if budget is None else budget
        self.omitted = 0
        self.roles: dict[str, str] = {}

    def convert(self, value: Any, depth: int = 0, path: str = "") -> Any:
        """Return ``value`` as a plain value. Objects of unknown classes become the names of their classes."""
        if self._left <= 0 or self._budget.values <= 0:
            self.omitted += 1
            return None
        self._left -= 1
        self._budget.values -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.convert(value.value, depth, path)
        if isinstance(value, (int, float)):
            return _number(value)
        if isinstance(value, str):
            return self.text(value, self._bounds.text)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"{len(value)} bytes"
        if isinstance(value, date):
            return value.isoformat()
        if isinstance(value, timedelta):
            return value.total_seconds()
        if depth >= self._bounds.depth:
            self.omitted += 1
            return "…"
        return self._compound(value, depth, path)

    def _compound(self, value: Any, depth: int, path: str) -> Any:
        if isinstance(value, ServiceReferenceDTO):
            return value.id  # its properties are those of the instance, again and again
        if isinstance(value, HistogramDTO):
            mean = value.sum / value.count if value.count else None
            return {"count": value.count, "mean": None if mean is None else _number(mean)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._note_roles(type(value), path)
            fields = ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
            return self._mapping(((name, each) for name, each in fields if not name.startswith("_")), depth, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._mapping(zip(value._fields, value, strict=False), depth, path)
        if isinstance(value, Mapping):
            return self._mapping(value.items(), depth, path)
        if isinstance(value, (list, tuple, AbstractSet)):
            found = [self.convert(each, depth + 1, path) for each in islice(value, self._bounds.items)]
            self.omitted += len(value) - len(found)
            return found
        return self.text(f"<{type(value).__name__}>", self._bounds.label)

    def _mapping(self, items: Iterable[tuple[Any, Any]], depth: int, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if len(found) >= self._bounds.items:
                self.omitted += 1
                continue
            name = key if isinstance(key, str) else str(key) if isinstance(key, int) else type(key).__name__
            is_masked = self._masking.is_secret(name) and isinstance(value, (str, bytes))
            name = self.text(name, self._bounds.label)
            inner = f"{path}.{name}" if path else name
            found[name] = MASK if is_masked else self.convert(value, depth + 1, inner)
        return found

    def _note_roles(self, kind: type, path: str) -> None:
        for each in meanings(kind):
            unit = each.unit if each.unit in ("bytes", "seconds") else ""
            if unit == "seconds" and any(word in each.name for word in _TIMES):
                unit = "since"
            if (each.role in ("gauge", "identity") or unit) and len(self.roles) < _MAX_ROLES:
                name = f"{path}.{each.field}" if path else each.field
                if each.role == "histogram":
                    self.roles[f"{name}.mean"] = f"gauge {unit}".rstrip()
                else:
                    self.roles[name] = f"{each.role} {unit}".rstrip()

    def text(self, text: str, limit: int) -> str:
        """Return ``text`` on one line of at most ``limit`` characters, without secrets and unprintable characters."""
        size = min(len(text), 2 * limit)
        if size > self._budget.characters:
            self.omitted += 1
            return "…"
        self._budget.characters -= size
        return clean(text, limit, self._masking)


def clean(text: str, limit: int, masking: Masking) -> str:
    """Return ``text`` on one line of at most ``limit`` characters, without secrets and unprintable characters."""
    text = exact(text)
    is_kept = len(text) <= _CACHED
    found = masking.cleaned.get((text, limit)) if is_kept else None
    if found is None:
        is_cut = len(text) > 2 * limit
        found = visible(" ".join(masking.text(text[: 2 * limit], is_cut=is_cut).split()))
        if is_cut or len(found) > limit:
            found = f"{found[: limit - 1]}…"
        if is_kept:
            masking.cleaned[text, limit] = found
    return found


def _number(value: float) -> Any:
    if isinstance(value, int):
        if -_MAX_INT <= value <= _MAX_INT:
            return int(value)
        return f"{'-' if value < 0 else ''}2^{value.bit_length()}"
    return float(value) if math.isfinite(value) else str(float(value))
