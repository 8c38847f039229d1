"""Exact text: names from outside may be instances of subclasses of ``str``, which decide themselves what they equal."""

from __future__ import annotations


def exact(text: str) -> str:
    """Return the same characters as a ``str``, so that a name that was checked is the name that is used."""
    return text if type(text) is str else str.__str__(text)
