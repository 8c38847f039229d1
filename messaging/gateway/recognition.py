"""Recognition: which messages a source delivers again although the buffer has them, or is about to store them.

A message with an id of its own is recognised by id, channel and payload. Plain MQTT messages have none. Where the
source tells the packet identifier (extension ``packetId``), such a message gets an id that holds the identifier and a
digest of channel and payload. A broker that delivers it again repeats the identifier: the message then gets the same id
again, also from the next process, because the id is in the journal.

**Reuse of packet identifiers.** A broker gives the identifier of an acknowledged message to a later one, which may have
the same content. So an identifier stands for the last message that had it, and no longer once the broker shows that it
has that message's acknowledgement, or that its session is a new one:

- a new message has the same identifier: this acknowledgement, and those before it, have arrived;
- the first message of a connection is a new one, with a smaller identifier than the one before it: a new session. Its
  id says so, for the next process. Behind messages that are delivered again a broker may count from 1 as well.

**Deleted records.** The journal deletes records that the target has confirmed. Their acknowledgements may not have
reached the source by then, so their keys are first written to a file beside the segments. It has none of a record that
stays: the disk may lose that one, and then the message is to be stored again.

**Threads.** The intake identifies messages, the thread of the journal notes them and writes the file. One lock guards
the state, another one reading what earlier runs have stored.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

from messaging.errors import MessagingError
from messaging.errors.text import SafeLog
from messaging.gateway.stored import Settleable, StoredMessage, members_of
from messaging.journal import Journal
from messaging.journal.folders import journal_errors

logger = SafeLog(__name__)

#: in the folder of the journal: the keys of the last messages whose records are deleted, a line each, oldest first
FILE: Final = "recognised.txt"

#: a packet identifier that is smaller than the one before it by more than this follows 65,535
_WRAP: Final = 32_768
#: records that are read at a time, from the newest on
_CHUNK: Final = 4096
#: the ids of messages with a packet identifier: journal and run, number, whether a session begins (``_``), identifier,
#: digest, number of the part
_IDENTIFIED: Final = re.compile(
    r"(([0-9a-f]{18})-([0-9a-f]{1,16})([._])([0-9a-f]{1,4})\.([0-9a-f]{8}))(?:-[0-9]+)*", re.ASCII
)
#: digits of the id of the journal that begin the ids of its messages
_JOURNAL_DIGITS: Final = 6


class Recognition:
    """Knows the last messages of a buffer. See the module for threads.

    Args:
        name: of the route, for the log.
        journal: the stored messages.
        most: messages that are known.
    """

    def __init__(self, name: str, journal: Journal, most: int) -> None:
        self._name = name
        self._journal = journal
        self._most = most
        self._own = blake2b(journal.id.encode()).hexdigest()[:_JOURNAL_DIGITS]
        self._run = self._own + secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards what follows
        #: key -> message on its way to the disk, also of the messages of a batch
        self._on_the_way: dict[str, StoredMessage] = {}
        #: key -> offset of the last stored messages, oldest first; those of earlier runs once they are needed
        self._keys: OrderedDict[str, int] = OrderedDict()
        #: packet identifier -> digest and id of the last message that had it, oldest first
        self._identified: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._last_packet = 0
        #: of the source when the last message with an identifier came: a changed one may have a new session
        self._connection: object = None
        #: end of the records of earlier runs
        self._earlier_end = journal.end
        self._is_recalled = False
        self._recalling = threading.Lock()  # held while they are read
        #: whether the last attempt to write the file failed
        self._is_unwritten = False
        journal.retention.listen(self._write)

    # --- ids

    def new_id(self) -> str:
        """Return an id for a message that has none and cannot be recognised."""
        return f"{self._run}-{next(self._numbers):x}"

    def identify(self, packet: int, channel: str, payload: bytes, *, is_redelivered: bool, connection: object) -> str:
        """Return the id of a received message without one: the same as before if it is delivered again.

        Args:
            packet: its packet identifier.
            channel: where it arrived.
            payload: as it was received.
            is_redelivered: whether the broker has sent it before.
            connection: stands for the connection of the source: another object after each loss.
        """
        digest = blake2b(channel.encode("utf-8", "surrogatepass") + b"\0" + payload, digest_size=4).hexdigest()
        self._recall()
        with self._lock:
            is_first, self._connection = self._connection is not connection, connection
            found = self._identified.get(packet) if is_redelivered else None
            if found is not None and found[0] == digest:
                self._last_packet = packet
                return found[1]
            begins = is_first and not is_redelivered and 0 < self._last_packet - packet <= _WRAP
            mark = "_" if begins else "."
            message_id = f"{self._run}-{next(self._numbers):x}{mark}{packet:x}.{digest}"
            self._note_packet(packet, digest, message_id, begins=begins)
        return message_id

    def _note_packet(self, packet: int, digest: str, message_id: str, *, begins: bool) -> None:
        """Have a packet identifier stand for another message. Under the lock.

        Args:
            packet, digest, message_id: of the message.
            begins: whether it is the first one of a session.
        """
        known = self._identified
        if begins:
            known.clear()
        elif packet in known:
            while known.popitem(last=False)[0] != packet:
                pass
        self._last_packet = packet
        known[packet] = (digest, message_id)
        if len(known) > self._most:
            known.popitem(last=False)

    # --- stored messages

    def key(self, message_id: str, channel: str, payload: bytes) -> str:
        """Return what recognises a message, in each process; empty for one of :meth:`new_id`."""
        if self._own_id(message_id):  # the id holds the content as it was received; steps may add the time, say
            return message_id
        if message_id.startswith(self._run):
            return ""
        text = f"{message_id}\0{channel}".encode("utf-8", "surrogatepass")
        return blake2b(text + b"\0" + payload, digest_size=8).hexdigest()

    def _own_id(self, message_id: str) -> re.Match[str] | None:
        """Return the parts of an id that this buffer has made of a packet identifier."""
        return _IDENTIFIED.fullmatch(message_id) if message_id.startswith(self._own) else None

    def begin(self, stored: StoredMessage) -> None:
        """Know a message that is on its way to the disk."""
        with self._lock:
            self._on_the_way.update(dict.fromkeys(stored.keys, stored))

    def end(self, stored: StoredMessage, *, is_stored: bool) -> None:
        """Know a message that is on the disk, or forget it; its sources do not change any more."""
        with self._lock:
            keys = self._keys
            for key in stored.keys:
                if self._on_the_way.get(key) is stored:
                    del self._on_the_way[key]
                if is_stored:
                    keys[key] = stored.offset
            while len(keys) > self._most:
                keys.popitem(last=False)

    def joins(self, key: str, sources: Sequence[Settleable]) -> bool:
        """Return whether a message is on its way to the disk, in a batch or not; then these sources are its, too.

        Ask before :meth:`is_stored`: a message is stored before it is not on its way any more.
        """
        with self._lock:
            first = self._on_the_way.get(key)
            if first is None:
                return False
            first.sources = [*first.sources, *sources]
        return True

    def is_stored(self, key: str) -> bool:
        """Return whether a message is among the last that were stored, in a batch or not."""
        self._recall()
        return key in self._keys

    def _write(self, before: int) -> None:
        """Write the keys of the records before an offset, which are about to be deleted. On the thread that does it."""
        self._recall()
        with self._lock:
            text = "".join(f"{key}\n" for key, offset in self._keys.items() if offset < before)
        if not text:
            return
        folder = self._journal.folder
        try:
            with journal_errors(folder, "cannot write"):
                folder.write(FILE, [text.encode()])
        except MessagingError as error:  # of a full disk: the deletion makes room, and the next one tries again
            if not self._is_unwritten:
                logger.warning(
                    "route '%s': redelivered messages may not be recognised after a crash: %s", self._name, error
                )
            self._is_unwritten = True
        else:
            self._is_unwritten = False

    # --- earlier runs

    def _recall(self) -> None:
        """Read what earlier runs have stored, once. On the thread that needs it first."""
        if not self._is_recalled:
            with self._recalling:
                if not self._is_recalled:
                    self._read_earlier()
                    self._is_recalled = True  # last: other threads wait until then

    def _read_earlier(self) -> None:
        keys: dict[str, int] = {}  # the newest first
        try:
            for key, offset in itertools.chain(self._of_records(self._earlier_end), self._of_file()):
                keys.setdefault(key, offset)
                if len(keys) >= self._most:
                    break
        except MessagingError as error:
            logger.warning("route '%s': redelivered messages are not recognised: %s", self._name, error)
        runs: dict[str, dict[int, re.Match[str]]] = {}
        for key in keys:
            if (found := self._own_id(key)) is not None:
                runs.setdefault(found[2], {})[int(found[3], 16)] = found
        with self._lock:
            self._keys = OrderedDict([*reversed(keys.items()), *self._keys.items()])
            for run in reversed(runs):
                for _, found in sorted(runs[run].items()):  # batches are stored in another order than they arrive
                    begins = found[4] == "_"
                    self._note_packet(int(found[5], 16), found[6], found[1], begins=begins)

    def _of_records(self, end: int) -> Iterator[tuple[str, int]]:
        """Yield the keys and offsets of the records before ``end``, the newest first."""
        while end > (begin := self._journal.begin):
            start = max(begin, end - _CHUNK)
            found: list[tuple[str, int]] = []
            for record in self._journal.read(start, end):
                members = members_of(record.properties)
                if members:
                    found += ((each, record.offset) for each in members)
                elif record.message_id:
                    found.append((self.key(record.message_id, record.channel, record.payload), record.offset))
            yield from reversed(found)
            end = start

    def _of_file(self) -> Iterator[tuple[str, int]]:
        """Yield the keys of the file, the newest first, each with an offset before all records."""
        folder = self._journal.folder
        with journal_errors(folder, "cannot read"):
            if FILE in folder.list():
                for key in reversed(str(folder.read(FILE), "ascii", "replace").split()):
                    yield key, -1
