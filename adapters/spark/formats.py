"""The names of the data source, and how Spark gets to know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from adapters.spark.options import ReadOptions, WriteOptions
from adapters.spark.sink import BatchWriter, StreamWriter
from adapters.spark.source import JournalBatchReader, JournalStreamReader, schema_of
from adapters.spark.streams import StreamsBatchReader, StreamsReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MessagingDataSource(DataSource):
    """Format ``messaging``: channels of any broker."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "messaging"

    def schema(self) -> StructType:
        """The columns of a read that names none."""
        # whether it is a batch read is not known here: what only one of the two needs is checked by the reader
        columns: StructType = schema_of(ReadOptions.of(self.options, self.name(), batch=True))
        return columns

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader for ``readStream``."""
        options = ReadOptions.of(self.options, self.name())
        return StreamsReader(options, schema) if options.is_stream else JournalStreamReader(options, schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader for ``read``."""
        options = ReadOptions.of(self.options, self.name(), batch=True)
        return StreamsBatchReader(options, schema) if options.is_stream else JournalBatchReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer for ``write``."""
        return BatchWriter(WriteOptions.of(self.options, self.name()), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A writer for ``writeStream``."""
        return StreamWriter(WriteOptions.of(self.options, self.name()), schema, overwrite=overwrite)


class MqttDataSource(MessagingDataSource):
    """Format ``mqtt``: the same for MQTT brokers only."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "mqtt"


class AmqpDataSource(MessagingDataSource):
    """Format ``amqp``: the same for RabbitMQ only."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "amqp"


#: every format there is
FORMATS: Final = (MessagingDataSource, MqttDataSource, AmqpDataSource)
