"""Rows of a DataFrame as messages.

::

    writers        what Spark calls on the driver; checks of columns
    row_publisher  what a task does: rows -> messages -> confirms

Imports options, columns, errors and task connections of :mod:`adapters.spark`; nothing of the readers.
:mod:`adapters.spark.formats` hands the writers to Spark.
"""
