"""The fixtures of :mod:`tests.doubles.fixtures`."""

from tests.doubles.fixtures import *  # noqa: F403
