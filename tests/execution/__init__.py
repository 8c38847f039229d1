"""Tests of ``messaging.execution``."""
