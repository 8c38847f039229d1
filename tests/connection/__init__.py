"""Tests of ``messaging.connection``."""
