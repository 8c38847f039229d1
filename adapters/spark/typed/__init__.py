"""Typed columns: the payload of messages as columns, by a pydantic model or by a Spark schema.

The columns of a typed read are the fields of the payload; what belongs to the message itself is there under its name
with an underscore in front (:data:`MESSAGE_COLUMNS`), and ``_corrupt_record`` beside it. A payload that does not fit
fails no job: all its payload columns are null, and ``_corrupt_record`` holds it as text, as it was sent.

Payloads are JSON unless the content type says otherwise: none, ``application/json``, ``+json``, ``text/plain``, and
also ``application/octet-stream``, which is what bytes are sent as when nobody said what they are. The header
``content-encoding`` tells of compression. Everything else goes through :mod:`messaging.codecs`.

**By model**, pydantic decides what fits, lax or strict, by alias, with all validators; ``str bool int float bytes
Decimal date datetime timedelta`` become ``string boolean bigint double binary decimal(38,18) date timestamp interval``;
``UUID``, enums, literals, IP addresses and URLs become ``string``; lists, sets and ``tuple[T, ...]`` arrays;
``dict[str, T]`` maps; models, dataclasses and typed dicts structs. A datetime without zone is taken as UTC.

**By schema**, values must be what they are: no number in a string, no string in a number.

==========================  =======================================================================================
string, boolean             a JSON string; ``true`` or ``false``
byte, short, int, long      a whole number in range; ``5.0`` is none
float, double               any number in range
decimal(p,s)                a number, or a string that is one; with more digits than fit it is corrupt, not rounded
binary                      base64 in a string, either alphabet, padded or not
date                        ``"2024-05-01"``
timestamp                   ISO 8601 in a string, UTC without a zone, cut to microseconds; or seconds since 1970
timestamp_ntz               ISO 8601 in a string, without a zone
array, map, struct          a list; an object; an object with the same rules
==========================  =======================================================================================

CBOR and msgpack have bytes and times of their own, which fit as well. What a field is called is compared exactly.
A missing field is null if the field of a struct may be, and corrupt otherwise; fields that nobody asked for are
ignored; of a field that is there twice the last counts. In no row is a number NaN, infinite, cut off or rounded to
fit; floating point numbers are the nearest there are.

::

    columns     messages -> rows of a typed read
    by_model    model -> plan               kinds       Python types -> Spark types
    by_schema   schema -> plan              plan        what rows are made by
    rows        payloads -> columns         content     payload -> row: JSON and codecs
    decimals    exact numbers
"""

from __future__ import annotations

from adapters.spark.typed.columns import TypedColumns
from adapters.spark.typed.plan import CORRUPT, MESSAGE_COLUMNS

__all__ = ["CORRUPT", "MESSAGE_COLUMNS", "TypedColumns"]
