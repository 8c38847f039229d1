"""Filters and transforms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from messaging.errors import ConfigurationError
from messaging.gateway.pipeline import PipelineError
from messaging.gateway.pipeline import steps as steps_module
from messaging.testing.tables import table
from tests.gateway.pipeline.kit import Source, draft, pipeline, values

HERE = "tests.gateway.pipeline.functions"


def changed(step: dict[str, Any], value: Any, **other: Any) -> Any:
    """Return the value of the only message that comes out."""
    (found,) = values(pipeline(transform=[step]).process(draft(value, **other), 0).ready)
    return found


@table(
    "step, value, expected",
    [
        ({"rename": {"a": "b"}}, {"a": 1, "c": 2}, {"c": 2, "b": 1}),
        ({"rename": {"a": "b", "b": "a"}}, {"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({"rename": {"a.b": "x.y"}}, {"a": {"b": 1, "c": 2}}, {"a": {"c": 2}, "x": {"y": 1}}),
        ({"rename": {"missing": "b"}}, {"a": 1}, {"a": 1}),
        ({"rename": {"l[0]": "x", "l[1]": "y"}}, {"l": [1, 2, 3]}, {"l": [3], "x": 1, "y": 2}),
        ({"rename": {"a": "$"}}, {"a": {"b": 1}}, {"b": 1}),
        ({"select": ["a", "c.d", "e"]}, {"a": 1, "b": 2, "c": {"d": 3, "x": 4}}, {"a": 1, "c": {"d": 3}}),
        ({"select": ["z"]}, {"a": 1}, {}),
        ({"drop": ["a", "c.d", "l[0]", "l[1]", "z"]}, {"a": 1, "c": {"d": 3}, "l": [1, 2, 3]}, {"c": {}, "l": [3]}),
        ({"drop": ["a"]}, [1], [1]),
        ({"set": {"a": 5, "b.c": [1], "n": None}}, {"a": 1}, {"a": 5, "b": {"c": [1]}, "n": None}),
        ({"set": {"site": "s-{x}", "other": "{y}"}}, {}, {"site": "s-1", "other": "{y}"}),
        ({"map": {"t": "a.b", "u.v": "l[1]", "w": "missing?"}}, {"a": {"b": 1}, "l": [1, 2]}, {"t": 1, "u": {"v": 2}}),
        ({"map": {"value": "$"}}, 5, {"value": 5}),
        ({"map": {"$": "a"}}, {"a": [1]}, [1]),
        ({"unit": {"field": "t", "from": "degF", "to": "degC"}}, {"t": 212, "x": 1}, {"t": 100.0, "x": 1}),
        ({"unit": {"field": "$", "from": "kPa", "to": "bar"}}, 100, 1.0),
        ({"unit": {"field": "t?", "from": "degF", "to": "degC"}}, {"x": 1}, {"x": 1}),
        ({"model": f"{HERE}:Reading"}, {"celsius": "21.5"}, {"celsius": 21.5, "unit": "degC"}),
        ({"model": "builtins:int"}, "5", 5),
        ({"call": f"{HERE}:mapping"}, 5, {"found": 5}),
        ({"call": f"{HERE}:model"}, 5, {"celsius": 1.5, "unit": "degC"}),
        ({"call": f"{HERE}:Nested.same"}, 5, 5),
    ],
    ids=str,
)
def test_a_step_changes_the_value(step: dict[str, Any], value: Any, expected: Any) -> None:
    assert changed(step, value) == expected


@table(
    "step, value, reason",
    [
        ({"rename": {"a": "b"}}, [1], "the payload is no JSON object, but an array"),
        ({"rename": {"a": "b.c"}}, {"a": 1, "b": 5}, "the value around 'c' is no object"),
        ({"select": ["a"]}, "text", "but a string"),
        ({"set": {"a": 1}}, None, "but null"),
        ({"set": {"a": 1}}, True, "but a bool"),
        ({"set": {"a": 1}}, 1.5, "but a number"),
        ({"map": {"x": "a.b"}}, {"a": 1}, "the payload has no 'a.b'; write 'a.b?' if it may be missing"),
        ({"unit": {"field": "t", "from": "degF", "to": "degC"}}, {"x": 1}, "'t' is no number"),
        ({"unit": {"field": "t", "from": "degF", "to": "degC"}}, {"t": True}, "'t' is no number"),
        ({"unit": {"field": "t", "from": "degF", "to": "degC"}}, {"t": "5"}, "'t' is no number"),
        ({"unit": {"field": "t", "from": "km", "to": "nm"}}, {"t": 1e308}, "too large to convert"),
        ({"unit": {"field": "t", "from": "km", "to": "nm"}}, {"t": 10**400}, "'t' is no number"),
        ({"model": f"{HERE}:Reading"}, {"celsius": "warm"}, "functions:Reading: celsius: Input should be a valid"),
        ({"model": f"{HERE}:Reading"}, {"celsius": 13}, "functions:Reading: KeyError: 'thirteen'"),
        ({"call": f"{HERE}:fail"}, 5, "functions:fail: LookupError: the cause"),
        ({"call": f"{HERE}:refuse"}, 5, "refused"),
        ({"call": f"{HERE}:wrong"}, 5, "functions:wrong: TypeError"),
        ({"call": f"{HERE}:several"}, 5, "functions:several: TypeError"),
        ({"select": ["a"]}, b"no json", "the payload is not JSON"),
    ],
    ids=str,
)
def test_a_message_that_does_not_fit_fails_with_step_and_reason(step: dict[str, Any], value: Any, reason: str) -> None:
    made = pipeline(transform=[{"call": f"{HERE}:Nested.same"}, step])
    with pytest.raises(PipelineError) as raised:
        made.process(draft(value), 0)
    assert raised.value.step == "transform[1]"
    assert reason in raised.value.reason
    assert str(raised.value) == f"transform[1]: {raised.value.reason}"


def test_the_value_of_a_message_is_not_quoted_by_a_model() -> None:
    with pytest.raises(PipelineError) as raised:
        changed({"model": f"{HERE}:Reading"}, {"celsius": "secret"})
    assert "secret" not in str(raised.value)


def test_steps_are_applied_in_order() -> None:
    made = pipeline(
        transform=[
            {"rename": {"tempF": "t"}},
            {"unit": {"field": "t", "from": "degF", "to": "degC"}},
            {"set": {"site": "{x}"}},
            {"drop": ["raw"]},
        ]
    )
    (found,) = made.process(draft({"tempF": 32, "raw": 1}, x="9"), 0).ready
    assert found.payload == b'{"t":0.0,"site":"9"}'
    assert found.content_type == "application/json"


@table(
    "name, payload, content_type",
    [("text", b"text", "text/plain"), ("raw", b"\x00raw", "own/type"), ("array", b"raw", "own/type")],
)
def test_a_function_may_return_text_and_bytes(name: str, payload: bytes, content_type: str) -> None:
    made = pipeline(transform=[{"call": f"{HERE}:{name}"}])
    (found,) = made.process(draft({}, content_type="own/type"), 0).ready
    assert (found.payload, found.content_type) == (payload, content_type)


def test_a_function_may_drop_a_message_and_make_several() -> None:
    source = Source()
    found = pipeline(transform=[{"call": f"{HERE}:none"}]).process(draft({}, source=source), 0)
    assert (found.ready, found.released) == ([], [source])
    found = pipeline(transform=[{"call": f"{HERE}:several"}]).process(draft([1, 2], source=source), 0)
    assert values(found.ready) == [{"item": 1}, {"item": 2}]
    assert [each.sources[0].payload for each in found.ready] == [source.payload] * 2
    found = pipeline(transform=[{"call": f"{HERE}:several"}]).process(draft([], source=source), 0)
    assert (found.ready, found.released) == ([], [source])


def test_a_new_message_of_a_function_stands_for_the_one_that_it_was_made_of() -> None:
    source = Source()
    found = pipeline(transform=[{"call": f"{HERE}:new"}]).process(draft({}, source=source, message_id="id"), 0)
    (made,) = found.ready
    assert (made.payload, made.sources, made.message_id, found.released) == (b'"new"', (source,), "id", [])


def test_parts_of_a_message_have_ids_of_their_own_that_are_the_same_again() -> None:
    for _ in range(2):
        made = pipeline(transform=[{"call": f"{HERE}:several"}])
        found = made.process(draft([1, 2, 3], message_id="id"), 0).ready
        assert [each.message_id for each in found] == ["id-0", "id-1", "id-2"]
    (single,) = made.process(draft([1], message_id="id"), 0).ready
    assert single.message_id == "id"


def test_the_number_of_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_FAN_OUT", 50)
    monkeypatch.setattr("messaging.gateway.pipeline.pipeline.MAX_FAN_OUT", 50)
    made = pipeline(transform=[{"call": f"{HERE}:several"}])
    assert len(made.process(draft([0] * 50), 0).ready) == 50
    for each in (made, pipeline(transform=[{"call": f"{HERE}:endless"}])):
        with pytest.raises(PipelineError, match="became more than 50 messages"):
            each.process(draft([0] * 51), 0)


# --- filters


@table(
    "where, passes",
    [
        ("(status.battery>=20)", True),
        ("(status.battery>=90)", False),
        ("(tags=b)", True),
        ("(tags=z)", False),
        ("(header.kind=live)", True),
        ("(!(header.kind=*))", False),
        ("(channel=in/1)", True),
        ("(x=1)", True),
        ("(content_type=text/plain)", True),
        ("(missing=*)", False),
        ("(nothing=*)", False),
        ("(&(x=1)(|(tags=a)(status.battery<=1)))", True),
    ],
)
def test_a_filter_sees_fields_headers_channel_and_captures(where: str, passes: bool) -> None:
    value = {"status": {"battery": 50}, "tags": ["a", "b", {"c": 1}], "nothing": None}
    source = Source()
    made = draft(value, headers={"kind": "live"}, content_type="text/plain", source=source)
    found = pipeline(where=where).process(made, 0)
    assert bool(found.ready) is passes
    assert found.released == ([] if passes else [source])


def test_a_filter_lets_payloads_that_are_no_objects_be_judged_by_the_rest() -> None:
    for payload in (b"\xff", b"5", b"[1]"):
        assert pipeline(where="(x=1)").process(draft(payload), 0).ready
        assert not pipeline(where="(a=1)").process(draft(payload), 0).ready


def test_deep_fields_are_left_out() -> None:
    value: Any = {"leaf": 1}
    for _ in range(40):
        value = {"a": value}
    assert "leaf" not in "".join(steps_module.properties(draft(value)))


# --- errors of the configuration, with their place


@table(
    "step, text",
    [
        ({"rename": {"a..b": "c"}}, "routes.r.transform[1].rename: 'a..b' is no path"),
        ({"rename": {"a": "c."}}, "transform[1].rename: 'c.' is no path"),
        ({"select": ["a["]}, "transform[1].select: 'a[' is no path"),
        ({"select": ["l[0]"]}, "transform[1].select: 'l[0]' leads through an array"),
        ({"drop": ["$"]}, "transform[1].drop: '$' is the whole payload"),
        ({"map": {"l[0]": "a"}}, "transform[1].map: 'l[0]' leads through an array"),
        ({"unit": {"field": "t", "from": "degX", "to": "K"}}, "transform[1].unit: unknown unit 'degX'"),
        ({"unit": {"field": "t", "from": "bar", "to": "K"}}, "transform[1].unit: bar is a unit of pressure"),
        ({"model": "no_such_module:X"}, "transform[1].model: 'no_such_module:X': cannot import 'no_such_module'"),
        ({"model": f"{HERE}:Missing"}, "has no 'Missing'"),
        ({"model": f"{HERE}:NUMBER"}, "transform[1].model: 'tests.gateway.pipeline.functions:NUMBER' is no type"),
        ({"call": f"{HERE}:NUMBER"}, "transform[1].call: 'tests.gateway.pipeline.functions:NUMBER' must be callable"),
        ({"call": f"{HERE}:Nested.other"}, "has no 'Nested.other'"),
    ],
    ids=str,
)
def test_a_step_that_cannot_be_made_is_refused_with_its_place(step: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        pipeline(transform=[{"drop": ["a"]}, step])
    assert text in str(raised.value)
    assert str(raised.value).startswith("routes.r.transform[1].")


def test_a_module_that_fails_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipeline_broken.py").write_text("None.nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot import 'pipeline_broken': AttributeError"):
        pipeline(transform=[{"call": "pipeline_broken:f"}])
    assert "pipeline_broken" not in sys.modules


@table(
    "other, text",
    [
        ({"where": "(a=1"}, "routes.r.where: "),
        ({"deadband": {"field": "a..b", "absolute": 1}}, "routes.r.deadband.field: 'a..b' is no path"),
        ({"target": "out/{y}"}, "routes.r.to.channel: there is no capture {y}; there are channel, gateway, x"),
        ({"target": "out/{"}, "routes.r.to.channel: "),
        ({"source": "in/{x}/{x}"}, "routes.r.from.channel: "),
        ({"key": "{y}"}, "routes.r.key: there is no capture {y}"),
    ],
)
def test_a_pipeline_that_cannot_be_made_is_refused_with_its_place(other: dict[str, Any], text: str) -> None:
    source, target = other.pop("source", "in/{x}"), other.pop("target", "out/{x}")
    with pytest.raises(ConfigurationError) as raised:
        pipeline(source, target, **other)
    assert str(raised.value).startswith(text)


def test_a_missing_package_for_compression_is_found_when_the_pipeline_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"routes\.r\.compress: .*rx-messaging\[zstd\]"):
        pipeline(compress="zstd")
