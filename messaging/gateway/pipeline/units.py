"""Units of measure, and the conversion between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from messaging.errors import ArgumentError
from messaging.errors.text import did_you_mean

#: unit -> quantity, factor and offset to the base unit of the quantity: base = value * factor + offset
_UNITS: Final[dict[str, tuple[str, float, float]]] = {
    "K": ("temperature", 1.0, 0.0),
    "degC": ("temperature", 1.0, 273.15),
    "degF": ("temperature", 5 / 9, 459.67 * 5 / 9),
    "degR": ("temperature", 5 / 9, 0.0),
}


def _add(quantity: str, **factors: float) -> None:
    for unit, factor in factors.items():
        _UNITS[unit.replace("_per_", "/").replace("percent", "%")] = (quantity, factor, 0.0)


_add("pressure", Pa=1.0, hPa=100.0, kPa=1e3, MPa=1e6, mbar=100.0, bar=1e5, atm=101_325.0, psi=6894.757293168361,
     mmHg=133.322387415, inHg=3386.388640341)  # fmt: skip
_add("length", m=1.0, nm=1e-9, um=1e-6, mm=1e-3, cm=1e-2, km=1e3, inch=0.0254, ft=0.3048, yd=0.9144, mi=1609.344,
     nmi=1852.0)  # fmt: skip
_add("mass", kg=1.0, mg=1e-6, g=1e-3, t=1e3, oz=0.028349523125, lb=0.45359237)
_add("speed", m_per_s=1.0, km_per_h=1 / 3.6, mph=0.44704, kn=1852 / 3600, ft_per_s=0.3048)
_add("volume", m3=1.0, l=1e-3, ml=1e-6, cm3=1e-6, gal=0.003785411784, ft3=0.028316846592)
_add("flow", m3_per_s=1.0, m3_per_h=1 / 3600, l_per_s=1e-3, l_per_min=1e-3 / 60)
_add("energy", J=1.0, kJ=1e3, MJ=1e6, Wh=3600.0, kWh=3.6e6, MWh=3.6e9, cal=4.184, kcal=4184.0, BTU=1055.05585262)
_add("power", W=1.0, mW=1e-3, kW=1e3, MW=1e6, hp=745.6998715822702)
_add("angle", rad=1.0, deg=0.017453292519943295, rev=6.283185307179586)
_add("frequency", Hz=1.0, kHz=1e3, MHz=1e6, GHz=1e9, rpm=1 / 60)
_add("time", s=1.0, ms=1e-3, us=1e-6, ns=1e-9, min=60.0, h=3600.0, d=86_400.0)
_add("data", B=1.0, kB=1e3, MB=1e6, GB=1e9, KiB=2.0**10, MiB=2.0**20, GiB=2.0**30, bit=0.125)
_add("current", A=1.0, mA=1e-3, uA=1e-6, kA=1e3)
_add("voltage", V=1.0, mV=1e-3, kV=1e3)
_add("resistance", Ohm=1.0, kOhm=1e3, MOhm=1e6)
_add("ratio", ratio=1.0, percent=1e-2, ppm=1e-6)

UNITS: Final = frozenset(_UNITS)


def converter(source: str, target: str) -> Callable[[float], float]:
    """Return the function that converts numbers of one unit to another.

    Raises:
        ArgumentError: a unit is not known, or they do not measure the same.
    """
    (quantity, factor, offset), (other, divisor, shift) = _unit(source), _unit(target)
    if quantity != other:
        raise ArgumentError(f"{source} is a unit of {quantity}, {target} is one of {other}: they do not convert")
    if offset == shift == 0.0:
        ratio = factor / divisor
        return lambda value: value * ratio
    return lambda value: (value * factor + offset - shift) / divisor


def _unit(name: str) -> tuple[str, float, float]:
    found = _UNITS.get(name)
    if found is None:
        hint = did_you_mean(name, _UNITS) or f"there are {', '.join(sorted(_UNITS))}"
        raise ArgumentError(f"unknown unit {name!r:.40}; {hint}")
    return found
