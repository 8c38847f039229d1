"""Execution: the engine's event loop, clock, promises, lanes, worker threads, and interruptible waiting.

May import: ``errors``, ``environment``.
"""

from messaging.errors.checks import ValueObserver as ValueObserver
from messaging.errors.checks import callbacks_of as callbacks_of
from messaging.execution.backoff import Backoff as Backoff
from messaging.execution.backoff import doubled as doubled
from messaging.execution.backoff import jitter as jitter
from messaging.execution.clock import clock as clock
from messaging.execution.closing import AsyncCloseable as AsyncCloseable
from messaging.execution.closing import Closeable as Closeable
from messaging.execution.closing import Startable as Startable
from messaging.execution.deadlines import Deadlines as Deadlines
from messaging.execution.lanes import LIMIT as LIMIT
from messaging.execution.lanes import Lane as Lane
from messaging.execution.lanes import LoopLane as LoopLane
from messaging.execution.lanes import ThreadLane as ThreadLane
from messaging.execution.loop import Engine as Engine
from messaging.execution.loop import engine as engine
from messaging.execution.loop import handlers_loop as handlers_loop
from messaging.execution.loop import of_library as of_library
from messaging.execution.loop import on_worker as on_worker
from messaging.execution.loop import shielded as shielded
from messaging.execution.loop import wait_for as wait_for
from messaging.execution.mailboxes import Mailbox as Mailbox
from messaging.execution.mailboxes import after_cancelled as after_cancelled
from messaging.execution.mailboxes import mailbox as mailbox
from messaging.execution.pool import GROW_AFTER as GROW_AFTER
from messaging.execution.pool import Pool as Pool
from messaging.execution.promise import PENDING as PENDING
from messaging.execution.promise import Promise as Promise
from messaging.execution.promise import converted as converted
from messaging.execution.promise import result_of as result_of
from messaging.execution.threads import Serial as Serial
from messaging.execution.threads import callback_lanes as callback_lanes
from messaging.execution.threads import start_thread as start_thread
from messaging.execution.threads import workers as workers
from messaging.execution.waiting import Flag as Flag
from messaging.execution.waiting import Waiters as Waiters
from messaging.execution.waiting import may_block as may_block
from messaging.execution.waiting import refuse_in_loop as refuse_in_loop
from messaging.execution.waiting import running_loop as running_loop
from messaging.execution.waiting import seconds as seconds
from messaging.execution.waiting import warn_in_loop as warn_in_loop
