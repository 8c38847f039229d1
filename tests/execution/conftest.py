"""The fixtures of :mod:`tests.doubles.fixtures`."""

from tests.doubles.core import loop_factory as loop_factory
from tests.doubles.fixtures import *  # noqa: F403
