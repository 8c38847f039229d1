"""Remote events from a generator to its listener, plain requests of the same size, and the journal by itself.

In one process the parties hold each other. In two processes the agent, if there is one, is with the generator, and the
mailbox is with the listener: so the events cross the broker once. Requests keep ``window`` of them in flight.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import messaging
from benchmarks.peers import job, journal
from benchmarks.peers.job import REQUESTS, STAMP, Job, Tally
from messaging import Message
from messaging.remoteevent import (
    EventGenerator,
    EventMailbox,
    ListenerReference,
    ListenerServer,
    RemoteEvent,
    RemoteListener,
    StoreAndForwardAgent,
)

if TYPE_CHECKING:
    from messaging import Promise

KIND: Final = "measured"
_LISTENER: Final = ListenerReference("benchmark/listeners", "listener")
#: threads that append to the journal
_WRITERS: Final = 64
#: how long anything may take, and a pause between two looks at the delivered events, seconds
_PATIENCE: Final = 120.0
_STEP: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Measured(RemoteEvent):
    """An event with as many characters as a message has bytes."""

    text: str


def _connect(job: Job) -> messaging.Messaging:
    if not job.port:
        return messaging.connect("memory://benchmark")
    if job.version == "amqp":
        return messaging.connect(f"amqp://{job.host}:{job.port}")
    return messaging.connect(f"mqtt://{job.host}:{job.port}?version={job.version}")


def _counted(job: Job, received: Callable[[bytes], None]) -> Callable[[RemoteEvent], None]:
    """Return a listener that counts the events: their sequence numbers are the numbers of the messages, from 1 on."""
    filler, size = b"x" * (job.size - STAMP), job.size

    def notify(event: RemoteEvent) -> None:
        is_right = isinstance(event, Measured) and len(event.text) == size
        received((event.sequence_number - 1).to_bytes(STAMP, "big") + filler if is_right else b"")

    return notify


def _with_mailbox(job: Job, stack: ExitStack, folder: Path, listener: Any) -> Any:
    """Return the listener, or the one of a mailbox that pushes the events to it."""
    if "mailbox" not in job.between:
        return listener
    mailbox = stack.enter_context(EventMailbox(folder / "mailbox"))
    box = mailbox.register(3600.0)
    box.enable_delivery(listener)
    return box.listener


def _generate(job: Job, stack: ExitStack, folder: Path, listener: Any) -> Callable[[], None]:
    """Register the listener, or an agent before it; return what generates all events, and waits for their delivery."""
    agent = None
    if "agent" in job.between:
        agent = stack.enter_context(StoreAndForwardAgent(folder / "agent", target=listener))
    generator = stack.enter_context(EventGenerator("benchmark", events=[KIND], max_pending=max(1, job.count), begin=0))
    registration = generator.register(KIND, None, agent or listener, 3600.0)
    counts = generator.counts(registration) if agent is None else agent.counts()
    assert counts is not None
    text = "x" * job.size

    def generate_all() -> None:
        generate = generator.generate
        for _ in range(job.count):
            generate(KIND, Measured, text=text)
        deadline = time.monotonic() + _PATIENCE
        while counts.delivered < job.count and time.monotonic() < deadline:
            time.sleep(_STEP)

    return generate_all


def _request_all(job: Job, m: messaging.Messaging) -> Callable[[], None]:
    """Return what makes all requests, and waits for the replies."""
    context = m.context_builder().channel(REQUESTS).extension_entry("timeout", _PATIENCE).build_context()
    ask = m.reply_to.publish_with_reply
    room = threading.Semaphore(job.window)

    def answered(promise: Promise[Message]) -> None:
        promise.result()
        room.release()

    def request_all() -> None:
        for payload in job.blocking_payloads():
            room.acquire()
            ask(Message(payload, context)).add_done_callback(answered)
        for _ in range(job.window):
            room.acquire()

    return request_all


def dispatch(job: Job) -> None:
    """Measure within this process."""
    if job.style == "journal":
        journal.append(dataclasses.replace(job, style="ours", window=_WRITERS))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=job.folder or None)))
        tally = Tally(job)
        if job.style == "requests":
            m = stack.enter_context(_connect(job))
            _reply(m, tally)
            send_all = _request_all(job, m)
        else:
            listener = _with_mailbox(job, stack, folder, _counted(job, tally.received))
            send_all = _generate(job, stack, folder, listener)
        job.ready()
        job.wait_for_go()
        tally.start()
        send_all()
        tally.wait()
        tally.finish()


def _reply(m: messaging.Messaging, tally: Tally) -> None:
    received = tally.received

    @m.reply(REQUESTS)
    def note(request: Message) -> None:
        if request.payload:
            received(request.payload)


def publish(job: Job) -> None:
    """Generate events, or make requests."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=job.folder or None)))
        m = stack.enter_context(_connect(job))
        if job.style == "requests":
            send_all = _request_all(job, m)
            m.request(REQUESTS, b"").result(_PATIENCE)  # it subscribes to the replies
        else:
            send_all = _generate(job, stack, folder, RemoteListener(m, _LISTENER))
        job.ready()
        job.wait_for_go()
        start = time.monotonic()
        send_all()
        job.finish(start=start, end=time.monotonic())


def subscribe(job: Job) -> None:
    """Be notified, or answer the requests."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=job.folder or None)))
        m = stack.enter_context(_connect(job))
        tally = Tally(job)
        if job.style == "requests":
            _reply(m, tally)
        else:
            server = stack.enter_context(ListenerServer(m, _LISTENER.channel))
            server.add(_with_mailbox(job, stack, folder, _counted(job, tally.received)), _LISTENER.id)
            server.ready.result(_PATIENCE)
        job.ready()
        tally.wait()
        tally.finish()
        tally.wait_published()  # the last outcomes may not be sent yet


if __name__ == "__main__":
    job.run({"dispatch": dispatch, "publish": publish, "subscribe": subscribe}, "rx-messaging")
