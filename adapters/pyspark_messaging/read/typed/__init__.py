"""Typed columns: the payload of messages as columns, by a pydantic model or by a Spark schema.

The columns of a typed read are the fields of the payload. The columns of the message have an underscore in front
(:data:`MESSAGE_COLUMNS`), and ``_corrupt_record`` holds payloads that do not fit. Such a payload fails no job: all its
payload columns are null, and ``_corrupt_record`` holds it as text, as it was sent.

Payloads without a content type, and those of type ``application/json``, ``+json``, ``text/plain`` and
``application/octet-stream`` (the type of bytes without a declared type), are JSON. The header ``content-encoding``
names their compression. :mod:`messaging.codecs` decodes all other content types.

**By model**, pydantic decides which values fit, lax or strict, by alias, with all validators; ``str bool int float
bytes Decimal date datetime timedelta`` become ``string boolean bigint double binary decimal(38,18) date timestamp
interval``; ``UUID``, enums, literals, IP addresses and URLs become ``string``; lists, sets and ``tuple[T, ...]``
arrays; ``dict[str, T]`` maps; models, dataclasses and typed dicts structs. A datetime without zone is taken as UTC.

**By schema**, values must have the type of the column: no number in a string, no string in a number.

==========================  =======================================================================================
string, boolean             a JSON string; ``true`` or ``false``
byte, short, int, long      a whole number in range; ``5.0`` does not fit
float, double               any number in range
decimal(p,s)                a number, or a number in a string; with too many digits it is corrupt, not rounded
binary                      base64 in a string, either alphabet, padded or not
date                        ``"2024-05-01"``
timestamp                   ISO 8601 in a string, UTC without a zone, cut to microseconds; or seconds since 1970
timestamp_ntz               ISO 8601 in a string, without a zone
array, map, struct          a list; an object; an object with the same rules
==========================  =======================================================================================

Bytes and times of CBOR and msgpack fit as well. Names of fields are compared exactly. A missing field is null if it is
nullable, and corrupt otherwise. Fields without a column are ignored. The last of duplicate fields counts. No number in
a row is NaN, infinite, truncated or rounded to fit; floating point numbers are the nearest doubles.
"""

from __future__ import annotations

from pyspark_messaging.read.typed.columns import TypedColumns
from pyspark_messaging.read.typed.rows import CORRUPT, MESSAGE_COLUMNS

__all__ = ["CORRUPT", "MESSAGE_COLUMNS", "TypedColumns"]
