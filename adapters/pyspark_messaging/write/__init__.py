"""Rows of a DataFrame as messages: the writers of the driver, and what their tasks do."""
