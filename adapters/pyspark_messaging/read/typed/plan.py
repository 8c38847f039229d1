"""The columns of the message in a typed read, and the compiled plan for the columns of its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import types as spark
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_messaging.columns import MESSAGE

#: the columns of the message, in the order of the batches for :meth:`TypedColumns.convert`
MESSAGE_COLUMNS: Final[Mapping[str, spark.DataType]] = {
    f"_{field.name}": field.dataType for field in from_arrow_schema(MESSAGE).fields
}
#: the column with the text of a payload that does not fit
CORRUPT: Final = "_corrupt_record"

#: the positions of the columns of the message in a batch
POSITION: Final = {name: position for position, name in enumerate(MESSAGE_COLUMNS)}
#: names that fields of a payload must not have
RESERVED: Final[Mapping[str, spark.DataType]] = {**MESSAGE_COLUMNS, CORRUPT: spark.StringType()}

#: one message, validated: a mapping, or an instance of a model
Row = Any


class RowPlan(NamedTuple):
    """A model or a schema, compiled.

    Attributes:
        schema: the fields of the payload.
        model: the type that a codec decodes to; ``None`` for the type that the content has.
        read: JSON -> row.
        validate: result of a codec -> row.
        read_exactly: JSON with numbers of more digits than a double -> row; ``None`` without decimals.
        columns: for each field, rows -> values for Arrow.
        empty: the row of a payload that does not fit.
    """

    schema: spark.StructType
    model: Any
    read: Callable[[bytes], Row]
    validate: Callable[[Any], Row]
    read_exactly: Callable[[bytes], Row] | None
    columns: Sequence[Callable[[Sequence[Row]], Sequence[Any]]]
    empty: Row
