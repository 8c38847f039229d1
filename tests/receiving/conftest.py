"""The fixtures of :mod:`tests.doubles.fixtures`; coroutine tests run on a loop of their own."""

from tests.doubles.core import pytest_pyfunc_call as pytest_pyfunc_call
from tests.doubles.fixtures import *  # noqa: F403
from tests.doubles.timers import long_timers as long_timers
