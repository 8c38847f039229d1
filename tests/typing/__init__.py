"""Type checking as a user's editor does it."""
