"""How anything runs: the engine's event loop, promises, threads, and how a thread waits.

May import: ``errors``, ``text``, ``forking``.
"""

from messaging.execution.coroutines import handlers_loop, is_coroutine, running_loop
from messaging.execution.deadlines import Deadlines
from messaging.execution.loop import Engine, engine, may_block, of_library, wait_for
from messaging.execution.mailboxes import Mailbox, mailbox
from messaging.execution.observers import callbacks_of
from messaging.execution.promise import PENDING, Promise
from messaging.execution.threads import start_thread, workers
from messaging.execution.waiting import Flag, Waiters, refuse_in_loop, seconds, warn_in_loop

__all__ = [
    "PENDING",
    "Deadlines",
    "Engine",
    "Flag",
    "Mailbox",
    "Promise",
    "Waiters",
    "callbacks_of",
    "engine",
    "handlers_loop",
    "is_coroutine",
    "mailbox",
    "may_block",
    "of_library",
    "refuse_in_loop",
    "running_loop",
    "seconds",
    "start_thread",
    "wait_for",
    "warn_in_loop",
    "workers",
]
