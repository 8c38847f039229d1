"""Without the packages of the extras: an error that names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts import ROOT


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import messaging.outbox.sql", "pip install 'rx-messaging[sql]'"),
        (
            "from messaging.cli import main; sys.exit(main(['outbox', 'status', '--database', 'sqlite://']))",
            "messaging: error: messaging.outbox.sql needs an optional package: pip install 'rx-messaging[sql]'",
        ),
    ],
)
def test_without_sqlalchemy_the_extra_is_named(code: str, text: str) -> None:
    assert text in run(f"import sys; sys.modules['sqlalchemy'] = None; {code}")


def test_without_psycopg_the_extra_is_named() -> None:
    code = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "psycopg" else found(name, *rest)
from messaging.outbox.sql import Relay
Relay("postgresql://localhost/shop", "memory://x")
"""
    assert "the database driver psycopg needs an optional package: pip install 'rx-messaging[postgresql]'" in run(code)


def test_importing_messaging_imports_no_sqlalchemy() -> None:
    assert run("import sys, messaging; print('sqlalchemy' in sys.modules)") == "False\n"
