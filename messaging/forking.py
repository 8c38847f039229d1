"""What a fork needs: locks that are not left behind locked."""

from __future__ import annotations

import os
import threading


def hold_over_fork(lock: threading.Lock) -> None:
    """Have ``lock`` held by the forking thread during a fork, so that the child does not inherit it from another.

    For locks of the module level that are held for moments only and never across other locks.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
