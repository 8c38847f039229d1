"""Tests of an instance as a whole: ``connect``, its services, errors, secrets and what it leaves behind."""
