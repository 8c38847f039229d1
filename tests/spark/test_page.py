"""The page about Spark matches the code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from adapters.spark import errors
from adapters.spark.columns import MESSAGE
from adapters.spark.options import ReadOptions, WriteOptions
from messaging import MessagingError

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
OPTIONS = {
    field.metadata["option"][0] for kind in (ReadOptions, WriteOptions) for field in fields(kind) if field.metadata
} | {"url", "passwordFile"}


def test_every_option_is_on_the_page() -> None:
    assert len(OPTIONS) > 20
    assert [name for name in sorted(OPTIONS | {"extension.NAME"}) if f"| `{name}`" not in PAGE] == []


def test_every_option_of_the_page_exists() -> None:
    named = {name for name in re.findall(r"^\| `([a-zA-Z]+)` \|", PAGE, re.MULTILINE) if not name.endswith("Error")}
    assert named - {field.name for field in MESSAGE} - {"availableNow", "once", "continuous"} - OPTIONS == set()


def test_every_column_and_error_is_on_the_page() -> None:
    assert [field.name for field in MESSAGE if f"`{field.name}`" not in PAGE] == []
    own = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, MessagingError) and kind.__module__ == errors.__name__
    ]
    assert [name for name in own if f"`{name}`" not in PAGE and name != "JournalError"] == []
