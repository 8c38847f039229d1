"""Strategies of hypothesis for values of events, and comparison with types."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from hypothesis import strategies as st


def without_fold(value: Any) -> Any:
    """A time as ISO 8601 has it."""
    return value.replace(fold=0)


simple = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
    st.datetimes().map(without_fold),
    st.datetimes(timezones=st.just(UTC)).map(without_fold),
    st.dates(),
    st.times().map(without_fold),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
)
hashable = st.sets(simple, max_size=3)
keys = st.text(st.characters()) | st.sampled_from(["$map", "$float", "$", "a"])
values = st.recursive(
    simple | hashable | hashable.map(frozenset),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(keys, parts, max_size=3),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """``value`` with the types of its parts: equal values may differ in type."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return type(value), {(type(each), repr(each)) for each in value}
    return type(value), repr(value) if isinstance(value, (float, complex)) else value
