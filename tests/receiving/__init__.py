"""Tests of ``messaging.receiving``."""
