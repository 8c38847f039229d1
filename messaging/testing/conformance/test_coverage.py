"""No announced feature without a test, no test of a feature that does not exist."""

from __future__ import annotations

import importlib
import pkgutil

from messaging import Features
from messaging.testing import conformance
from messaging.testing.conformance.backends import Backend

KNOWN = {value for name, value in vars(Features).items() if name.isupper()}


def claims() -> dict[str, list[str]]:
    """Feature -> the tests of this suite that claim to fail without it."""
    found: dict[str, list[str]] = {}
    for module_info in pkgutil.iter_modules(conformance.__path__):
        if module_info.name.startswith("test_"):
            module = importlib.import_module(f"{conformance.__name__}.{module_info.name}")
            for name, value in vars(module).items():
                if name.startswith("test_"):
                    for mark in getattr(value, "pytestmark", ()):
                        if mark.name == "feature":
                            for each in mark.args:
                                found.setdefault(each, []).append(name)
    return found


def test_claims_name_features() -> None:
    assert set(claims()) <= KNOWN


def test_every_announced_feature_is_tested(backend: Backend) -> None:
    """Scenario 97 [I]: a listed feature has a test that uses it. Skipping it is a failure: see ``conftest.py``."""
    own = backend.features - KNOWN
    assert backend.features - own <= set(claims()), "announced without a test"
