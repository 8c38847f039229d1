"""Units of measure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError
from messaging.gateway.pipeline.units import UNITS, converter
from messaging.testing.tables import table


@table(
    "source, target, value, expected",
    [
        ("degC", "degF", 100.0, 212.0),
        ("degF", "degC", 32.0, 0.0),
        ("degC", "K", -273.15, 0.0),
        ("degF", "K", 0.0, 255.37222),
        ("degR", "K", 9.0, 5.0),
        ("bar", "psi", 1.0, 14.503774),
        ("inHg", "hPa", 29.92, 1013.2075),
        ("atm", "mmHg", 1.0, 760.0),
        ("mi", "km", 1.0, 1.609344),
        ("inch", "mm", 1.0, 25.4),
        ("lb", "kg", 1.0, 0.45359237),
        ("km/h", "m/s", 36.0, 10.0),
        ("kn", "km/h", 1.0, 1.852),
        ("gal", "l", 1.0, 3.785411784),
        ("m3/h", "l/min", 6.0, 100.0),
        ("kWh", "MJ", 1.0, 3.6),
        ("hp", "kW", 1.0, 0.74569987),
        ("rev", "deg", 1.0, 360.0),
        ("rpm", "Hz", 60.0, 1.0),
        ("%", "ratio", 50.0, 0.5),
        ("min", "s", 1.0, 60.0),
        ("KiB", "B", 1.0, 1024.0),
    ],
)
def test_known_values(source: str, target: str, value: float, expected: float) -> None:
    assert converter(source, target)(value) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def pairs() -> list[tuple[str, str]]:
    found = []
    for source, target in itertools.product(sorted(UNITS), repeat=2):
        try:
            converter(source, target)
        except ArgumentError:
            continue
        found.append((source, target))
    return found


@given(st.sampled_from(pairs()), st.floats(-1e6, 1e6))
def test_a_conversion_and_back_is_the_same_number(pair: tuple[str, str], value: float) -> None:
    source, target = pair
    there = converter(source, target)(value)
    assert converter(target, source)(there) == pytest.approx(value, rel=1e-9, abs=1e-6)


def test_every_unit_converts_to_itself_and_to_no_other_quantity() -> None:
    assert all(converter(unit, unit)(1.5) == pytest.approx(1.5) for unit in UNITS)
    with pytest.raises(ArgumentError, match="degC is a unit of temperature, bar is one of pressure"):
        converter("degC", "bar")


@table("name, hint", [("celsius", "there are"), ("degc", "degC"), ("", "there are")])
def test_an_unknown_unit_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ArgumentError, match="unknown unit") as raised:
        converter(name, "K")
    assert hint in str(raised.value)
