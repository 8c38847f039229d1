"""What becomes columns: those of the message, which every typed read may have, and the plan of those of its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import types as spark

#: what a typed read has of the message itself, in the order in which :meth:`TypedColumns.convert` gets it
MESSAGE_COLUMNS: Final[Mapping[str, spark.DataType]] = {
    "_value": spark.BinaryType(),
    "_channel": spark.StringType(),
    "_key": spark.StringType(),
    "_partition": spark.IntegerType(),
    "_offset": spark.LongType(),
    "_timestamp": spark.TimestampType(),
    "_content_type": spark.StringType(),
    "_correlation_id": spark.StringType(),
    "_reply_to": spark.StringType(),
    "_headers": spark.MapType(spark.StringType(), spark.StringType()),
}
#: what a typed read has as text of a payload that does not fit
CORRUPT: Final = "_corrupt_record"

#: where the columns of the message are in a batch
POSITION: Final = {name: position for position, name in enumerate(MESSAGE_COLUMNS)}
#: no field of a payload has one of these names
RESERVED: Final[Mapping[str, spark.DataType]] = {**MESSAGE_COLUMNS, CORRUPT: spark.StringType()}

#: one message, validated: a mapping, or an instance of a model
Row = Any


class Plan(NamedTuple):
    """A model or a schema, compiled.

    Attributes:
        schema: the fields of the payload.
        model: what a codec is asked for; ``None`` for whatever the content yields.
        read: JSON -> row.
        validate: what a codec made -> row.
        read_exactly: JSON whose numbers have more digits than a double -> row; ``None`` if that makes no difference.
        columns: what the column of each field holds -> what Arrow takes, from some rows.
        empty: stands for a row whose payload does not fit.
    """

    schema: spark.StructType
    model: Any
    read: Callable[[bytes], Row]
    validate: Callable[[Any], Row]
    read_exactly: Callable[[bytes], Row] | None
    columns: Sequence[Callable[[Sequence[Row]], Sequence[Any]]]
    empty: Row
