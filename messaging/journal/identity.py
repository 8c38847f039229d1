"""The file ``journal.json``: what kind of journal a folder holds, and its id."""

from __future__ import annotations

import json
import uuid
import zlib
from typing import TYPE_CHECKING, Final

from messaging.errors import JournalUnreadableError
from messaging.execution import clock
from messaging.journal.log import META

if TYPE_CHECKING:
    from messaging.journal.folders import Folder

FORMAT: Final = 1
#: of journals of messages; those of Spark queries name no kind
KIND: Final = "records"
SPARK: Final = "a Spark query"


def seed_of(identity: str, partition: int = 0) -> int:
    """Return the seed of the frames of a partition, see :mod:`messaging.journal.frames`."""
    return zlib.crc32(f"{identity}/{partition}".encode())


def read_kind(folder: Folder) -> tuple[str, object, str] | None:
    """Return the kind, the format and the id of the journal in ``folder``, or ``None`` if there is none.

    Raises:
        JournalUnreadableError: the file is malformed.
    """
    try:
        text = bytes(folder.read(META, copy=True))
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        kind, version, identity = values.get("kind", SPARK), values["format"], values["id"]
        if not isinstance(identity, str) or not isinstance(kind, str):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise folder.error(JournalUnreadableError, f"{META} does not parse: {type(error).__name__}") from None
    return kind, version, identity


def read_identity(folder: Folder) -> str | None:
    """Return the id of the journal of messages in ``folder``, or ``None`` if there is no journal.

    Raises:
        JournalUnreadableError: the file is malformed, or of another kind of journal, or of another version.
    """
    found = read_kind(folder)
    if found is None:
        return None
    kind, version, identity = found
    if kind != KIND:
        raise folder.error(JournalUnreadableError, f"it is the journal of {kind}, and not one of messages")
    if version != FORMAT:
        raise folder.error(JournalUnreadableError, f"it has format {version!r}, this version reads {FORMAT}")
    return identity


def write_identity(folder: Folder) -> str:
    """Make ``folder`` a journal of messages; return its new id."""
    identity = uuid.uuid4().hex
    meta = {"format": FORMAT, "kind": KIND, "id": identity, "created": clock.wall()}
    folder.write(META, [json.dumps(meta, indent=1).encode()])
    return identity
