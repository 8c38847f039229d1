"""The formats ``messaging``, ``mqtt`` and ``amqp``, as Spark registers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from pyspark_messaging.options import ReadOptions, WriteOptions
from pyspark_messaging.read.journaled import JournalBatchReader, JournalStreamReader
from pyspark_messaging.read.rabbitmq_streams import StreamsBatchReader, StreamsReader
from pyspark_messaging.read.rows import schema_of
from pyspark_messaging.write import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MessagingDataSource(DataSource):
    """Format ``messaging``: channels of any broker."""

    _name: ClassVar = "messaging"

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return cls._name

    def schema(self) -> StructType:
        """Return the columns of a read without ``.schema(...)``."""
        # Spark does not say whether this is a batch read: the readers check the options that only one of them needs
        columns: StructType = schema_of(ReadOptions.of(self.options, self.name(), batch=True))
        return columns

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader for ``readStream``."""
        options = ReadOptions.of(self.options, self.name())
        return StreamsReader(options, schema) if options.is_stream else JournalStreamReader(options, schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader for ``read``."""
        options = ReadOptions.of(self.options, self.name(), batch=True)
        return StreamsBatchReader(options, schema) if options.is_stream else JournalBatchReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer for ``write``."""
        return BatchWriter(WriteOptions.of(self.options, self.name()), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return a writer for ``writeStream``."""
        return StreamWriter(WriteOptions.of(self.options, self.name()), schema, overwrite=overwrite)


class MqttDataSource(MessagingDataSource):
    """Format ``mqtt``: accepts URLs of MQTT brokers only."""

    _name = "mqtt"


class AmqpDataSource(MessagingDataSource):
    """Format ``amqp``: accepts URLs of AMQP brokers only."""

    _name = "amqp"


#: all formats
FORMATS: Final = (MessagingDataSource, MqttDataSource, AmqpDataSource)
