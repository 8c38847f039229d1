"""Masking of secrets in values that a monitor shows: by the names of fields and headers, and by patterns in texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from messaging.codecs.cache import BoundedCache
from messaging.errors import ArgumentError

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
        self._words = tuple(_plain(each) for each in words)
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
            plain = _plain(name)
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


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name).casefold()
