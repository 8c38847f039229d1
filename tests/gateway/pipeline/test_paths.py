"""Paths into JSON values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError
from messaging.gateway.pipeline.paths import MISSING, FieldPath, remove_all
from messaging.testing.tables import table

VALUE = {"a": {"b": [1, {"c": 2}], "n": None}, "t": "text", "x y": 3}


@table(
    "text, found",
    [
        ("$", VALUE),
        ("a.b", [1, {"c": 2}]),
        ("a.b[0]", 1),
        ("a.b[1].c", 2),
        ("$.a.b[1].c", 2),
        ("a.n", None),
        ("x y", 3),
        ("a.b[2]", MISSING),
        ("a.c", MISSING),
        ("a.n.x", MISSING),
        ("a[0]", MISSING),
        ("t[0]", MISSING),
        ("t.x", MISSING),
        ("a.b.c", MISSING),
        ("a.c?", MISSING),
        ("a.b?", [1, {"c": 2}]),
    ],
)
def test_what_is_at_a_path(text: str, found: Any) -> None:
    value = FieldPath(text).get(VALUE)
    assert value is found if found is MISSING else value == found


def test_items_of_an_array_that_is_the_payload() -> None:
    for text in ("[1].a", "$[1].a"):
        assert FieldPath(text).get([0, {"a": 5}]) == 5


@table(
    "text", ["", "?", "$.", ".a", "a.", "a..b", "a[", "a[]", "a[x]", "a[-1]", "a]b", "a.[0]", "a[0]b", "[0]x", "a.?"]
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is no path of a field"):
        FieldPath(text)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=10,
)
PATHS = st.lists(st.sampled_from("abc") | st.integers(0, 2), min_size=1, max_size=3).map(
    lambda steps: FieldPath(
        "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    )
)


@given(JSON, PATHS)
def test_what_is_put_is_there_and_the_value_is_not_changed(value: Any, path: FieldPath) -> None:
    before = copy.deepcopy(value)
    try:
        made = path.put(value, "new")
    except ArgumentError:
        assert path.get(value) is MISSING
    else:
        assert path.get(made) == "new"
    assert value == before


@given(JSON, PATHS)
def test_what_is_removed_is_gone_and_the_value_is_not_changed(value: Any, path: FieldPath) -> None:
    before = copy.deepcopy(value)
    made = path.remove(value)
    assert value == before
    if path.get(value) is MISSING:
        assert made == value
    elif not path.has_index:
        assert path.get(made) is MISSING


def test_items_of_one_array_are_removed_by_their_indexes_before() -> None:
    value = {"a": [0, 1, {"x": 2, "y": 3}, 4]}
    paths = [FieldPath(text) for text in ("a[0]", "a[1]", "a[2].x", "b")]
    assert remove_all(value, paths) == {"a": [{"y": 3}, 4]}
    assert len(value["a"]) == 4


def test_objects_on_the_way_are_made() -> None:
    assert FieldPath("a.b.c").put({}, 1) == {"a": {"b": {"c": 1}}}
    assert FieldPath("a.b").put({"a": None}, 1) == {"a": {"b": 1}}
    assert FieldPath("$").put({"a": 1}, 2) == 2
    for wrong in ("t.x", "a[0]", "a.b[2]", "x y.z"):
        with pytest.raises(ArgumentError):
            FieldPath(wrong).put(VALUE, 1)
