from __future__ import annotations

import enum
import random
import re
import time
import uuid
from array import array
from collections import UserList, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import ArgumentError, InvalidFilterError
from messaging.services import LdapFilter, ServiceProperties, Version
from messaging.services.filter import MAX_DEPTH, MAX_LENGTH, MAX_OPERATIONS
from messaging.testing.tables import table


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Number(enum.IntEnum):
    SEVEN = 7


class Colour(enum.StrEnum):
    RED = "crimson"


UID = uuid.UUID("12345678-1234-5678-1234-567812345678")

PROPERTIES: dict[str, Any] = {
    "room": "bedroom", "channel": [34, "101"], "status": "(on\\)*", "max record time": [150, "100"],
    "canrecord": "true(x)", "int": 100_000, "big": 2**80, "float": 0.1, "decimal": Decimal("4.123456"),
    "fraction": Fraction(1, 2), "nan": float("nan"), "nans": Decimal("sNaN"), "true": True, "off": [False],
    "weird": {"a": 1}, "bytes": b"bedroom", "range": range(3), "none": None, "nones": [None], "nothing": [],
    "level": Level.LOW, "number": Number.SEVEN, "colour": Colour.RED,
    "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "naive": datetime(2026, 1, 2),
    "mixed": [datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC)], "day": date(2026, 1, 2), "uuid": UID,
    "nested": [["a"]], "set": {"a", "b"}, "frozen": frozenset({"x"}), "deque": deque(["d"]),
    "userlist": UserList(["u"]), "array": array("i", [7, 8]), "keys": {"k": "v"}.keys(),
    "values": {"k": "v"}.values(), "empty": "", "space": " ", "Mixed Case": "Mixed Value", "*": "foo", "!  ab": "b",
    "|   ab": "b", "&    ab": "b", "!": "c", "|": "c", "&": "c",
}  # fmt: skip


@table(
    "text",
    [
        "(room=*)", "(room=bedroom)", "(room~= B E D R O O M )", " ( room >=aaaa)", "  ( room =b*) ",
        "  ( room =*m) ", "(room=bed*room)", "  ( room =*b*oo*m*) ", "(room=bedroom*)", "(room=*bedroom)",
        "(room=**)", "(room=b**m)", "  (& (room =bedroom) (channel ~= 34))", "(| (room =bed*)(channel=222)) ",
        "(| (room =boom*)(channel=101)) ", "  (! (room =ab*b*oo*m*) ) ", r"  (status =\(o*\\\)\*) ",
        r"  (canRecord =true\(x\)) ", "(max Record Time <=140) ", "(int<=100001)", "(int>= 100000 )",
        "(int=100000.0)", "(int=1e5)", "(int=+100000)", "(int<=Infinity)", f"(big={2**80})", f"(big>={2**80 - 1})",
        "(float=0.1)", "(float=.1)", "(float>=-1e400)", "(decimal=4.123456)", "(decimal<=4.2)", "(fraction=0.5)",
        "(nan=*)", "(!(nan=nan))", "(true=TRUE)", "(true= true )", "(true~=true)", "(off=false)", "(weird=*)",
        "(bytes=*)", "(nothing=*)", "(nones=*)", "(level=LOW)", "(level~=low)", "(level=L*W)", "(number=7)",
        "(number>=6.5)", "(colour=crim*)", "(when=2026-01-02T03:04:05+00:00)",
        "(when<=2026-01-02T04:04:05.5+00:30)", "(naive>=2026-01-01)", "(mixed>=2026-01-02T00:00:00+00:00)",
        "(day<=2026-01-02)", "(uuid=12345678123456781234567812345678)", f"(uuid={UID})", "(set=a)", "(frozen=x)",
        "(deque=d)", "(userlist=u*)", "(array>=7.5)", "(keys=k)", "(values=v)", "(empty=)", "(empty=*)",
        "(space= )", "(mixed case=Mixed Value)", "(MIXED CASE=Mixed*)", "(*=foo)", "(!  ab=b)", "(|   ab=b)",
        "(&    ab=b)", "(&=c)", "(!=c)", "(|=c)", "(!(missing=*))", "(!(none=*))",
        "(& (| (room =d*m) (room =bed*) (room=abc)) (! (channel=999)))",
    ],
)  # fmt: skip
def test_matches(text: str) -> None:
    wanted = LdapFilter.parse(text)

    assert wanted.matches(PROPERTIES)
    assert wanted.matches(ServiceProperties(PROPERTIES))
    assert LdapFilter.parse(str(wanted)).matches(PROPERTIES)


@table(
    "text",
    [
        "(room=abc)", "(room=Bedroom)", "(room =bedroom )", "(room= bedroom)", "(room <=aaaa)", "(room=bedro*oom)",
        "(room=b*b*  *m*) ", "(room=*droom*room)", "(int=100*)", "(int=)", "(int=b)", "(int=1_00000)",
        "(int=0x186a0)", "(int=\uff11\uff10\uff10\uff10\uff10\uff10)", "(int>=nan)", "(float=1*)", "(float=NaN)",
        "(nan=NaN)", "(nan<=5)", "(nans<=5)", "(decimal=4*)", f"(int={'1' * 5000})", "(true=t*ue)", "(true=1)",
        "(true=yes)", "(true>=false)", "(off=no)", "(off=0)", "(off=)", "(weird=a)", "(weird=1)",
        "(bytes=bedroom)", "(bytes=98)", "(range=1)", "(none=*)", "(none=None)", "(nones=None)", "(nothing=)",
        "(level=1)", "(number=SEVEN)", "(when=2026-01-02)", "(when<=2026-01-02)", "(when=*2026*)", "(when=soon)",
        "(day=soon)", "(nested=a)", "(nested=\\[*)", "(set=c)", "(array=9)", "(keys=v)", "(values=k)", "(empty=a)",
        "(empty>=a)", "(missing=*)", "(missing=)", "(missing~=a)", "(!ab=*)", "(|ab=*)", "(&ab=*)", "(!(room=*))",
        "  (&  (room =b*)  (room =*x) (channel=34))",
    ],
)  # fmt: skip
def test_does_not_match(text: str) -> None:
    wanted = LdapFilter.parse(text)

    assert not wanted.matches(PROPERTIES)
    assert not wanted.matches(ServiceProperties(PROPERTIES))
    assert not LdapFilter.parse(str(wanted)).matches(PROPERTIES)


@table(
    "text, position, says",
    [
        ("", 0, "expected '('"),
        ("   ", 3, "expected '('"),
        ("a=b", 0, "expected '('"),
        ("(", 1, "attribute name"),
        ("()", 1, "attribute name"),
        ("(=foo)", 1, "attribute name"),
        ("((a=b))", 1, "attribute name"),
        ("(&)", 2, "a filter in parentheses after '&'"),
        ("( ! )", 4, "a filter in parentheses after '!'"),
        ("(a)", 2, "expected '=', '~=', '>=' or '<=' after the attribute 'a'"),
        ("(a>5)", 2, "expected '=', '~=', '>=' or '<='"),
        ("(a~ =5)", 2, "expected '=', '~=', '>=' or '<='"),
        ("(a>=)", 4, "expected a value after '>='"),
        ("(a~=)", 4, "expected a value after '~='"),
        ("(a=b", 4, "expected ')'"),
        ("(a=b\\", 5, "a character after the backslash"),
        ("(a=(b)", 3, r"written '\('"),
        ("(a=b))", 5, "the end of the filter"),
        ("(a=b)(c=d)", 5, "the end of the filter"),
        ("(&(a=b)", 7, "another filter or ')'"),
        ("(&(a=b)c)", 7, "another filter or ')'"),
        ("(!(a=b)(c=d))", 7, "expected ')'"),
        ("(& (abc = xyz) (& (345))", 22, "after the attribute '345'"),
        ("  (room = b**oo)*m*) ) ", 16, "the end of the filter"),
    ],
)
def test_the_error_of_an_invalid_filter_names_index_and_expected_text(text: str, position: int, says: str) -> None:
    with pytest.raises(InvalidFilterError) as caught:
        LdapFilter.parse(text)

    message, excerpt, caret = str(caught.value).split("\n")
    assert caught.value.position == position
    assert says in message
    assert f"at index {position}" in message
    assert excerpt == "  " + text
    assert caret == "  " + " " * position + "^"


def test_excerpt_of_a_long_or_unprintable_text_stays_short() -> None:
    with pytest.raises(InvalidFilterError) as caught:
        LdapFilter.parse("(a=" + "\x00" * 1000 + "\n" * 1000)

    assert len(str(caught.value)) < 300
    assert "\x00" not in str(caught.value)
    assert str(caught.value).count("\n") == 2


@table("text", [None, 5, b"(a=b)", ["(a=b)"]])
def test_other_types_than_text_are_refused(text: Any) -> None:
    with pytest.raises(InvalidFilterError, match="must be a str, not"):
        LdapFilter.parse(text)


def test_errors_are_argument_errors() -> None:
    assert issubclass(InvalidFilterError, ArgumentError)


@table(
    "text, normalised",
    [
        (" ( a = bedroom  )", "(a= bedroom  )"),
        ("( & ( a=b ) ( ! ( c d >= 3)))", "(&(a=b )(!(c d>= 3)))"),
        ("(a=*\t)", "(a=*)"),
        ("(a=**)", "(a=**)"),
        (r"(a=*\ )", r"(a=*\ )"),
        ("(a=* x)", "(a=* x)"),
        (r"(a=\x\2a)", "(a=x2a)"),
        ("(a~=*)", r"(a~=\*)"),
        (r"(a=\*\(\)\\)", r"(a=\*\(\)\\)"),
    ],
)
def test_str_is_normalised_and_means_the_same(text: str, normalised: str) -> None:
    assert str(LdapFilter.parse(text)) == normalised
    assert str(LdapFilter.parse(normalised)) == normalised


def test_presence_tolerates_space_but_escaped_space_is_a_value() -> None:
    assert LdapFilter.parse("(a=* )").matches({"a": 5})
    assert not LdapFilter.parse(r"(a=*\ )").matches({"a": "b"})
    assert LdapFilter.parse(r"(a=*\ )").matches({"a": "b "})


def test_equal_filters_are_equal_and_hash_alike() -> None:
    one, other = LdapFilter.parse(" ( a=b)"), LdapFilter.parse("(a=b)")

    assert one == other
    assert len({one, other}) == 1
    assert one != LdapFilter.parse("(a=c)")
    assert one != LdapFilter.parse("(a=b)", case_sensitive=True)
    assert one != "(a=b)"
    assert repr(one) == "LdapFilter('(a=b)')"
    assert repr(LdapFilter.parse("(a=b)", True)) == "LdapFilter('(a=b)', case_sensitive=True)"


def test_a_filter_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        LdapFilter.parse("(a=b)").case_sensitive = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        LdapFilter.parse("(a=b)").anything = True  # type: ignore[attr-defined]


def test_case_sensitive_filters_want_the_exact_name() -> None:
    wanted = LdapFilter.parse("(Topic=a)", case_sensitive=True)

    assert wanted.case_sensitive
    for make in (dict, ServiceProperties):
        assert wanted.matches(make({"Topic": "a"}))
        assert not wanted.matches(make({"topic": "a"}))


def test_case_insensitive_filters_prefer_the_exact_name_then_the_first() -> None:
    assert LdapFilter.parse("(ab=2)").matches({"AB": 1, "ab": 2})
    assert LdapFilter.parse("(Ab=1)").matches({"AB": 1, "ab": 2})
    assert LdapFilter.parse("(Ab=2)").matches({"AB": None, "ab": 2})


class Hostile:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None  # type: ignore[assignment]


class HostileClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("class")


class HostileSequence(Sequence[Any]):
    def __len__(self) -> int:
        raise RuntimeError("len")

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("getitem")


class HostileStr(str):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = str.__hash__

    def startswith(self, *args: Any) -> bool:
        raise RuntimeError("startswith")


@table("value", [Hostile(), HostileSequence(), HostileStr("1"), [Hostile()], object(), type, lambda: 1])
@table("operation", ["a=1", "a~=1", "a>=1", "a<=1", "a=1*", "a=*1*"])
def test_odd_values_do_not_match_and_do_not_raise(value: Any, operation: str) -> None:
    if not (isinstance(value, HostileStr) and operation in ("a~=1", "a>=1", "a<=1")):  # these it does not spoil
        assert not LdapFilter.parse(f"({operation})").matches({"a": value})
        assert LdapFilter.parse(f"(!({operation}))").matches({"a": value})


def test_a_value_with_a_broken_class_does_not_match() -> None:
    value = HostileClass()
    for properties in ({"a": value}, {"a": [value]}):
        assert not LdapFilter.parse("(a=1)").matches(properties)
        assert LdapFilter.parse("(&(a=*)(!(a=1*)))").matches(properties)


def test_one_odd_element_does_not_hide_the_others() -> None:
    assert LdapFilter.parse("(a=1)").matches({"a": [HostileStr("1"), Hostile(), None, 1]})


def test_a_collection_within_itself_is_no_trouble() -> None:
    loop: list[Any] = []
    loop.append(loop)

    assert not LdapFilter.parse("(a=b)").matches({"a": loop})
    assert LdapFilter.parse("(a=*)").matches({"a": loop})


def test_keys_that_are_no_text_and_default_dicts_are_left_alone() -> None:
    properties: dict[Any, Any] = defaultdict(lambda: "b", {5: "x", None: "y", ("a",): "z"})

    assert not LdapFilter.parse("(A=b)").matches(properties)
    assert "A" not in properties


# --- bounds ------------------------------------------------------------------------------------------------


def test_length_is_bounded() -> None:
    longest = "(a=" + "x" * (MAX_LENGTH - 4) + ")"

    assert LdapFilter.parse(longest).matches({"a": "x" * (MAX_LENGTH - 4)})
    with pytest.raises(InvalidFilterError, match="65537 characters is too long; at most 65536"):
        LdapFilter.parse(longest + " ")


@table("operator", ["&", "|", "!"])
def test_depth_is_bounded_and_the_deepest_still_matches(operator: str) -> None:
    deepest = f"({operator}" * MAX_DEPTH + "(a=b)" + ")" * MAX_DEPTH
    wanted = LdapFilter.parse(deepest)

    assert wanted.matches({"a": "b"})
    assert str(wanted) == deepest
    with pytest.raises(InvalidFilterError, match="nested too deep; at most 100 levels"):
        LdapFilter.parse(f"({operator}{deepest})")


def test_the_number_of_operations_is_bounded() -> None:
    most = "(&" + "(a=b)" * MAX_OPERATIONS + ")"

    assert LdapFilter.parse(most).matches({"a": "b"})
    with pytest.raises(InvalidFilterError, match="too many operations; at most 2000"):
        LdapFilter.parse("(&" + "(a=b)" * MAX_OPERATIONS + "(a=b))")


@table("opening", ["(", "(&", "(|", "(!", "( & ", "(a="])
def test_a_hundred_thousand_nested_parentheses_are_an_invalid_filter(opening: str) -> None:
    for depth in (100_000, MAX_LENGTH // 2 // len(opening)):
        with pytest.raises(InvalidFilterError):
            LdapFilter.parse(opening * depth + "(a=b)" + ")" * depth)


@table("unit", ["(", "(&", "(!", "(|(a=b)", "(&(a=b)(!", ")", "*", "\\", " ", "(a=*"])
def test_hostile_text_is_only_ever_an_invalid_filter(unit: str) -> None:
    with pytest.raises(InvalidFilterError):
        LdapFilter.parse((unit * MAX_LENGTH)[:MAX_LENGTH])


def test_substrings_do_not_backtrack() -> None:
    wanted = LdapFilter.parse("(a=" + "*a" * 5000 + "*b)")

    # a backtracking matcher would not come back from this one
    assert not wanted.matches({"a": "a" * 50_000 + "c"})
    assert wanted.matches({"a": "a" * 50_000 + "b"})


# --- properties --------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "Cc", "d e"])
TEXTS = st.text(alphabet="ab1 .*()\\é", max_size=5)
NUMBERS = st.integers(-12, 12) | st.floats(-2, 2, allow_nan=False).map(lambda number: round(number, 1))
VALUES = st.one_of(
    st.none(), st.booleans(), TEXTS, NUMBERS, st.lists(TEXTS | NUMBERS | st.booleans() | st.none(), max_size=3)
)
OPERANDS = TEXTS | NUMBERS.map(str) | st.sampled_from(["true", "FALSE"])

Tree = tuple[Any, ...]

LEAVES = st.one_of(
    st.tuples(st.just("present"), NAMES),
    st.tuples(st.just("="), NAMES, OPERANDS),
    st.tuples(st.sampled_from(["~=", ">=", "<="]), NAMES, OPERANDS.filter(bool)),
    st.tuples(st.just("*"), NAMES, st.lists(TEXTS, min_size=2, max_size=4)),
)
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.tuples(st.just("!"), children),
        st.tuples(st.sampled_from(["&", "|"]), st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


def write(tree: Tree, spaces: random.Random) -> str:
    def space() -> str:
        return spaces.choice(["", "", " ", "\t\n"])

    def escape(text: str) -> str:
        return re.sub(r"([\\*() ])", r"\\\1", text)

    match tree:
        case "present", name:
            body = f"{space()}{name}{space()}=*{space()}"
        case "*", name, pieces:
            body = f"{space()}{name}{space()}={'*'.join(map(escape, pieces))}"
            if not any(pieces):
                body += "*"  # a lone asterisk is presence
        case "!", child:
            body = f"{space()}!{write(child, spaces)}"
        case ("&" | "|") as operator, children:
            body = f"{space()}{operator}{''.join(write(child, spaces) for child in children)}"
        case operator, name, value:
            body = f"{space()}{name}{space()}{operator}{escape(value)}"
    return f"{space()}({body}){space()}"


def evaluate(tree: Tree, properties: dict[str, Any]) -> bool:
    match tree:
        case "present", name:
            return properties.get(name) is not None
        case "!", child:
            return not evaluate(child, properties)
        case "&", children:
            return all(evaluate(child, properties) for child in children)
        case "|", children:
            return any(evaluate(child, properties) for child in children)
    operator, name, operand = tree
    value: Any = properties.get(name)
    return any(compare(operator, item, operand) for item in (value if isinstance(value, list) else [value]))


def compare(operator: str, value: Any, operand: Any) -> bool:
    if operator == "*":
        pattern = ".*".join(map(re.escape, operand))
        return isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None
    if value is None:
        return False
    if isinstance(value, bool):
        return bool(str(value).lower() == operand.strip().lower())
    if isinstance(value, str):
        if operator == "~=":
            return re.sub(r"\s", "", value).casefold() == re.sub(r"\s", "", operand).casefold()
        wanted: Any = operand
    else:
        if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)\s*", operand):
            return False
        value, wanted = Fraction(str(value)), Fraction(operand.strip().removesuffix("."))
    return bool({"=": value == wanted, "~=": value == wanted, ">=": value >= wanted, "<=": value <= wanted}[operator])


@given(TREES, st.dictionaries(NAMES, VALUES), st.randoms(use_true_random=False))
def test_agrees_with_a_naive_evaluator(tree: Tree, properties: dict[str, Any], spaces: random.Random) -> None:
    text = write(tree, spaces)
    wanted = LdapFilter.parse(text)
    expected = evaluate(tree, properties)

    assert wanted.matches(properties) is expected
    assert wanted.matches(ServiceProperties(properties)) is expected
    assert wanted.matches({key.upper(): value for key, value in properties.items()}) is expected
    assert LdapFilter.parse(text, case_sensitive=True).matches(properties) is expected
    again = LdapFilter.parse(str(wanted))
    assert again == wanted
    assert again.matches(properties) is expected


@given(st.text() | st.text(alphabet="()&|!=~<>*\\ab \n", max_size=40))
def test_arbitrary_text_is_a_filter_or_an_invalid_filter(text: str) -> None:
    try:
        wanted = LdapFilter.parse(text)
    except InvalidFilterError as error:
        position = error.position
    else:
        position = 0
        assert LdapFilter.parse(str(wanted)) == wanted
        wanted.matches(PROPERTIES)
    assert 0 <= position <= len(text)


# --- cost --------------------------------------------------------------------------------------------------


def test_it_is_compiled() -> None:
    """100,000 evaluations cost a good deal less than as many walks through the tree. See ``benchmarks/filter.py``."""
    tree: Tree = ("&", [("=", "a", "room"), (">=", "b", "20"), ("*", "Cc", ["on", ""])])
    wanted = LdapFilter.parse(write(tree, random.Random(1)))
    exact = LdapFilter.parse(str(wanted), case_sensitive=True)
    properties = {"a": "room", "b": 21, "Cc": "online", "d e": 1.5}
    service = ServiceProperties(properties)
    assert wanted.matches(properties)
    assert evaluate(tree, properties)

    def seconds(work: Callable[[], object], rounds: int = 1_000) -> float:
        work()
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        return time.perf_counter() - start

    contenders: list[Callable[[], object]] = [
        lambda: wanted.matches(properties),
        lambda: exact.matches(properties),
        lambda: wanted.matches(service),
    ]
    # in turns, so that whatever else the machine does is everybody's; the best of many
    best = [float("inf")] * len(contenders)
    naive = float("inf")
    for _ in range(9):
        for number, contender in enumerate(contenders):
            best[number] = min(best[number], seconds(contender))
        naive = min(naive, seconds(lambda: evaluate(tree, properties)))
    assert max(best) < naive / 5, f"{best}, {naive}"


@table("version, matching, others",
    [
        ("1.0", ["=1", "=1.0", "=1.0.0", ">=1.0.0", "<=1.0.0", "~=1.0.0", ">=0.9", "<=1.0.0.b"], ["=1.1", ">=1.0.1"]),
        ("1.10.2", [">=1.9", "<=1.11", "=1.10.2"], ["<=1.9", "=1.1", ">=2", "=1.x", "=", ">=1.", "=one"]),
        ("1.0.0.beta", [">=1.0", "=1.0.0.beta", "<=1.0.0.gamma"], ["=1.0", "<=1.0"]),
        ("unknown", [], ["=1.0", ">=0", "=unknown"]),
    ],
)  # fmt: skip
def test_versions_compare_as_versions(version: str, matching: list[str], others: list[str]) -> None:
    for value in (Version(version), [Version(version)]):
        for text, matches in ((matching, True), (others, False)):
            assert [
                each for each in text if LdapFilter(f"(version{each})").matches({"version": value}) != matches
            ] == []
    assert LdapFilter("(version=*)").matches({"version": Version(version)})
    assert Version(version) == version
