"""Spark reads and writes broker channels: the data source ``messaging`` for PySpark (extra ``spark``).

>>> from pyspark_messaging import register                        # doctest: +SKIP
>>> register(spark)                                            # doctest: +SKIP
>>> rows = spark.readStream.format("messaging").options(       # doctest: +SKIP
...     url="mqtt://localhost", channel="sensors/#", journalPath="/var/lib/journal").load()

::

    formats          the formats ``messaging``, ``mqtt`` and ``amqp``
    read             broker channels as sources       on journal
    write            rows as messages
    journal          received messages on disk, until Spark has processed them
    options          names, types and defaults of all options; option_values: their texts
    columns          the columns of a message
    errors           the error tree

    recorder         events of a typed event bus -> messages; needs no Spark
    archive          recorded events -> Parquet, and back onto a bus      on recorder and the data source
    telemetry        the example pipeline of ``messaging pipeline demo``  on the data source

Imports point downwards: ``archive``, ``telemetry`` -> ``formats`` -> ``read``, ``write`` -> ``journal`` -> the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the formats ``messaging``, ``mqtt`` and ``amqp`` with a session.

    Raises:
        MissingExtraError: PySpark or pyarrow is not installed.
        ArgumentError: ``spark`` is no session.
    """
    try:
        from pyspark_messaging.formats import FORMATS  # not at import: recorders need no Spark
    except ImportError as error:
        raise MissingExtraError("spark", f"the Spark data source ({error.name})") from error
    if not hasattr(spark, "dataSource"):  # sessions of Spark Connect are of another class
        raise ArgumentError(f"a SparkSession is needed, not {type(spark).__name__}")
    for source in FORMATS:
        spark.dataSource.register(source)
