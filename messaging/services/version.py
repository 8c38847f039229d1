"""Versions of capabilities, which LDAP filters compare as OSGi does (core 3.2.5)."""

from __future__ import annotations

import re
from typing import Final

_VERSION: Final = re.compile(r"(\d{1,9})(?:\.(\d{1,9})(?:\.(\d{1,9})(?:\.([A-Za-z0-9_-]+))?)?)?", re.ASCII)

#: major, minor, micro, qualifier
Order = tuple[int, int, int, str]


def order_of(text: str) -> Order | None:
    """Return the sort key of a version such as ``1``, ``1.0`` or ``1.0.0.beta``; ``None`` if ``text`` is no version."""
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        return None
    major, minor, micro, qualifier = found.groups()
    return int(major), int(minor or 0), int(micro or 0), qualifier or ""


class Version(str):
    """A version as the value of a service property: text, which filters compare as a version.

    ``(version=1.0.0)``, ``(version>=1.0.0)`` and ``(!(version>=1.1))`` match ``Version("1.0")``.
    """

    __slots__ = ()

    @property
    def order(self) -> Order | None:
        """Sort key; ``None`` if the text is no version."""
        return order_of(self)
