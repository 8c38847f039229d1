"""Tests of messaging.observability."""
