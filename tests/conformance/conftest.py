"""The backends of the conformance suite."""

from __future__ import annotations

from messaging.testing.conformance.conftest import backend as backend
from messaging.testing.conformance.conftest import channel as channel
from messaging.testing.conformance.conftest import m as m
from messaging.testing.conformance.conftest import pytest_generate_tests as pytest_generate_tests
from messaging.testing.conformance.conftest import pytest_runtest_makereport as pytest_runtest_makereport
