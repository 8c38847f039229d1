"""``messaging demo``: a tour of the toolkit in acts, each with checked results.

An act is skipped, and reported as skipped, if the instance does not announce the features that it needs. To add an
act, write a function and list it in ``ACTS``.
"""

import contextlib
import itertools
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions
from messaging.cli.output import ExitCode, one_line, show
from messaging.errors import MessagingError
from messaging.instance import Messaging
from messaging.model import AcknowledgeMessageContext, Features, Message

DEFAULT_URL: Final = "memory://demo"
#: how long to wait for an expected message, seconds
PATIENCE: Final = 10.0
#: some brokers keep a queue for ever: with one name and channel for all runs, only one is left behind
_QUEUE: Final = "messaging-demo"
_JOBS: Final = "demo/jobs"


class SensorReading(BaseModel):
    """The measurement of a sensor."""

    sensor: str
    celsius: float


class Alarm(BaseModel):
    """A reading as a handler receives it: the fields that it needs, converted."""

    sensor: str
    celsius: int
    level: str = "high"


class Job(BaseModel):
    """Work to be done once, by the first free worker."""

    run: str
    number: int


class Stage:
    """The instance, channels and output of the acts.

    Attributes:
        m: the instance.
        run: distinguishes the channels and jobs of this run from those of other runs at the same broker.
        reliable: keywords for confirmed and acknowledged delivery, where the instance offers a choice.
        act: title of the current act.
        checks: the results so far: act, name of the check, expected and found value.
    """

    def __init__(self, m: Messaging) -> None:
        self.m = m
        self.run = secrets.token_hex(4)
        is_offered = Features.EXTENSION_GUARANTEED_DELIVERY in m.features
        self.reliable: dict[str, Any] = {"guaranteed_delivery": True} if is_offered else {}
        self.act = ""
        self.checks: list[tuple[str, str, Any, Any]] = []

    def channel(self, name: str) -> str:
        """Return a channel of this run."""
        return f"demo/{self.run}/{name}"

    def say(self, text: str) -> None:
        """Write a line about the current act. Thread safe."""
        show(Text(f"   {one_line(text)}"))

    def check(self, what: str, expected: Any, found: Any) -> None:
        """Record a result that must be as expected."""
        self.checks.append((self.act, what, expected, found))


def readings(stage: Stage) -> None:
    """Typed readings of three rooms; one subscriber for all, one for the laboratory."""
    m = stage.m
    sent = [
        (room, SensorReading(sensor=f"{room}-{number}", celsius=warmth + number / 2))
        for number in (1, 2, 3)
        for room, warmth in (("hall", 19.0), ("lab", 21.0), ("roof", 4.5))
    ]
    with (
        m.subscribe(stage.channel("+/temperature"), SensorReading, **stage.reliable) as building,
        m.subscribe(stage.channel("lab/#"), SensorReading, **stage.reliable) as laboratory,
    ):
        promises = [m.publish(stage.channel(f"{room}/temperature"), each, **stage.reliable) for room, each in sent]
        for promise in promises:
            promise.result()
        stage.say(f"{len(sent)} readings published, the broker has them all")
        arrived = []
        for _ in sent:
            message = building.receive(PATIENCE)
            reading: SensorReading = message.value()
            arrived.append(reading)
            stage.say(f"{message.context.channel}: {reading.sensor} measures {reading.celsius:.1f} °C")
        in_laboratory = [laboratory.receive(PATIENCE).value() for _ in range(3)]
        stage.say(f"the laboratory's own subscriber got {', '.join(each.sensor for each in in_laboratory)}")
    stage.check("readings at '+/temperature'", len(sent), len(arrived))
    stage.check("sum of all, °C", sum(each.celsius for _, each in sent), sum(each.celsius for each in arrived))
    stage.check("sensors at 'lab/#'", ["lab-1", "lab-2", "lab-3"], sorted(each.sensor for each in in_laboratory))


def jobs(stage: Stage) -> None:
    """Two workers compete for the jobs of one queue: each job is done once."""
    m = stage.m
    numbers = range(1, 21)
    done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def worker(name: str) -> Callable[[Job], None]:
        def work(job: Job) -> None:
            if job.run == stage.run:  # others are left over from a run that was interrupted
                time.sleep(0.01)  # the work itself
                done.put((name, job.number))

        return work

    with contextlib.ExitStack() as workers:
        for name in ("Anna", "Ben"):
            # confirmed by the broker when this returns; a job is acknowledged when its worker returns
            workers.enter_context(m.on(_JOBS, worker(name), queue=_QUEUE, prefetch=1, **stage.reliable))
        for number in numbers:
            m.publish(_JOBS, Job(run=stage.run, number=number), **stage.reliable).result()
        finished = [done.get(timeout=PATIENCE) for _ in numbers]
    for name in ("Anna", "Ben"):
        own = [str(number) for who, number in finished if who == name]
        stage.say(f"{name} did {len(own)} jobs: {' '.join(own)}")
    stage.check("jobs done", len(numbers), len(finished))
    stage.check("different ones among them", len(numbers), len({number for _, number in finished}))
    stage.check("who did any", ["Anna", "Ben"], sorted({name for name, _ in finished}))


def poison(stage: Stage) -> None:
    """A message that no consumer can process is delivered three times, then dead-lettered with its reason."""
    m = stage.m
    attempts: list[str] = []
    digested: queue.SimpleQueue[str] = queue.SimpleQueue()

    def digest(message: Message) -> None:
        order = message.value(str)
        if order.startswith("poison"):
            attempts.append(order)
            stage.say(f"delivery {len(attempts)} of {order!r} is rejected")
            message.reject()
        else:
            message.acknowledge()
            digested.put(order)

    dead, rules = stage.channel("dead"), {"acknowledge": "manual", "max_deliveries": 3, **stage.reliable}
    with (
        m.subscribe(dead, **stage.reliable) as dead_letters,
        m.subscribe(stage.channel("orders"), dead_letter_channel=dead, **rules) as orders,
    ):
        orders.subscribe(digest)
        for order in ("soup", "poison", "salad", "cake"):
            m.publish(stage.channel("orders"), order, **stage.reliable).result()
        served = [digested.get(timeout=PATIENCE) for _ in range(3)]
        letter = dead_letters.receive(PATIENCE)
        reason = letter.context.extensions.get(Features.EXTENSION_HEADERS, {}).get("x-dead-letter-reason", "not told")
        stage.say(f"served: {', '.join(served)}; dead letter: {letter.value(str)!r}, reason: {reason}")
    stage.check("orders served", ["cake", "salad", "soup"], sorted(served))
    stage.check("deliveries of the poison", 3, len(attempts))
    stage.check("dead letter", "poison", letter.value(str))


def retained(stage: Stage) -> None:
    """A status that was published before its subscriber connected."""
    m = stage.m
    status = stage.channel("status")
    m.publish(status, "online", retain=True, **stage.reliable).result()
    stage.say("'online' published without a subscriber")
    try:
        with m.subscribe(status, **stage.reliable) as late:
            message = late.receive(PATIENCE)
            stage.say(f"a late subscriber receives: {message.value(str)!r}")
    finally:
        m.publish(status, b"", retain=True, **stage.reliable).result()  # an empty one clears it
    stage.check("status of a late subscriber", "online", message.value(str))
    stage.check("known to be retained", True, message.context.extensions.get(Features.EXTENSION_RETAIN, False))


def acknowledge_filter(stage: Stage) -> None:
    """A filter acknowledges plausible messages before they enter the stream; the others are dead-lettered."""
    m = stage.m
    verdicts: list[str] = []

    def note(message: Message) -> None:
        # every received message has such a context
        verdicts.append(cast("AcknowledgeMessageContext", message.context).acknowledge_state.name)

    builder = m.acknowledge_context_builder().filter_acknowledge(lambda each: each.value(SensorReading).celsius < 60)
    context = (
        builder.post_acknowledge(note)
        .message_context_builder()
        .channel(stage.channel("boiler"))
        .extensions({Features.EXTENSION_GUARANTEED_DELIVERY: True} if stage.reliable else {})
        .extension_entry(Features.EXTENSION_DEAD_LETTER_CHANNEL, stage.channel("implausible"))
        .build_context()
    )
    warmth = (48.0, 950.0, 49.5, 50.0, 1200.0, 51.5)
    with (
        m.subscribe(stage.channel("implausible"), SensorReading, **stage.reliable) as dead_letters,
        m.subscription.subscribe(context) as boiler,
    ):
        for celsius in warmth:
            m.publish(
                stage.channel("boiler"), SensorReading(sensor="boiler", celsius=celsius), **stage.reliable
            ).result()
        plausible = [boiler.receive(PATIENCE).value(SensorReading).celsius for _ in range(4)]
        implausible = [dead_letters.receive(PATIENCE).value().celsius for _ in range(2)]
        stage.say(f"in the stream: {plausible}; dead-lettered: {implausible}")
        stage.say(f"states in the post-acknowledge callback: {' '.join(verdicts)}")
    stage.check("sum in the stream, °C", 199.0, sum(plausible))
    stage.check("dead letters, °C", [950.0, 1200.0], sorted(implausible))
    stage.check("rejected", 2, verdicts.count("REJECTED"))


def questions(stage: Stage) -> None:
    """Requests to functions: one reply each, or many replies until the requester stops."""
    m = stage.m

    def half(number: int) -> int:
        return number // 2

    def countdown(start: int) -> Iterator[int]:
        yield from range(start, 0, -1)

    with m.reply(stage.channel("half"), half), m.reply(stage.channel("countdown"), countdown):
        halves = [m.request(stage.channel("half"), number, int, timeout=PATIENCE).result() for number in (2, 40, 96)]
        stage.say(f"half of 2, 40 and 96: {halves}")
        with m.request_many(stage.channel("countdown"), 1000, int, timeout=PATIENCE) as replies:
            counted = [reply.value(int) for reply in itertools.islice(replies, 3)]
        stage.say(f"a countdown from 1000, stopped after three: {counted}")
    stage.check("sum of the halves", 69, sum(halves))
    stage.check("countdown", [1000, 999, 998], counted)


def events(stage: Stage) -> None:
    """Typed events in this process: handlers with converted fields, with history, and for unhandled events."""
    # only this act needs them, and importing them takes time
    from messaging.services import ServiceRegistry
    from messaging.typedevent import RangePolicy, TypedEventBus

    alarms: list[Alarm] = []
    rest: list[str] = []
    caught_up: list[float] = []
    with TypedEventBus(ServiceRegistry(), history={"readings/*": RangePolicy.at_most(10)}) as bus:
        bus.on("readings/+", handler=alarms.append, type=Alarm, filter="(celsius>=60)")
        bus.on_unhandled(handler=lambda topic, _: rest.append(topic))
        for sensor, celsius in (("boiler", 58.0), ("boiler", 71.5), ("attic", 21.0), ("oven", 180.0)):
            bus.deliver(SensorReading(sensor=sensor, celsius=celsius), f"readings/{sensor}")
        bus.on("readings/*", handler=lambda reading: caught_up.append(reading["celsius"]), history=3)
        bus.flush().result(PATIENCE)
        stage.say(f"alarms: {', '.join(f'{each.sensor} {each.celsius}' for each in alarms)}")
        stage.say(f"unhandled: {', '.join(rest)}; a late handler received {caught_up} from the history")
    stage.check("alarms", ["boiler", "oven"], [each.sensor for each in alarms])
    stage.check("unhandled", ["readings/boiler", "readings/attic"], rest)
    stage.check("sum of the last three, °C", 272.5, sum(caught_up))


class Act(NamedTuple):
    """A part of the demo.

    Attributes:
        play: the function; its docstring is shown.
        needs: the features that the act requires.
    """

    title: str
    play: Callable[[Stage], None]
    needs: tuple[str, ...]


ACTS: Final = (
    Act("Publish and subscribe, typed", readings, (Features.PUBLISH_SUBSCRIBE, Features.WILDCARDS)),
    Act("Point to point: a work queue", jobs, (Features.POINT_TO_POINT, Features.EXTENSION_QUEUE)),
    Act(
        "Redelivery and dead letters",
        poison,
        (Features.ACKNOWLEDGE, Features.EXTENSION_MAX_DELIVERIES, Features.EXTENSION_DEAD_LETTER_CHANNEL),
    ),
    Act("Retained messages", retained, (Features.EXTENSION_RETAIN,)),
    Act(
        "Direct acknowledgement",
        acknowledge_filter,
        (Features.ACKNOWLEDGE, Features.EXTENSION_DEAD_LETTER_CHANNEL),
    ),
    Act("Requests and replies", questions, (Features.REPLY_TO, Features.REPLY_TO_MANY_PUBLISH)),
    Act("Events within the process", events, ()),
)


@options.command
def demo(broker: BrokerOptions) -> int:
    """Take a short tour of the toolkit, on a broker inside this process or on the one at URL.

    $MESSAGING_URL is ignored: the demo publishes only to a broker that the command line names. Ends by itself after a
    few seconds, with 1 if a result is wrong.
    """
    if not broker.is_named:
        broker = replace(broker, url=DEFAULT_URL)
    started = time.monotonic()
    with broker.connect("demo") as m:
        dto = m.runtime.get_runtime_dto()
        show(Text(f"connected to {dto.connection_uri}: {', '.join(dto.protocols)}, by {dto.provider_name}"))
        stage = Stage(m)
        skipped = [act.title for number, act in enumerate(ACTS, 1) if not _play(act, number, stage)]
    return _summary(stage.checks, skipped, time.monotonic() - started)


def _play(act: Act, number: int, stage: Stage) -> bool:
    """Play one act; return whether the instance announces the features that it needs."""
    stage.act = act.title
    show(Text(f"\n{number}  {act.title}", style="bold"))
    missing = [feature for feature in act.needs if feature not in stage.m.features]
    if missing:
        stage.say(f"skipped: this instance does not announce {', '.join(missing)}")
        return False
    stage.say(str(act.play.__doc__))
    try:
        act.play(stage)
    except MessagingError as error:
        stage.check("played to its end", True, f"{type(error).__name__}: {error}")
    except queue.Empty:
        stage.check("played to its end", True, f"an expected message did not arrive within {PATIENCE:g} s")
    return True


def _summary(checks: list[tuple[str, str, Any, Any]], skipped: list[str], seconds: float) -> ExitCode:
    table = Table("act", "check", "expected", "found", "", box=None, pad_edge=False, header_style="bold")
    wrong = 0
    for act, what, expected, found in checks:
        is_right = expected == found
        wrong += not is_right
        mark = Text("ok", style="green") if is_right else Text("WRONG", style="bold red")
        table.add_row(act, what, one_line(_shown(expected)), one_line(_shown(found)), mark)
    show("", table, "")
    verdict = f"{len(checks)} checks, {wrong} wrong" if wrong else f"{len(checks)} checks, all right"
    if skipped:
        verdict += f"; skipped: {', '.join(skipped)}"
    show(Text(f"{verdict}; {seconds:.1f} s", style="bold"))
    return ExitCode.FAILED if wrong else ExitCode.OK


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
