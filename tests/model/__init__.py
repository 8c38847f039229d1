"""Tests of ``messaging.model``."""
