"""Requests and replies where the broker plays no part: on ``memory://``."""
