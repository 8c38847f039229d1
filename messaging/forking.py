"""Locks across a fork of the process: a child must not inherit a locked lock.

Imports nothing of this project.
"""

from __future__ import annotations

import os
import threading


def hold_over_fork(lock: threading.Lock) -> None:
    """Acquire ``lock`` before each fork and release it afterwards in both processes.

    A child would otherwise inherit it locked if another thread held it. For locks of modules that are held for moments
    only, and never while another lock is acquired.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
