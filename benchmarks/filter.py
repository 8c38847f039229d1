"""A million evaluations of an LDAP filter with three terms, beside the same condition without it.

One thread, all that match, so that every term is evaluated. ``by hand`` is the floor: the condition as one would write
it in Python, for values whose types are known. ``tree`` walks through the parsed filter anew each time, as an
interpreter does.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from messaging.services import LdapFilter, ServiceProperties

FILTER = "(&(room=bedroom)(celsius>=20)(device=sensor*))"
PROPERTIES: dict[str, Any] = {"room": "bedroom", "celsius": 21, "device": "sensor-7", "unit": "C"}
#: what is looked at, found by another spelling and by one of several elements
UPPER = {key.upper(): value for key, value in PROPERTIES.items()}
SEVERAL = {key: ["none", value] for key, value in PROPERTIES.items()}
#: seconds a million evaluations may take, with values of their own in a dict or in the properties of a service
TARGET = 1.5

Compare = Callable[[Any, Any], bool]
TREE: tuple[tuple[str, Compare, Any], ...] = (
    ("room", operator.eq, "bedroom"),
    ("celsius", operator.ge, 20),
    ("device", str.startswith, "sensor"),
)


def by_hand(properties: Mapping[str, Any]) -> bool:
    """The condition of the filter, for these properties alone."""
    return bool(
        properties["room"] == "bedroom" and properties["celsius"] >= 20 and properties["device"].startswith("sensor")
    )


def tree(properties: Mapping[str, Any]) -> bool:
    """The same, term by term, looking at types."""
    for name, compare, operand in TREE:
        value = properties.get(name)
        if not isinstance(value, type(operand)) or not compare(value, operand):
            return False
    return True


def seconds(matches: Callable[[Mapping[str, Any]], bool], properties: Mapping[str, Any], count: int) -> float:
    """How long ``count`` evaluations take."""
    if not matches(properties):
        raise SystemExit(f"{matches} does not match")
    start = time.perf_counter()
    for _ in range(count):
        matches(properties)
    return time.perf_counter() - start


def run(arguments: argparse.Namespace) -> None:
    """Run and print."""
    count = arguments.messages or (100_000 if arguments.quick else 1_000_000)
    plain, exact = LdapFilter.parse(FILTER), LdapFilter.parse(FILTER, case_sensitive=True)
    contenders: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Mapping[str, Any]]] = {
        "properties of a service": (plain.matches, ServiceProperties(PROPERTIES)),
        "a dict": (plain.matches, PROPERTIES),
        "a dict, case-sensitive": (exact.matches, PROPERTIES),
        "a dict with other spellings": (plain.matches, UPPER),
        "a dict of collections": (plain.matches, SEVERAL),
        "by hand": (by_hand, PROPERTIES),
        "tree": (tree, PROPERTIES),
    }
    measured: dict[str, list[float]] = {}
    for _ in range(arguments.runs):  # in turns, so that all see the same machine
        for name, (matches, properties) in contenders.items():
            measured.setdefault(name, []).append(seconds(matches, properties, count) * 1e6 / count)
    print(f"{FILTER:48} {'s/million':>10} {'min':>8} {'max':>8}")
    for name, times in measured.items():
        print(f"{name:48} {statistics.median(times):10.2f} {min(times):8.2f} {max(times):8.2f}")
    for name in [*measured][:3]:
        median = statistics.median(measured[name])
        print(f"target {'met' if median < TARGET else 'MISSED':7} {name}: {TARGET} s, is {median:.2f} s")
