"""Tests of ``messaging_adapters.memory``."""
