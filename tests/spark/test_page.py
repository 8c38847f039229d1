"""The page about Spark names what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from adapters.spark import errors, options
from adapters.spark.columns import MESSAGE
from messaging import MessagingError

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()


def test_every_option_is_on_the_page() -> None:
    source = inspect.getsource(options)
    known = {*re.findall(r'options\.take\(\s*"(\w+)"', source), "url", "passwordFile", "extension.NAME"}
    assert len(known) > 20
    assert [name for name in sorted(known) if f"| `{name}`" not in PAGE] == []


def test_every_option_of_the_page_is_there() -> None:
    source = inspect.getsource(options)
    named = {name for name in re.findall(r"^\| `([a-zA-Z]+)` \|", PAGE, re.MULTILINE) if not name.endswith("Error")}
    columns = {field.name for field in MESSAGE}
    others = {"availableNow", "once", "continuous"}
    assert [name for name in sorted(named - columns - others) if f'"{name}"' not in source] == []


def test_every_column_and_error_is_on_the_page() -> None:
    assert [field.name for field in MESSAGE if f"`{field.name}`" not in PAGE] == []
    own = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, MessagingError) and kind.__module__ == errors.__name__
    ]
    assert [name for name in own if f"`{name}`" not in PAGE and name != "JournalError"] == []
