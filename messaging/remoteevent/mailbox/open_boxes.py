"""The open boxes of a mailbox: a bounded number, of which the least recently used idle ones are closed.

An open box holds about ten file descriptors and may have a thread. A mailbox may have many thousands of registrations,
most of which are idle. A box is opened when it is used, and closed when others need its place. A box in use stays open:
while a call is running, while events are being stored, and while its reader holds tickets that are valid only until it
is closed.

**Threads.** Any thread may use a slot. Its lock is held while the box is opened and closed, which waits for the disk;
it is released while the box is used. The lock of :class:`OpenBoxes` guards the set of open boxes.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Final

from messaging.errors import ClosedError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Serial, may_block
from messaging.remoteevent.mailbox.box import Box

logger = SafeLog(__name__)

#: file descriptors of the process for each open box: a box has about 10 of them, so boxes get a quarter of them
_DESCRIPTORS: Final = 40
#: bounds of the default number of open boxes
_LEAST: Final = 8
_MOST: Final = 1000


def default_most() -> int:
    """Return how many boxes may be open by default: they use up to a quarter of the file descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, limit // _DESCRIPTORS))


class OpenBoxes:
    """Bounds the number of open boxes of one mailbox. Thread safe.

    Args:
        most: boxes that stay open while they are idle. More are open only while they are in use.
        name: for the log.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.name = name
        self._lock = threading.Lock()  # guards the following
        self._open: set[BoxSlot] = set()
        self._uses = itertools.count()
        self._is_due = False
        self._trimmer = Serial(self._trim_later, lambda: self._is_due)

    def __len__(self) -> int:
        """Return the number of open boxes."""
        return len(self._open)

    def next_use(self) -> int:
        """Return a number that rises with each use of a box."""
        return next(self._uses)

    def add(self, slot: BoxSlot) -> None:
        """Note that a box was opened, and close idle ones beyond the bound. Without the lock of a slot."""
        with self._lock:
            self._open.add(slot)
            is_over = len(self._open) > self.most
        if is_over:
            self.trim()

    def remove(self, slot: BoxSlot) -> None:
        """Note that a box was closed."""
        with self._lock:
            self._open.discard(slot)

    def trim(self) -> None:
        """Close idle boxes beyond the bound; in an event loop, soon and on another thread."""
        if may_block():
            self._trim()
        else:
            self._is_due = True
            self._trimmer.wake()

    def _trim_later(self) -> None:
        self._is_due = False
        self._trim()

    def _trim(self) -> None:
        with self._lock:
            excess = len(self._open) - self.most
            candidates = sorted(self._open, key=lambda each: each.used) if excess > 0 else []
        for each in candidates:
            if excess <= 0:
                return
            excess -= each.close_if_idle()


class BoxSlot:
    """The box of one registration, open or closed. Thread safe.

    Args:
        boxes: the open boxes of the mailbox.
        open_box: opens the box.
        refuse: raises an error if the registration has ended; called before the box is opened.
        exists: returns whether the box has a folder.
        is_needed: returns whether the box must stay open although no call is running.
    """

    def __init__(
        self,
        boxes: OpenBoxes,
        open_box: Callable[[], Box],
        refuse: Callable[[], object],
        exists: Callable[[], bool],
        is_needed: Callable[[], bool],
    ) -> None:
        self._boxes = boxes
        self._open_box = open_box
        self._refuse = refuse
        self._exists = exists
        self._is_needed = is_needed
        #: number of the latest use
        self.used = 0
        self._lock = threading.Lock()  # guards the following
        self._box: Box | None = None
        self._users = 0
        self._is_over = False
        #: of the box when it was closed; ``None`` before
        self._size: int | None = None
        #: events that were dropped, beyond those that the open box counts
        self._dropped = 0
        #: of the earlier openings of the box: events that were stored, that had arrived before, that are damaged
        self._counts = (0, 0, 0)

    # --- using

    def acquire(self) -> Box:
        """Return the box, which stays open until :meth:`release`.

        Raises:
            JournalError: it cannot be opened.
            ClosedError: the mailbox is closed.
            LeaseError: the registration has ended.
        """
        self.used = self._boxes.next_use()
        with self._lock:
            box = self._box
            is_new = box is None
            if box is None:
                self._refuse()
                if self._is_over:
                    raise ClosedError(f"mailbox '{self._boxes.name}': closed")
                box = self._box = self._open_again()
            self._users += 1
        if is_new:
            self._boxes.add(self)
        return box

    def _open_again(self) -> Box:
        """Open the box, and go on counting. With the lock."""
        box = self._open_box()
        box.stored, box.duplicates, box.damaged = (
            before + now for before, now in zip(self._counts, (box.stored, box.duplicates, box.damaged), strict=True)
        )
        if self._size is not None:
            self._dropped = max(0, self._dropped - box.dropped)
        return box

    def release(self) -> None:
        """End the use that :meth:`acquire` began."""
        with self._lock:
            self._users -= 1

    @contextlib.contextmanager
    def using(self) -> Iterator[Box]:
        """Use the box within a block. Raises as :meth:`acquire`."""
        box = self.acquire()
        try:
            yield box
        finally:
            self.release()

    # --- numbers, for people

    def size(self) -> int:
        """Return the number of stored events. Raises as :meth:`acquire`."""
        with self._lock:
            if self._box is not None:
                return len(self._box)
            if self._size is not None:
                return self._size
            if not self._exists():
                return 0
        with self.using() as box:
            return len(box)

    def dropped(self) -> int:
        """Return the number of events that were dropped because the box was full. Raises as :meth:`acquire`."""
        with self._lock:
            if self._box is not None:
                return self._dropped + self._box.dropped
            if self._size is not None:
                return self._dropped
            if not self._exists():
                return 0
        with self.using() as box:
            return self._dropped + box.dropped

    # --- closing

    def close_if_idle(self) -> bool:
        """Close the box unless it is in use; return whether it was closed now. It waits for the disk."""
        if not self._lock.acquire(blocking=False):
            return False  # it is being opened or closed
        try:
            box = self._box
            if box is None or self._users or self._is_needed():
                return False
            self._box = None
            self._size = len(box)
            self._dropped += box.dropped
            self._counts = box.stored, box.duplicates, box.damaged
            try:
                box.close()
            except MessagingError as error:
                logger.warning(
                    "mailbox '%s': the last state of an idle box is not stored: %s; its events are kept",
                    self._boxes.name, error,
                )  # fmt: skip
        finally:
            self._lock.release()
        self._boxes.remove(self)
        return True

    def close(self) -> None:
        """Close the box for good. Idempotent. Raises ``JournalError``."""
        with self._lock:
            self._is_over = True
            box, self._box = self._box, None
            if box is not None:
                self._size = len(box)
                self._dropped += box.dropped
        self._boxes.remove(self)
        if box is not None:
            box.close()

    def abandon(self) -> None:
        """Close the box for good without storing a state: its folder is about to be deleted."""
        with self._lock:
            self._is_over = True
            box, self._box = self._box, None
        self._boxes.remove(self)
        if box is not None:
            box.abandon()
