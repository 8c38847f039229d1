"""The file ``journal.json``: what kind of journal a folder holds, and its id.

The checksums of all frames begin with a key that is made of the id. With a wrong key every record looks damaged, so the
identity has a checksum of its own, and the key is compared with the segments before they are used. Files of earlier
versions have no checksum; the segments alone tell whether their id is right. :mod:`messaging.journal.repair` restores a
damaged file.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from messaging.errors import JournalUnreadableError
from messaging.execution import clock
from messaging.journal.folders import Folder, LocalFolder
from messaging.journal.frames import HEADER_BYTES, header, rewound, seed_in
from messaging.journal.log import META, Log

FORMAT: Final = 1
#: of journals of messages; those of Spark queries name no kind
KIND: Final = "records"
SPARK: Final = "a Spark query"
#: the key, if it is not the one of the id; and the checksum of the values that identify a journal
_KEY: Final = "key"
CHECK: Final = "check"
_CHECKED: Final = ("kind", "format", "id", "created", _KEY)


def key_of(identity: str) -> int:
    """Return the key of the frames of a journal, unless its file names another one."""
    return zlib.crc32(identity.encode())


def seed_with(key: int, partition: int) -> int:
    """Return the seed of the frames of a partition of a journal with this key, see :mod:`messaging.journal.frames`."""
    return zlib.crc32(f"/{partition}".encode(), key)


class Identity(NamedTuple):
    """The identity of a journal."""

    kind: str
    format: object
    id: str
    key: int

    def seed(self, partition: int = 0) -> int:
        """Return the seed of the frames of a partition."""
        return seed_with(self.key, partition)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Identity:
        """Return the identity in the values of a file. Raises ``TypeError`` or ``KeyError`` if they have none."""
        kind, identity = values.get("kind", SPARK), values["id"]
        key = values.get(_KEY)
        if not isinstance(identity, str) or not isinstance(kind, str) or not isinstance(key, (int, type(None))):
            raise TypeError
        return cls(kind, values["format"], identity, key_of(identity) if key is None else key)


# --- the file


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return values as the text of the file, with the checksum of the identity."""
    return json.dumps({**values, CHECK: _check_of(values)}, indent=1).encode()


def unsealed(folder: Folder, text: bytes) -> dict[str, Any]:
    """Return the values in the text of a file.

    Raises:
        JournalUnreadableError: the text is malformed, or its checksum does not fit.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError
    except (ValueError, TypeError, RecursionError) as error:
        raise malformed(folder, error) from None
    if not is_sound(values):
        raise folder.error(
            JournalUnreadableError, f"{META} does not parse: its checksum does not fit, it is damaged; {_REMEDY}"
        )
    values.pop(CHECK, None)
    return values


def is_sound(values: Mapping[str, Any]) -> bool:
    """Return whether the checksum of the values fits; files of earlier versions have none."""
    return CHECK not in values or bool(values[CHECK] == _check_of(values))


def malformed(folder: Folder, error: Exception) -> JournalUnreadableError:
    """Return the error of a file that is malformed."""
    return folder.error(JournalUnreadableError, f"{META} does not parse: {type(error).__name__}; {_REMEDY}")


_REMEDY: Final = "`messaging journal repair` restores it where the segments allow that"


def _check_of(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([values.get(name) for name in _CHECKED]).encode())


def read_kind(folder: LocalFolder) -> Identity | None:
    """Return the identity of the journal in ``folder``, of any kind, or ``None`` if there is none.

    Raises:
        JournalUnreadableError: the file is damaged, or the segments belong to another one.
    """
    try:
        text = bytes(folder.read(META, copy=True))
    except FileNotFoundError:
        return None
    values = unsealed(folder, text)
    try:
        found = Identity.of(values)
    except (TypeError, KeyError) as error:
        raise malformed(folder, error) from None
    check_key(folder, found.key, folder.partitions())
    return found


def read_identity(folder: LocalFolder) -> Identity | None:
    """Return the identity of the journal of messages in ``folder``, or ``None`` if there is no journal.

    Raises:
        JournalUnreadableError: as :func:`read_kind`; or it is of another kind of journal, or of another version.
    """
    found = read_kind(folder)
    if found is None:
        return None
    if found.kind != KIND:
        raise folder.error(JournalUnreadableError, f"it is the journal of {found.kind}, and not one of messages")
    if found.format != FORMAT:
        raise folder.error(JournalUnreadableError, f"it has format {found.format!r}, this version reads {FORMAT}")
    return found


def new_identity(key: int | None = None) -> bytes:
    """Return the file of a new journal of messages; ``key`` of the frames that are there, if there are any."""
    values = {"format": FORMAT, "kind": KIND, "id": uuid.uuid4().hex, "created": clock.wall()}
    return sealed(values if key is None else {**values, _KEY: key})


def write_identity(folder: Folder) -> Identity:
    """Make ``folder`` a journal of messages; return its identity."""
    text = new_identity()
    folder.write(META, [text])
    return Identity.of(json.loads(text))


# --- the key and the segments


def check_key(folder: Folder, key: int, partitions: Iterable[int]) -> None:
    """Refuse a journal whose segments all have been written with another key.

    Reads one header where the key is right. Segments without a single whole record tell nothing.

    Raises:
        JournalUnreadableError: the key is wrong.
    """
    numbers = [*partitions]
    if any(
        header(_read(folder, name, HEADER_BYTES), seed_with(key, number)) is not None
        for number, name in _files(folder, numbers)
    ):
        return
    if next(keys_in(folder, numbers), key) != key:
        raise folder.error(
            JournalUnreadableError,
            f"{META} does not belong to the segments: their records were written with another id. One of the two is "
            f"damaged, or of another journal; {_REMEDY}",
        )


def keys_in(folder: Folder, partitions: Iterable[int]) -> Iterator[int]:
    """Yield the key of each segment that tells one, the newest first, whatever is in the file."""
    for number, name in _files(folder, [*partitions]):
        seed = seed_in(_read(folder, name))
        if seed is not None:
            yield rewound(f"/{number}".encode(), seed)


def _files(folder: Folder, partitions: list[int]) -> Iterator[tuple[int, str]]:
    """Yield partition and name of each segment that has bytes, the newest of a partition first."""
    for number in partitions:
        log = Log(folder, number)
        yield from ((number, log.segment_name(segment)) for segment, size in reversed(log.list_segments()) if size)


def _read(folder: Folder, name: str, length: int | None = None) -> memoryview:
    """Return the beginning of a segment; nothing if it was trimmed meanwhile, or cannot be read."""
    try:
        return folder.read(name, 0, length, copy=True)
    except OSError:
        return memoryview(b"")
