"""No announced feature without a test, no test of a feature that does not exist."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from messaging import Features
from messaging.testing import conformance
from messaging.testing.conformance import LACKING
from messaging.testing.conformance.backends import Backend

KNOWN = {value for name, value in vars(Features).items() if name.isupper()}


def claims(*, envelope: bool = False) -> dict[str, list[str]]:
    """Feature -> the tests of this suite that claim to fail without it; with ``envelope``, those that run with one."""
    found: dict[str, list[str]] = {}
    for module_info in pkgutil.iter_modules(conformance.__path__):
        if module_info.name.startswith("test_"):
            module = importlib.import_module(f"{conformance.__name__}.{module_info.name}")
            for name, value in vars(module).items():
                if name.startswith("test_"):
                    marks = [*getattr(value, "pytestmark", ()), *getattr(module, "pytestmark", ())]
                    if envelope and not any(mark.name == "envelope" for mark in marks):
                        continue
                    for mark in marks:
                        if mark.name == "feature":
                            for each in mark.args:
                                found.setdefault(each, []).append(name)
    return found


def test_claims_name_features() -> None:
    assert set(claims()) <= KNOWN


@pytest.mark.envelope
def test_every_announced_feature_is_tested(backend: Backend) -> None:
    """Scenario 97 [I]: a listed feature has a test that uses it. Skipping it is a failure: see ``conftest.py``."""
    known = backend.features & KNOWN
    if backend.name in LACKING:
        # announced by some instances and some builders only
        assert KNOWN - known - {"messageContextBuilder", "storeAndForward"} == LACKING[backend.name]
    assert known <= set(claims()), "announced without a test"
    if backend.name == "mqtt311-envelope":
        added = known & LACKING["mqtt311"]
        assert added <= set(claims(envelope=True)), "added by the envelope without a test that runs with it"
