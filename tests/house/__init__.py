"""Measures of the structure of the sources; ``python -m tests.house`` prints them."""

from tests.house.imports import cycles, floors, imported_names
from tests.house.sources import ROOT, Found, House, at, say
from tests.house.timing import clock_uses, patiences, sleeps

__all__ = [
    "ROOT",
    "Found",
    "House",
    "at",
    "clock_uses",
    "cycles",
    "floors",
    "imported_names",
    "patiences",
    "say",
    "sleeps",
]
