"""Importing ``messaging`` is quick: what costs time is imported on first use."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import messaging

#: imports of a plain interpreter and of this package; asyncio alone would bring more
_MODULES = 60
_LATE = {"asyncio", "importlib.metadata", "pydantic", "pydantic_settings", "reactivex"}


def run(code: str) -> object:
    """Run ``code`` in a new interpreter; returns what it prints, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_importing_brings_few_modules_and_none_of_the_large_ones() -> None:
    imported = run(
        "import sys; before = {*sys.modules}; import messaging; after = [*sys.modules];"
        "import json; print(json.dumps([each for each in after if each not in before]))"
    )
    assert isinstance(imported, list)
    assert not _LATE & {*imported}
    assert len(imported) <= _MODULES, sorted(imported)


def test_importing_takes_at_most_150_ms_of_processor_time() -> None:
    """The best of three: another program that runs meanwhile hardly matters."""
    measured = [
        run(
            "import time; began = time.process_time(); import messaging; ours = time.process_time() - began;"
            "import json; print(json.dumps(ours * 1000))"
        )
        for _ in range(3)
    ]
    assert min(measured) <= 150  # type: ignore[type-var, operator]  # they are numbers


def test_every_public_name_is_there_and_listed() -> None:
    for name in messaging.__all__:
        assert getattr(messaging, name).__name__ == name
    assert {*messaging.__all__} <= {*dir(messaging)}
    assert (
        run(
            "import json; namespace = {}; exec('from messaging import *', namespace);"
            "import messaging; print(json.dumps([name for name in messaging.__all__ if name not in namespace]))"
        )
        == []
    )


def test_modules_of_the_package_are_its_attributes() -> None:
    assert run("import json, messaging; print(json.dumps(messaging.replyto.__name__))") == "messaging.replyto"
    assert messaging.codecs is importlib.import_module("messaging.codecs")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'messaging' has no attribute 'conect'"):
        messaging.conect  # type: ignore[attr-defined]  # noqa: B018
