"""Tables of cases that are one test: every row runs, and every row that fails is reported by its name.

::

    @table("text, expected", {"plain": ("a/b", ["a", "b"]), "empty level": ("a//b", ["a", "", "b"])})
    def test_a_channel_is_split_at_its_slashes(text: str, expected: list[str]) -> None:
        assert split(text) == expected

It takes what ``pytest.mark.parametrize`` takes, and names the rows alike. In place of it, it saves collecting an item
for each row. Use ``pytest.mark.parametrize`` where each row needs a fixture of its own, or takes long.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pytest

from messaging.testing.waiting import Recorder

F = TypeVar("F", bound=Callable[..., Any])

#: values that name themselves
_SIMPLE: Final = (str, int, float, complex, bool, bytes, type(None))


def table(
    names: str | Sequence[str],
    rows: Mapping[str, Any] | Iterable[Any],
    *,
    ids: Iterable[str | None] | Callable[[Any], object] | None = None,
) -> Callable[[F], F]:
    """Decorate a test that runs once for each row, as one item.

    Decorators may be stacked: the rows are then combined. Of the fixtures that a test has, ``tmp_path`` is a folder of
    its own for each row, ``monkeypatch`` is undone after each row, and ``caplog``, ``capsys`` and each ``Recorder``,
    also one that is an attribute of a fixture, begin each row empty. A fixture whose class has a method
    ``for_row(fixtures)`` is replaced by what that returns, for each row. All others are shared by the rows.

    Args:
        names: the parameters that a row gives, as ``"text, expected"``.
        rows: the values of each row; a mapping gives the names of the rows, too. ``pytest.param`` may name a row. Its
            marks are not supported.
        ids: names of the rows, or a function that names a value.

    Raises:
        TypeError: when decorating: there are no rows, or the wrong number of ids, or of values in a row.
        ExceptionGroup: when run: the errors of the rows that failed, each with a note that names its row.
    """
    parameters = [each.strip() for each in names.split(",") if each.strip()] if isinstance(names, str) else [*names]
    found = _rows(parameters, rows, ids)

    def decorate(test: F) -> F:
        if inspect.iscoroutinefunction(test):
            return _decorated(test, parameters, _async_runner(test, found))
        return _decorated(test, parameters, _runner(test, found))

    return decorate


def _decorated(test: F, parameters: Sequence[str], run: Callable[..., Any]) -> F:
    run = functools.wraps(test)(run)
    signature = inspect.signature(test)
    missing = [name for name in parameters if name not in signature.parameters]
    if missing:
        raise TypeError(f"{test.__qualname__} has no parameter {', '.join(missing)}")
    kept = [each for name, each in signature.parameters.items() if name not in parameters]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    del run.__wrapped__  # pytest would look for the parameters of the rows behind it
    for name in [each for each in vars(run) if "hypothesis" in each]:  # each row runs all examples, pytest the rows
        delattr(run, name)
    return run  # type: ignore[return-value]


def _runner(test: Callable[..., Any], rows: Mapping[str, Mapping[str, Any]]) -> Callable[..., None]:
    def run(*args: Any, **fixtures: Any) -> None:
        outcome = _Outcome(test.__qualname__, len(rows))
        for number, (name, values) in enumerate(rows.items()):
            with outcome.of(name), _Fixtures(fixtures, number) as own:
                test(*args, **own, **values)
        outcome.tell()

    return run


def _async_runner(test: Callable[..., Any], rows: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any]:
    async def run(*args: Any, **fixtures: Any) -> None:
        outcome = _Outcome(test.__qualname__, len(rows))
        for number, (name, values) in enumerate(rows.items()):
            with outcome.of(name), _Fixtures(fixtures, number) as own:
                await test(*args, **own, **values)
        outcome.tell()

    return run


class _Outcome:
    """The rows that failed and were skipped, of one run of a table."""

    def __init__(self, test: str, count: int) -> None:
        self._test = test
        self._count = count
        self._name = ""
        self._errors: list[Exception] = []
        self._skipped: list[str] = []

    def of(self, name: str) -> _Outcome:
        """Enter the context of a row, which collects its error."""
        self._name = name
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, pytest.skip.Exception):
            self._skipped.append(f"{self._name}: {error.msg}")
            return True
        is_late = False
        if isinstance(error, pytest.fail.Exception):
            is_late = "from pytest-timeout" in str(error.msg)
            error = AssertionError(error.msg).with_traceback(error.__traceback__)
        if isinstance(error, Exception):
            error.add_note(f"row: {self._name}")
            self._errors.append(error)
            if is_late:  # the limit of the test has passed: nothing would end another row that hangs
                self.tell()
            return True
        return False

    def tell(self) -> None:
        """Raise the errors of the rows that failed; skip a test of which all rows were skipped."""
        if self._errors:
            names = ", ".join(note for each in self._errors for note in each.__notes__[-1:])
            raise ExceptionGroup(
                f"{self._test}: {len(self._errors)} of {self._count} rows failed ({names})", self._errors
            ) from None
        if len(self._skipped) == self._count:
            pytest.skip("; ".join(self._skipped))


class _Fixtures:
    """The fixtures of one row."""

    def __init__(self, shared: Mapping[str, Any], number: int) -> None:
        self._shared = shared
        self._own = dict(shared)
        self._number = number
        self._patches: Any = None

    def __enter__(self) -> dict[str, Any]:
        own = self._own
        for name, value in own.items():
            if hasattr(type(value), "for_row"):
                own[name] = value.for_row(self._shared)
            else:
                _empty_recorders(value)
        if (folder := own.get("tmp_path")) is not None:
            own["tmp_path"] = folder / f"row{self._number}"
            own["tmp_path"].mkdir()
        if (caplog := own.get("caplog")) is not None:
            caplog.clear()
        for name in ("capsys", "capfd"):
            if (captured := own.get(name)) is not None:
                captured.readouterr()
        if (monkeypatch := own.get("monkeypatch")) is not None:
            self._patches = monkeypatch.context()
            own["monkeypatch"] = self._patches.__enter__()
        return own

    def __exit__(self, *error: object) -> None:
        if self._patches is not None:
            self._patches.__exit__(*error)


def _empty_recorders(fixture: object) -> None:
    """Have recorders begin a row empty: a wait for a number of items counts those of its row."""
    for each in (fixture, *getattr(fixture, "__dict__", {}).values()):
        if isinstance(each, Recorder):
            each.clear()


def _rows(
    parameters: Sequence[str],
    rows: Mapping[str, Any] | Iterable[Any],
    ids: Iterable[str | None] | Callable[[Any], object] | None,
) -> dict[str, dict[str, Any]]:
    if isinstance(rows, Mapping):
        rows, ids = rows.values(), [str(name) for name in rows]
    listed = list(rows)
    if not listed:
        raise TypeError("a table without rows tests nothing")
    given = [None] * len(listed) if ids is None or callable(ids) else list(ids)
    if len(given) != len(listed):
        raise TypeError(f"{len(given)} ids for {len(listed)} rows")
    found: dict[str, dict[str, Any]] = {}
    for number, (row, own_name) in enumerate(zip(listed, given, strict=True)):
        values, name = row, own_name
        if type(row).__name__ == "ParameterSet":  # made by pytest.param
            if row.marks:
                raise TypeError(f"row {number}: marks of a row are not supported")
            values, name = row.values, row.id or own_name
        elif len(parameters) == 1:
            values = (row,)
        values = tuple(values)
        if len(values) != len(parameters):
            raise TypeError(f"row {number} has {len(values)} values for {len(parameters)} parameters: {values!r}")
        if name is None:
            name = "-".join(
                _name(value, parameter, number, ids) for parameter, value in zip(parameters, values, strict=True)
            )
        while name in found:
            name += "'"
        found[name] = dict(zip(parameters, values, strict=True))
    return found


def _name(value: Any, parameter: str, number: int, ids: object) -> str:
    if callable(ids) and (named := ids(value)) is not None:
        return str(named)
    if isinstance(value, _SIMPLE):
        return repr(value) if isinstance(value, bytes) else str(value)
    return str(getattr(value, "__name__", f"{parameter}{number}"))
