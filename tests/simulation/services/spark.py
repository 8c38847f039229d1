"""The Spark pipeline without Spark: receivers, their journal, and the reader of a query, driven in Spark's order.

Spark itself is a model here: a checkpoint (the log of offsets, and the number of micro-batches that the sink has) that
outlives the driver, and tasks that run in processes of their own. What is promised, and checked (``docs/spark.md``):

- each message whose promise resolved gets into the table, also if the driver is killed at any moment;
- no row is of a message that was not sent, or whose promise failed with another error than ``OutcomeUnknownError``;
- the rows of an offset range are the same each time until the micro-batch is committed; offsets rise by one;
- a message has one row, on AMQP one in each partition, unless a fault has made its publisher send it twice or the
  broker lose the identity of a delivery;
- rows are deleted only after their micro-batch was committed;
- rows of a receiver are in the order of publishing, unless a fault has changed the order of delivery;
- a query fails for a reason, and starts again where it was;
- an older copy of the journal in its place is refused, before anything is received, if the checkpoint has seen later
  offsets; with ``failOnDataLoss=false`` the query goes on with the rows that are left, and no offset is used twice.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from messaging import MessagingError
from messaging.execution import clock
from tests.simulation.plans import Fault, Plan, Step
from tests.simulation.services.messages import CHANNEL, Ledger, Publisher, open_outcomes
from tests.simulation.simulation import AMQP_FAULTS, HOST, MQTT_FAULTS, Role, Simulation, scheduling, span

#: the extra is installed: its readers derive from PySpark's classes, which need no Java
_HAS_SPARK: Final = all(find_spec(name) is not None for name in ("pyspark", "pyarrow", "pandas"))
if _HAS_SPARK:
    from pyspark_messaging.formats import MessagingDataSource

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.simulation.world.disk import Copy
    from tests.simulation.world.processes import Process

#: a row: partition and offset
Place = tuple[int, int]

#: errors that no fault of these runs explains: they say that files were lost, exchanged or used twice
NEVER: Final = frozenset(
    {
        "DataLossError",
        "JournalCorruptError",
        "JournalLockedError",
        "JournalMismatchError",
        "MicroBatchSkippedError",
        "TakenOverError",
    }
)
DISK_FAULTS: Final = frozenset({"full_disk", "failing_sync", "failing_write"})
#: faults that leave connections and processes as they are
_HARMLESS: Final = frozenset({"slow_sync", "wall_clock", "kill_task", *DISK_FAULTS})
#: pause before a query that failed starts again, and between two looks for new rows, seconds
_RESTART: Final = 0.5
_POLL: Final = 0.1


class Query(Role):
    """The driver of a query, which starts again after each failure, and its executors."""

    simulation: Spark

    def open(self) -> None:
        """Start the query; the first time, when the broker keeps messages for it."""
        #: Spark's log of offsets: micro-batch ``n`` is from ``offsets[n]`` to ``offsets[n + 1]``
        self.offsets: list[str] = getattr(self, "offsets", [])
        #: number of micro-batches that the sink has
        self.done: int = getattr(self, "done", 0)
        self.tasks: int = getattr(self, "tasks", 0)
        #: a copy of the journal, the offsets at which it ends, by partition, and whether it is from before the first
        #: micro-batch
        self.copy: tuple[Copy, dict[int, int], bool] | None = getattr(self, "copy", None)
        #: the copy is in the place of the journal; the options that errors have named since
        self.is_restored: bool = getattr(self, "is_restored", False)
        self.advice: dict[str, str] = getattr(self, "advice", {})
        self.executor: Process | None = None
        self.reader: Any = None
        while not self.offsets:
            self._attempt(self._started)

    # --- the query

    def _started(self) -> Any:
        """Return the reader, after a start as Spark does it."""
        if self.reader is None:
            self._make_reader()
        if not self.offsets:
            self.offsets.append(json.dumps(self.reader.initialOffset()))
        return self.reader

    def _make_reader(self) -> None:
        source = MessagingDataSource(self.simulation.reader_options() | self.advice)
        self.reader = source.streamReader(source.schema())
        self.simulation.forgotten = self.simulation.committed

    def _goes_on(self) -> None:
        """Note that the journal was accepted."""
        if not self.is_restored or self.copy is None:
            return
        seen, ends = _ends(self.offsets[self.done]), self.copy[1]
        if "failOnDataLoss" not in self.advice and any(seen[number] > ends.get(number, inf) for number in seen):
            self.simulation.broken(
                f"a journal that was put back, to {ends}, is accepted, and the checkpoint is at {seen}"
            )
        self.is_restored = False
        self.advice = {option: value for option, value in self.advice.items() if option != "failOnDataLoss"}

    def _end(self) -> str | None:
        """Plan a micro-batch, unless one is planned that has not ended; ``None`` if there are no new rows."""
        reader = self._started()
        start = self.offsets[self.done]
        # "Segments are deleted when Spark has processed their rows"
        self.simulation.committed = _ends(start)
        if self.done == len(self.offsets) - 1:
            end = json.dumps(reader.latestOffset(json.loads(start), reader.getDefaultReadLimit()))
            self._goes_on()
            if end == start:
                return None
            self.offsets.append(end)
            if self.done:
                self.note(f"commit {_ends(start)}")
                reader.commit(json.loads(start))
        return self.offsets[-1]

    def _stop(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.stop()

    def _attempt(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` of the query; if that fails the query ends, and starts again with the next call."""
        try:
            return function()
        except MessagingError as error:
            self._failed(error)
            self._stop()
            clock.pause(_RESTART)
            return None

    def _failed(self, error: MessagingError) -> None:
        name, simulation = type(error).__name__, self.simulation
        self.note(f"the query has failed: {name}: {error}")
        is_explained = not simulation.is_calm or bool(simulation.faults - {"kill_task"})
        if name.startswith("Journal"):
            is_explained = bool(simulation.faults & DISK_FAULTS)
        option = self._advised(name)
        if option is not None and option not in self.advice:
            self.advice = {**self.advice, option: "false"}
        elif name in NEVER or not is_explained:
            simulation.broken(f"the query has failed with {name}: {error}")

    def _advised(self, error: str) -> str | None:
        """Return the option with which a query goes on after an error with a journal that was put back."""
        if not self.is_restored or self.copy is None:
            return None
        if error == "DataLossError":
            return "failOnDataLoss"
        # "A copy from before the first micro-batch does not know that tasks have read its rows"
        return "failOnSkippedBatch" if error == "MicroBatchSkippedError" and self.copy[2] else None

    def _micro_batch(self, times: int = 1) -> bool:
        """Run a micro-batch, its tasks so many times; return ``False`` if there are no new rows."""
        end = self._end()
        if end is None:
            return False
        begin = self.offsets[self.done]
        for _ in range(times):
            self._process(begin, end)
        self.simulation.stored(_ends(begin), _ends(end))
        self.done += 1
        return True

    def _process(self, begin: str, end: str) -> None:
        """Run the tasks of a micro-batch, and check its rows."""
        partitions = self.reader.partitions(json.loads(begin), json.loads(end))
        self._goes_on()
        places: list[Place] = []
        for partition in partitions:
            places += self._run_task(pickle.dumps((self.reader, partition)))
        first, last = _ends(begin), _ends(end)
        gone = self.simulation.gone
        expected = [
            (number, at)
            for number in sorted(last)
            for at in range(first.get(number, 0), last[number])
            if (number, at) not in gone
        ]
        if sorted(places) != expected:
            self.simulation.broken(f"the micro-batch from {first} to {last} has the rows {places}"[:500])

    def _run_task(self, task: bytes) -> list[Place]:
        """Run a task on an executor, again if that is killed; return its rows."""
        while True:
            self.tasks += 1
            self.executor = executor = self.world.process(f"executor.{self.tasks}")
            ended: list[list[dict[str, Any]] | MessagingError] = []

            def run(ended: list[Any] = ended) -> None:
                reader, partition = pickle.loads(task)  # what was pickled before
                try:
                    ended.append([row for batch in reader.read(partition) for row in batch.to_pylist()])
                except MessagingError as error:
                    ended.append(error)

            executor.start(run, "task")
            while not ended and executor.is_alive:
                clock.pause(0.002)
            self.executor = None
            if not ended:
                self.note("the executor is gone: the task runs again")
                continue
            outcome = ended[0]
            if isinstance(outcome, MessagingError):
                raise outcome
            return [self.simulation.has_read(row) for row in outcome]

    # --- steps

    def do_batch(self, count: int) -> None:
        """Step: run so many micro-batches, as far as there are rows."""
        for _ in range(count):
            if not self._attempt(self._micro_batch):
                clock.pause(_POLL)

    def do_interrupt(self) -> None:
        """Step: end the query after the tasks of a micro-batch, before the sink has it; it runs again."""

        def interrupt() -> None:
            end = self._end()
            if end is not None:
                self._process(self.offsets[self.done], end)
                self._stop()

        self._attempt(interrupt)

    def do_read_again(self) -> None:
        """Step: run a micro-batch whose tasks run twice."""
        self._attempt(lambda: self._micro_batch(2))

    def do_look(self) -> None:
        """Step: read the journal beside the query, as a batch read does."""
        simulation = self.simulation
        first, last = simulation.committed, simulation.ends
        if not self.offsets or not last:
            return

        def look() -> None:
            found = self._read()
            for number, end in last.items():
                for at in range(first.get(number, 0), end):
                    if (number, at) not in found and (number, at) not in simulation.gone:
                        simulation.broken(f"row {at} of partition {number} is not in the journal, and not committed")

        self._attempt(look)

    def _read(self) -> set[Place]:
        """Read the journal as a batch read does, and return the places of its rows."""
        source = MessagingDataSource(self.simulation.reader_options())
        reader: Any = source.reader(source.schema())
        return {
            self.simulation.has_read(row)
            for task in reader.partitions()
            for batch in reader.read(task)
            for row in batch.to_pylist()
        }

    def do_copy(self) -> None:
        """Step: stop the query, and copy its journal."""
        self._stop()

        def copy() -> None:
            ends: dict[int, int] = {}
            for number, at in self._read():
                ends[number] = max(ends.get(number, 0), at + 1)
            self.copy = self.world.disk.copy("journal"), ends, self.done == 0

        if self.offsets and not self.is_restored:
            self._attempt(copy)

    def do_put_back(self) -> None:
        """Step: stop the query, and put the copy of its journal in the place of that."""
        self._stop()
        if self.copy is None or self.is_restored:
            return
        copied, ends, _ = self.copy

        def put_back() -> None:
            rows = self._read()
            self.world.disk.restore("journal", copied)
            self.simulation.lost({(number, at) for number, at in rows if at >= ends.get(number, 0)}, self.offsets[-1])
            self.is_restored = True

        self._attempt(put_back)

    def do_restart(self) -> None:
        """Step: stop the query, and start it again with its checkpoint."""
        self._stop()
        self._attempt(self._started)

    def do_available_now(self) -> None:
        """Step: run the query with the trigger ``availableNow``."""
        self._stop()

        def run() -> None:
            self._make_reader()
            self.reader.prepareForTriggerAvailableNow()
            while self._micro_batch():
                pass
            self._stop()

        self._attempt(run)

    def rest(self) -> None:
        """Process what is left."""
        while not self.simulation.is_closing and self._attempt(self._micro_batch):
            pass
        clock.pause(_POLL)

    def close(self) -> None:
        """Stop the query."""
        self._stop()


def _ends(offsets: str) -> dict[int, int]:
    """Return the offsets of a checkpoint, by partition."""
    return {int(number): end for number, end in json.loads(offsets)["offsets"].items()}


class Spark(Simulation):
    """Publishers, and a query that reads what they publish."""

    name = "spark"
    protocols: ClassVar[tuple[str, ...]] = ("mqtt311", "mqtt5", "amqp") if _HAS_SPARK else ()

    def begin(self) -> None:
        """See ``Simulation``."""
        self.ledger = Ledger()
        options = self.plan.options
        self.faults = {fault.name for fault in self.plan.faults}
        self.is_calm = options["hold_up"] == 0.0 or options["longest"] <= 0.2
        #: what was read, by place
        self.rows: dict[Place, dict[str, Any]] = {}
        #: before which rows may be deleted, and up to which the sink has them, by partition
        self.committed: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        #: before which rows may have been deleted when the query started last, by partition
        self.forgotten: dict[int, int] = {}
        #: rows that a checkpoint knows and a journal that was put back lacks; messages that may be lost with such a one
        self.gone: set[Place] = set()
        self.may_be_lost: set[str] = set()
        self.has_lost = False
        #: the places of each message
        self.places: dict[str, list[Place]] = {}
        self.query = Query(self, "query")
        self.roles.append(self.query)
        for number in range(options["publishers"]):
            self.roles.append(Publisher(self, f"publisher-{number + 1}"))

    def run(self) -> None:
        """See ``Simulation``. The lock files of groups are files of the world."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.world.disk.folder)
        try:
            super().run()
        finally:
            tempfile.tempdir = before

    def reader_options(self) -> dict[str, str]:
        """Return the options of the query, as Spark hands them over."""
        url = f"amqp://guest:guest@{HOST}" if self.protocol == "amqp" else f"mqtt://{HOST}"
        version = {} if self.protocol == "amqp" else {"version": "5" if self.protocol == "mqtt5" else "3.1.1"}
        path = str(self.world.disk.folder / "journal")
        return {"url": url, "journalPath": path, **version, **self.plan.options["query"]}

    # --- books

    def has_read(self, row: dict[str, Any]) -> Place:
        """Compare a row with what was read before at its place, which is returned."""
        place = row["partition"], row["offset"]
        known = self.rows.setdefault(place, row)
        if known is not row:
            if known != row:
                self.broken(f"row {place} was {known}, and is {row}"[:1000])
            return place
        message = row["value"].rstrip(b".").decode()
        if message not in self.ledger.sent:
            self.broken(f"row {place} is of a message that was not sent: {message!r}")
        if row["channel"] != CHANNEL:
            self.broken(f"row {place} has the channel {row['channel']}")
        places = self.places.setdefault(message, [])
        # "A row that was deleted before is not known any more"
        places[:] = [(number, at) for number, at in places if at >= self.forgotten.get(number, 0)]
        places.append(place)
        return place

    def lost(self, places: set[Place], planned: str) -> None:
        """Note rows that went with the journal, which ends before them now.

        Args:
            places: of the rows.
            planned: the last offsets in the checkpoint. "If no checkpoint knows of them, [...] the query cannot detect
                that": their offsets are used again.
        """
        ends = _ends(planned)
        for place in sorted(places):
            number, at = place
            message = self.rows[place]["value"].rstrip(b".").decode()
            if message not in self.ledger.handled:
                self.may_be_lost.add(message)
            if at < ends.get(number, 0):
                self.gone.add(place)
            else:
                del self.rows[place]
                self.places[message].remove(place)
        self.has_lost = True

    def stored(self, begin: dict[int, int], end: dict[int, int]) -> None:
        """Note that the sink has a micro-batch."""
        handled = self.ledger.handled
        count = 0
        for number in sorted(end):
            for at in range(begin.get(number, 0), end[number]):
                row = self.rows.get((number, at))
                if row is not None and (number, at) not in self.gone:
                    message = row["value"].rstrip(b".").decode()
                    handled[message] = handled.get(message, 0) + 1
                    count += 1
        self.ends = end
        self.world.note("sink", f"has {count} rows up to {end}")

    def is_at_rest(self) -> bool:
        """See ``Simulation``."""
        ledger = self.ledger
        return all(
            state != "sent"
            and (state not in ("confirmed", "stored") or message in ledger.handled or message in self.may_be_lost)
            for message, state in ledger.sent.items()
        )

    def judge(self) -> None:
        """See ``Simulation``."""
        ledger = self.ledger
        may_arrive = open_outcomes(self.plan)
        for message, state in ledger.sent.items():
            if state == "sent":
                self.broken(f"the promise of {message} has no outcome")
            elif state in ("confirmed", "stored") and message not in ledger.handled:
                if message not in self.may_be_lost:
                    self.broken(f"{message} was {state}, and is lost")
            elif state not in ("confirmed", "stored") and state not in may_arrive and message in self.places:
                self.broken(f"{message} arrived although its promise failed with {state}")
        if self._is_once():
            for message, places in self.places.items():
                # "may be redelivered to another receiver, and is then stored in its partition, too"
                known = {number for number, _ in places} if self.protocol == "amqp" else {0}
                if len(places) > len(known):
                    self.broken(f"{message} has the rows {places}")
        if self.plan.options["query"]["receivers"] == "1" and self._is_ordered():
            self._check_order()

    def _is_once(self) -> bool:
        """Return whether each message is delivered with one identity: nothing has happened to publishers and broker.

        "once, for each delivery with its own packet identifier or message id of the sender"
        """
        if self.has_lost:
            return False
        return all(
            fault.name in _HARMLESS or fault.arguments.get("role") == "query" for fault in self.plan.faults
        ) and (self.is_calm and not any(step.name == "reopen" for step in self.plan.steps))

    def _is_ordered(self) -> bool:
        """Return whether messages are delivered in the order of publishing.

        What a receiver did not acknowledge comes again, on AMQP maybe behind later messages.
        """
        names = {fault.name for fault in self.plan.faults if fault.name not in _HARMLESS}
        return not names and self._is_once()

    def _check_order(self) -> None:
        last: dict[str, int] = {}
        for message in self.ledger.handled:
            publisher, number = message.split(":")
            if int(number) < last.get(publisher, -1):
                self.broken(f"{message} has its row behind {publisher}:{last[publisher]}")
                return
            last[publisher] = int(number)

    # --- faults

    def fault_kill_task(self) -> None:
        """Fault: an executor is killed while it runs a task."""
        executor = self.query.executor
        if executor is not None:
            executor.kill()

    # --- plans

    @classmethod
    def make_plan(cls, random: random.Random, protocol: str) -> Plan:
        """See ``Simulation``."""
        is_mqtt = protocol.startswith("mqtt")
        publishers = random.choice((1, 1, 2))
        publisher: dict[str, Any] = {
            "timeout": random.choice((20.0, 60.0, 600.0)),
            "reconnect_max": random.choice((1.0, 5.0)),
            "keepalive" if is_mqtt else "heartbeat": random.choice((2, 10)),
        }
        query: dict[str, str] = {
            "channel": random.choice((CHANNEL, "orders/+", "orders/#")),
            "qos": random.choice(("1", "1", "2")) if is_mqtt else "1",
            "receivers": random.choice(("1", "1", "1", "2")),
            "reconnect_max": random.choice(("1", "5")),
            "keepalive" if is_mqtt else "heartbeat": random.choice(("2", "10")),
            **cls._bounds(random),
        }
        steps: list[Step] = []
        for number in range(publishers):
            name = f"publisher-{number + 1}"
            may_reopen = random.random() < 0.3
            for _ in range(random.randint(10, 22)):
                chosen = random.random()
                if chosen < 0.55:
                    count, size = random.choice((1, 1, 2, 5, 20)), random.choice((0, 0, 40, 400, 5000))
                    steps.append(Step(name, "publish", {"count": count, "size": size}))
                elif chosen < 0.8 or not may_reopen:
                    steps.append(Step(name, "pause", {"seconds": span(random, 1e-3, 3.0)}))
                elif chosen < 0.95:
                    steps.append(Step(name, "wait", {}))
                else:
                    steps.append(Step(name, "reopen", {}))
        steps += [Step("query", *cls._query_step(random)) for _ in range(random.randint(18, 36))]
        roles = sorted({step.role for step in steps})
        options = {
            **scheduling(random),
            "publishers": publishers,
            "publisher": publisher,
            "publish": {"qos": random.choice((1, 2))} if is_mqtt else {"guaranteed_delivery": True},
            "is_durable": False,
            "query": query,
        }
        faults = cls._faults(random, protocol, roles)
        if random.random() < 0.25:
            begin = next(at for at, step in enumerate(steps) if step.role == "query")
            for at, name in zip(
                sorted(random.choices(range(begin, len(steps)), k=2)), ("copy", "put_back"), strict=True
            ):
                steps.insert(at + (name == "put_back"), Step("query", name, {}))
        return Plan(options, tuple(steps), tuple(faults))

    @staticmethod
    def _bounds(random: random.Random) -> dict[str, str]:
        drawn: dict[str, tuple[str | None, ...]] = {
            "journalBytes": (None, None, "3k", "40k"),
            "prefetch": (None, "1", "5", "100"),
            "maxRowsPerBatch": (None, None, "1", "7"),
            "maxBytesPerBatch": (None, None, "1k", "10k"),
            "minPartitions": (None, None, "3"),
            "availableNowQuiet": ("0.2", "1"),
            "availableNowTimeout": ("5", "20"),
        }
        chosen = ((name, random.choice(values)) for name, values in drawn.items())
        return {name: value for name, value in chosen if value is not None}

    @staticmethod
    def _query_step(random: random.Random) -> tuple[str, dict[str, Any]]:
        steps: tuple[tuple[str, dict[str, Any]], ...] = (
            ("batch", {"count": random.choice((1, 1, 2, 5))}),
            ("pause", {"seconds": span(random, 1e-3, 2.0)}),
            ("interrupt", {}),
            ("read_again", {}),
            ("look", {}),
            ("restart", {}),
            ("available_now", {}),
        )
        return random.choices(steps, (12, 8, 2, 2, 2, 1.5, 0.5))[0]

    @classmethod
    def _faults(cls, random: random.Random, protocol: str, roles: list[str]) -> list[Fault]:
        if random.random() < 0.1:
            return []
        only_query = random.random() < 0.5
        whom = ["query"] if only_query else [*roles, "query"]

        def link() -> str | None:
            return random.choice(whom if only_query else [*whom, None])

        makers: list[Callable[[], tuple[str, dict[str, Any]]]] = [
            lambda: ("slow_sync", {"seconds": span(random, 0.1, 10.0), "longest": span(random, 0.01, 1.0)}),
            lambda: ("wall_clock", {"role": random.choice(roles), "offset": random.choice((-3600.0, 5.0, 86_400.0))}),
            *[lambda: ("kill_task", {})] * 2,
            *[
                lambda: (
                    "full_disk",
                    {"seconds": span(random, 0.05, 30.0), "left": random.choice((0, 100, 1000, 10_000))},
                )
            ]
            * 2,
            lambda: ("failing_sync", {"count": random.choice((1, 1, 3))}),
            lambda: ("failing_write", {"count": random.choice((1, 1, 3))}),
            *[lambda: ("cut", {"role": link()})] * 4,
            *[lambda: ("black_hole", {"role": link(), "seconds": span(random, 0.01, 60.0)})] * 2,
            lambda: ("stall", {"role": link(), "seconds": span(random, 0.01, 10.0)}),
            *[
                lambda: (
                    "kill",
                    {
                        "role": random.choice(whom),
                        "seconds": span(random, 0.01, 10.0),
                        "vanishes": random.random() < 0.4,
                    },
                )
            ]
            * 5,
        ]
        if not only_query:
            kinds = AMQP_FAULTS if protocol == "amqp" else MQTT_FAULTS
            makers += [
                lambda: ("refuse", {"seconds": span(random, 0.01, 20.0)}),
                lambda: ("silence", {"seconds": span(random, 0.01, 20.0)}),
                lambda: ("no_names", {"seconds": span(random, 0.01, 20.0)}),
                *[lambda: ("restart_broker", {"seconds": span(random, 0.01, 10.0), "is_kill": random.random() < 0.5})]
                * 2,
                *[lambda: ("broker", {"seconds": span(random, 0.1, 20.0), **random.choice(kinds)})] * 2,
            ]
        faults = []
        for _ in range(random.choice((1, 2, 2, 3, 3, 4, 6))):
            name, arguments = random.choice(makers)()
            faults.append(Fault(span(random, 1e-2, 12.0), name, arguments))
        return sorted(faults, key=lambda fault: fault.at)
