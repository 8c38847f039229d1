"""Tests of ``messaging.publishing``."""
