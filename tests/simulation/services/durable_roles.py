"""The programs of the service ``durable``: publishers with an outbox on the disk, and a consumer with an inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging import MessagingError
from messaging.execution import clock
from messaging.journal import Journal
from tests.simulation.services.durable_ledger import FOREVER, Handled, Sent
from tests.simulation.services.messages import CHANNEL, Consumer
from tests.simulation.simulation import Role

if TYPE_CHECKING:
    from messaging import Promise
    from tests.simulation.services.durable import Durable

#: time that a promise may take beyond its deadline, virtual seconds. Threads are held up for up to 20 s at each point
SLACK: Final = 60.0
NOWHERE: Final = "nowhere"


class DurablePublisher(Role):
    """Publishes messages that are numbered through all its lives, and keeps them in its outbox until they are sent."""

    simulation: Durable

    def open(self) -> None:
        """Connect."""
        self.ledger = self.simulation.ledger
        self.options = self.simulation.plan.options
        self.folder = self.world.disk.folder / self.name
        #: outcomes that are waited for: a promise, and what of it
        self.promises: dict[str, Promise[None]] = {}
        self.threads = 0
        self.number = getattr(self, "number", 0)
        self.branches = getattr(self, "branches", 0)
        self.limit = getattr(self, "limit", None)
        #: messages of the outbox that are not settled; ``None``: not known
        self.waiting: int | None = None
        self._letters = -1
        self._connect()

    def _connect(self) -> None:
        settings = {**self.options["publisher"], "outbox_path": str(self.folder)}
        if self.limit is not None:
            settings["max_message_size"] = self.limit
        while True:
            try:
                self.m = self.simulation.connect(self, retry_connect=True, **settings)
                return
            except MessagingError as error:
                self.simulation.unexpected(self, "connect", error)
                clock.pause(0.5)

    def rest(self) -> None:
        """See what is left in the outbox."""
        dto = self.m.runtime.get_runtime_dto().outbox
        assert dto is not None
        self.waiting = dto.waiting + dto.unstored
        if dto.dead_letters != self._letters:
            self._letters = self._look()

    def _look(self) -> int:
        """Note the dead letters; return how many there are. A failing disk shows none."""
        view = Journal.view(self.folder)
        letters = [*view.dead_letters()]
        for letter in letters:
            message = letter.stored.payload.rstrip(b".").decode()
            if message not in self.ledger.sent:
                self.simulation.broken(f"a dead letter was never published: {message[:50]!r}")
                continue
            if message not in self.ledger.letters:
                self.note(f"{message} is kept as a dead letter: {letter.reason}")
            self.ledger.letters[message] = letter.reason
        view.close()
        return len(letters)

    # --- publishing

    def do_publish(self, count: int, size: int, kind: str, lasts: float, timeout: float) -> None:
        """Step: publish so many messages."""
        for _ in range(count):
            self.number += 1  # first: a process that is killed in the call does not use the number again
            self._publish(self.name, self.number - 1, size, kind, lasts, timeout)

    def do_branch(self, threads: int, count: int, size: int) -> None:
        """Step: have several threads publish at once."""
        for _ in range(threads):
            thread = f"{self.name}/{self.branches}"
            self.branches += 1
            self.threads += 1
            self.process.start(lambda thread=thread: self._run(thread, count, size), thread)  # type: ignore[misc]

    def _run(self, thread: str, count: int, size: int) -> None:
        for number in range(count):
            self._publish(thread, number, size, "plain", FOREVER, self.options["publisher"]["timeout"])
        self.threads -= 1

    def _publish(self, thread: str, number: int, size: int, kind: str, lasts: float, timeout: float) -> None:
        message = f"{thread}:{number}"
        now = self.world.scheduler.now
        payload = message.encode().ljust(size, b".")
        sent = self.ledger.sent[message] = Sent(
            self.name, thread, number, now, now + timeout + SLACK, kind, lasts, len(payload)
        )
        wanted: dict[str, Any] = {"timeout": timeout, **self.options["publish"]}
        wanted |= {"store_and_forward": True} if kind == "forward" else {"guaranteed_delivery": True}
        if kind == "nowhere":
            wanted["mandatory"] = True
            wanted.pop("qos", None)  # with QoS 2 no MQTT broker tells that nobody receives a message
        if self.options["has_own_ids"]:
            wanted["message_id"] = message
        if lasts < FOREVER:
            wanted["time_to_live"] = lasts
        try:
            promise = self.m.publish(NOWHERE if kind == "nowhere" else CHANNEL, payload, **wanted)
        except MessagingError as error:
            self._settled(message, error)
            return
        self.promises[message] = promise
        promise.stored.add_done_callback(lambda stored: self._stored(message, sent, stored.exception(0)))
        promise.add_done_callback(lambda promise: self._settled(message, promise.exception(0)))

    def _stored(self, message: str, sent: Sent, error: BaseException | None) -> None:
        if error is None:
            sent.stored_at = self.world.scheduler.now
            self.note(f"{message} stored")
        else:
            self.note(f"{message} not stored: {type(error).__name__}: {error}"[:200])

    def _settled(self, message: str, error: BaseException | None) -> None:
        simulation = self.simulation
        self.ledger.settled(message, error, self.world.scheduler.now)
        sent = self.ledger.sent[message]
        self.note(f"{message} {sent.outcome}" + (f": {error}"[:200] if error is not None else ""))
        simulation.check_outcome(message, sent, error)

    # --- the other steps

    def do_wait(self, what: str) -> None:
        """Step: wait for all outcomes, or until all messages are stored."""
        while self.threads:
            clock.pause(0.05)
        for message, promise in [*self.promises.items()]:
            waited: Promise[Any] = promise.stored if what == "stored" else promise
            try:
                waited.exception(timeout=max(0.0, self.ledger.sent[message].due - self.world.scheduler.now) + 1.0)
            except MessagingError:
                self.simulation.broken(f"the promise of {message} has no outcome in time: {what}")
        if what != "stored":
            self.promises.clear()

    def do_reopen(self, limit: int | None) -> None:
        """Step: close the instance, and open another on the same path."""
        self._close()
        self.limit = limit
        self._connect()

    def _close(self) -> None:
        self.m.close()
        while self.threads:  # they are told
            clock.pause(0.05)
        for message, promise in self.promises.items():
            for each, what in ((promise, "promise"), (promise.stored, "promise `stored`")):
                if not each.done():
                    self.simulation.broken(f"the {what} of {message} has no outcome after close()")
        self.promises.clear()
        self.simulation.ended(self)

    def close(self) -> None:
        """Close the instance, and look at what it leaves."""
        self._close()
        view = Journal.view(self.folder)
        position, end = view.cursors().get("outbox", view.begin), view.end
        if position < end and not self.simulation.may_be_damaged:
            self.simulation.broken(f"{self.name} leaves {end - position} messages in its outbox, and nothing failed")
        view.close()


class DurableConsumer(Consumer):
    """Handles messages, and knows the ones that it has handled before."""

    simulation: Durable  # type: ignore[assignment]

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["consumer"])
        if options["has_inbox_path"]:
            settings["inbox_path"] = str(self.world.disk.folder / f"{self.name}-inbox")
        if options["has_letter_outbox"]:
            settings["outbox_path"] = str(self.world.disk.folder / f"{self.name}-outbox")
        if self.simulation.protocol.startswith("mqtt"):
            settings["client_id"] = self.name
        self.session = getattr(self, "session", 0) + 1
        while True:
            try:
                self.m = self.simulation.connect(self, retry_connect=True, **settings)
                break
            except MessagingError as error:
                self.simulation.unexpected(self, "connect", error)
                clock.pause(0.5)
        self._subscribe()

    def open(self) -> None:
        """See ``Consumer``."""
        #: the message that arrived last, and those that an iterator held while its stream was closed on another thread.
        #: Closing a stream, unlike its instance, acknowledges the message that was handed out last
        self.current = ""
        self.held: dict[str, None] = {}
        self.is_leaving = False
        super().open()

    def do_reopen(self) -> None:
        """See ``Consumer``."""
        self._leave("iterator", "manual")
        super().do_reopen()

    def _close_streams(self) -> None:
        self._leave("manual")
        super()._close_streams()

    def _ended(self, what: Any, error: BaseException | None) -> None:
        super()._ended(what, error)
        if error is not None and what is self.stream:
            # "The id of a message that its consumer holds when the broker ends the subscription is not stored"
            self.held[self.current] = None

    def _leave(self, *ways: str) -> None:
        """Note that the streams are being closed, after which consumers of these ways may hold messages."""
        self.is_leaving = self.simulation.plan.options["way"] in ways
        if self.is_leaving:
            self.held[self.current] = None

    def _subscribe(self) -> None:
        #: when the present stream was opened
        self.since = self.world.scheduler.now
        super()._subscribe()
        self.is_leaving = False

    def _arrived(self, payload: bytes) -> str:
        message = super()._arrived(payload)
        self.current = message
        if self.is_leaving:
            self.held[message] = None
        self.simulation.arrived(message)
        return message

    def _took(self, message: str) -> None:
        super()._took(message)
        ledger, now = self.simulation.ledger, self.world.scheduler.now
        before = ledger.last.get(message)
        if before is not None:
            self.simulation.check_repeated(self, message, before)
        ledger.settlements.append(message)
        ledger.last[message] = Handled(self.lives, now, len(ledger.settlements))

    def _letter(self, payload: bytes) -> None:
        current = self.current
        super()._letter(payload)
        self.current = current  # of the other stream
        self.simulation.ledger.settlements.append(payload.rstrip(b".").decode())
