"""Property tests with more examples: ``HYPOTHESIS_PROFILE=thorough``, which ``make test-slow`` sets."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

#: how many times the examples of ``make test`` there are
FACTOR: Final = 5
#: seconds that a property may take with so many
_TIMEOUT: Final = 600


def load_profile() -> None:
    """Load the profile that the environment names: ``suite`` or ``thorough``."""
    # How long an example takes depends on what else the machine does, so it decides nothing here.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    suite = settings.get_profile("suite")
    settings.register_profile("thorough", suite, max_examples=suite.max_examples * FACTOR)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def mark(items: list[pytest.Item]) -> None:
    """With the profile ``thorough``, mark property tests ``slow``, and multiply the examples that they ask for."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
        return
    done: set[int] = set()
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(_TIMEOUT))
            _multiply(item, done)


def _multiply(item: Any, done: set[int]) -> None:
    if isinstance(getattr(item.cls, "settings", None), settings):  # a state machine
        holder, name = item.cls, "settings"
    else:
        holder, name = getattr(item.obj, "__func__", item.obj), "_hypothesis_internal_use_settings"
    given: settings | None = getattr(holder, name, None)
    if id(holder) in done or given is None or given.max_examples == settings.default.max_examples:
        return  # the profile's number is multiplied already
    done.add(id(holder))
    setattr(holder, name, settings(given, max_examples=given.max_examples * FACTOR))
