"""Spark reads and writes broker channels: the data source ``messaging`` for PySpark (extra ``spark``).

>>> from adapters.spark import register                        # doctest: +SKIP
>>> register(spark)                                            # doctest: +SKIP
>>> rows = spark.readStream.format("messaging").options(       # doctest: +SKIP
...     url="mqtt://localhost", channel="sensors/#", journalPath="/var/lib/journal").load()

::

    formats     the names of the data source, as Spark knows them
    options     names, types, defaults of all options
    columns     what a row is               typed       columns parsed from the payload
    source      the readers that Spark calls, for channels that cannot be replayed
    ingest      broker -> journal           feeds       how it presents itself to the broker
    journal     whose it is                 log         one partition: segments, offsets, commits
    index       where the frames are        frames      what segments are made of
    folders     local disk, object stores
    streams     RabbitMQ streams, which need no journal
    sink        rows -> messages            connecting  how tasks reach a broker
    errors      what can go wrong

    archive     typed events -> Parquet, and back: recorder, recorded, archived, replay
    telemetry   ``messaging pipeline demo``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from messaging.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Have ``spark`` know the formats ``messaging``, ``mqtt`` and ``amqp``; once for each session.

    Raises:
        MissingExtraError: PySpark or pyarrow is not installed.
        ArgumentError: ``spark`` is no session.
    """
    try:
        from adapters.spark.formats import FORMATS  # not at import: receivers need no Spark
    except ImportError as error:
        raise MissingExtraError("spark", f"the Spark data source ({error.name})") from error
    if not hasattr(spark, "dataSource"):  # sessions of Spark Connect are of another class
        raise ArgumentError(f"a SparkSession is needed, not {type(spark).__name__}")
    for source in FORMATS:
        spark.dataSource.register(source)
