"""Names from outside: they may be of a subclass of ``str``, and have characters that cannot be printed."""

from __future__ import annotations


def exact(text: str) -> str:
    """Return the same characters as a ``str``, so that a name that was checked is the name that is used."""
    return text if type(text) is str else str.__str__(text)


def printable(name: str) -> str:
    """Return a name as a line of a log can show it: as it is, or quoted and escaped."""
    return name if name.isprintable() else repr(name)
