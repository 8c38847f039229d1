"""The nearest known name to one that is unknown: for errors that ask "did you mean …?"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that ``name`` is most likely meant to be, or ``None``.

    Case, ``-`` and ``_`` do not count: ``time_to_live`` is ``timeToLive``.
    """
    plain = {_plain(each): each for each in known}
    wanted = _plain(name)
    found = difflib.get_close_matches(wanted, plain, n=1) if wanted not in plain else [wanted]
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest name, or an empty text if none is near."""
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found is not None else ""


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
