"""Cases of every adapter that need the sources of this project; see :mod:`messaging.testing.conformance`."""
