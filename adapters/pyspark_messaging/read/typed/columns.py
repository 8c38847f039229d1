"""``TypedColumns``: converts messages to the rows of a typed read."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_messaging.errors import invalid_option
from pyspark_messaging.read.typed.by_model import bad_model, plan_of_model
from pyspark_messaging.read.typed.by_schema import plan_of_schema
from pyspark_messaging.read.typed.rows import CORRUPT, POSITION, RESERVED, RowPlan, parse, texts_of


class TypedColumns:
    """Converts messages to the rows of a typed read.

    Created on the driver and pickled to the executors, where a model is imported again by its name.
    """

    def __init__(self, schema: spark.StructType, plan: RowPlan, reference: str | None = None) -> None:
        self.schema = schema
        self._reference = reference
        self._plan: RowPlan | None = plan

    @classmethod
    def of_model(cls, reference: str) -> TypedColumns:
        """Return the fields of a model, then :data:`MESSAGE_COLUMNS` without ``_value``, then ``_corrupt_record``.

        Raises:
            InvalidOptionError: there is no such model, or one of its fields has no type in Spark.
        """
        plan = plan_of_model(reference)
        taken = [name for name in plan.schema.names if name in RESERVED]
        if taken:
            raise bad_model(reference, f"field {taken[0]!r} has the name of a column of the message; rename it")
        message_columns = [spark.StructField(name, kind) for name, kind in RESERVED.items() if name != "_value"]
        return cls(spark.StructType([*plan.schema.fields, *message_columns]), plan, reference)

    @classmethod
    def of_schema(cls, schema: spark.StructType) -> TypedColumns:
        """Return exactly the columns of a schema.

        Raises:
            InvalidOptionError: a column's type cannot be read from a payload, one of :data:`MESSAGE_COLUMNS` has
                another type than it should, two columns have one name, or a column is ``NOT NULL``, which no payload
                can promise.
        """
        for field in schema:
            right = RESERVED.get(field.name)
            if right is not None and field.dataType != right:
                raise invalid_option(
                    "schema",
                    f"column {field.name!r} is of the message and has the type {right.simpleString()}, "
                    f"not {field.dataType.simpleString()}",
                )
            if not field.nullable:
                raise invalid_option(
                    "schema",
                    f"column {field.name!r} cannot be NOT NULL: it is null in rows whose payload does not fit; "
                    f"leave it nullable and filter on it, or on {CORRUPT}",
                )
        return cls(schema, plan_of_schema(schema))

    def __getstate__(self) -> tuple[spark.StructType, str | None]:
        return self.schema, self._reference

    def __setstate__(self, state: tuple[spark.StructType, str | None]) -> None:
        self.schema, self._reference = state
        self._plan = None

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of :data:`MESSAGE_COLUMNS`, in order, one for each message.

        Raises:
            BoundReachedError: a column would hold more than 2 GiB.
            InvalidOptionError: the model cannot be imported on this executor.
        """
        plan = self._plan
        if plan is None:
            plan = plan_of_schema(self.schema) if self._reference is None else plan_of_model(self._reference)
            self._plan = plan
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        if not len(arrow):  # without columns, a batch needs a struct array for its length
            return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
        kinds = [field.type for field in arrow if field.name not in RESERVED]
        columns: Iterable[pa.Array] = ()
        corrupt: list[int] = []
        if kinds or CORRUPT in arrow.names:
            parsed, corrupt = parse(plan, kinds, batch)
            columns = iter(parsed)
        made = []
        for field in arrow:
            if field.name == CORRUPT:
                made.append(texts_of(batch.column(POSITION["_value"]), corrupt))
            elif field.name in RESERVED:
                column = batch.column(POSITION[field.name])
                made.append(column if column.type == field.type else column.cast(field.type))
            else:
                made.append(next(iter(columns)))
        return pa.RecordBatch.from_arrays(made, schema=arrow)
