"""The programs of the service ``gateway``: devices, the gateway, and the receiver at the other broker."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging import Message, MessagingError
from messaging.errors import ClosedError, ConfigurationError
from messaging.execution import clock
from messaging.gateway import Gateway, GatewaySettings
from messaging.gateway.control import call
from messaging.gateway.dead_letters import Selection, letters
from messaging.journal import Journal
from messaging.services import ServiceRegistry
from tests.simulation.services.gateway_ledger import EQUAL, Arrival, Sent
from tests.simulation.simulation import Role

if TYPE_CHECKING:
    from messaging import Promise
    from messaging.gateway.reports import RouteDTO
    from tests.simulation.services.gateway import GatewayWorld

#: time that a promise may take beyond its deadline, virtual seconds. Threads are held up for up to 20 s at each point
SLACK: Final = 60.0
FOLDER: Final = "gateway"
#: the part of the channel of a target that says it was moved
MOVED: Final = "-moved"


class Device(Role):
    """Publishes messages that are numbered through all its lives."""

    simulation: GatewayWorld

    def open(self) -> None:
        """Connect."""
        for sent in self.simulation.ledger.sent.values():
            if sent.device == self.name and sent.state == "sent":
                sent.state = "killed"
                sent.may_repeat = True
        self.number = getattr(self, "number", 0)
        self.promises: list[Promise[None]] = []
        self._connect()

    def _connect(self) -> None:
        options = self.simulation.plan.options
        settings = dict(options["device"])
        if self.simulation.protocol.startswith("mqtt"):
            settings["client_id"] = self.name
        self.m = self.simulation.connect(self, retry_connect=True, **settings)

    def do_publish(self, kind: str, count: int, size: int, qos: int) -> None:
        """Step: publish so many messages of a kind at once."""
        for _ in range(count):
            self._publish(kind, size, qos)

    def _publish(self, kind: str, size: int, qos: int) -> None:
        simulation = self.simulation
        number = self.number
        self.number += 1
        text = f"{self.name}:{number}"
        channel, payload = f"plant/{self.name}/{kind}", text.encode().ljust(size, b".")
        if kind == "equal":
            text, channel, payload = f"{EQUAL}:{text}", f"plant/{self.name}/data", EQUAL.encode()
        sent = simulation.ledger.sent[text] = Sent(
            self.name, "data" if kind == "equal" else kind, number, qos, self.world.scheduler.now,
            simulation.epoch("data" if kind == "equal" else kind),
        )  # fmt: skip
        if kind == "objects":
            sent.is_bad, sent.is_filtered = number % 7 == 3, number % 5 == 4
            value: Any = "broken" if sent.is_bad else 32 + number % 9 * 1.8
            payload = json.dumps(
                {"text": text, "t": value, "quality": "bad" if sent.is_filtered else "good", "pad": "x" * size}
            ).encode()
            sent.is_bad = sent.is_bad and not sent.is_filtered
        if kind == "batch":
            payload = json.dumps({"text": text, "pad": "x" * size}).encode()
        extensions: dict[str, Any] = {}
        if simulation.protocol.startswith("mqtt"):
            extensions["qos"] = qos
            if kind == "state":
                extensions["retain"] = True
        else:
            extensions["guaranteed_delivery"] = True
        connection = self.m.connection_state.value  # another object after each loss
        try:
            promise = self.m.publish(channel, payload, timeout=simulation.plan.options["timeout"], **extensions)
        except MessagingError as error:
            self._settled(text, sent, error)
            return
        self.promises.append(promise)

        def settle() -> None:
            if self.m.connection_state.value is not connection or simulation.has_lost(self.name, sent.at):
                sent.may_repeat = True
            self._settled(text, sent, promise.exception(0))

        promise.listen(settle)

    def _settled(self, text: str, sent: Sent, error: BaseException | None) -> None:
        sent.state = "confirmed" if error is None else type(error).__name__
        is_sure = sent.qos > 0 or not self.simulation.protocol.startswith("mqtt")
        sent.is_owed = error is None and is_sure and self.simulation.epoch(sent.kind) == sent.epoch >= 0
        self.note(f"{text} {sent.state}")

    def do_wait(self) -> None:
        """Step: wait for all outcomes."""
        for promise in self.promises:
            promise.exception(self.simulation.plan.options["timeout"] + SLACK)
        self.promises.clear()

    def do_reopen(self) -> None:
        """Step: close the instance, and open another."""
        self.m.close()
        self._connect()

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class Receiver(Role):
    """Takes what arrives at the other broker, in one subscription that the broker keeps."""

    simulation: GatewayWorld

    def open(self) -> None:
        """Connect and subscribe."""
        self.slow = 0.0
        options = self.simulation.plan.options
        settings = dict(options["receiver"])
        url = self.simulation.cloud_url()
        self.note(f"connect {url} {settings}")
        if options["target"].startswith("mqtt"):
            settings["client_id"] = "receiver"
        self.m = messaging.connect(url, retry_connect=True, **settings)
        where: dict[str, Any] = {"qos": 2} if options["target"].startswith("mqtt") else {"queue": "cloud"}
        self.where = where
        self._subscribe()

    def _subscribe(self) -> None:
        self.is_over = False
        while True:
            try:
                self.stream: Any = self.m.on("cloud/#", self._take, keep_subscription=True, **self.where)
                self.stream.ready.result(SLACK)
            except MessagingError as error:
                self.note(f"cannot subscribe: {type(error).__name__}: {error}")
                clock.pause(0.5)
            else:
                break
        self.stream.closed.add_done_callback(lambda closed, stream=self.stream: self._ended(stream, closed))

    def _ended(self, stream: Any, closed: Any) -> None:
        if stream is self.stream and closed.exception(0) is not None:
            self.is_over = True

    def rest(self) -> None:
        """Subscribe again if the broker has ended the subscription."""
        if self.is_over:
            self._subscribe()

    def _take(self, message: Message) -> None:
        context = message.context
        _, route, device = (context.channel or "").split("/")
        extensions = context.extensions
        arrival = Arrival(extensions.get("messageId"), "redelivered" in extensions)
        route = route.removesuffix(MOVED)
        if route == "batch":
            for line in message.payload.splitlines():
                self._arrived(route, json.loads(line)["text"], arrival)
        elif route == "objects":
            self._object(json.loads(message.payload), device, arrival)
        else:
            self._arrived(route, message.payload.rstrip(b".").decode(), arrival)
        if self.slow:
            clock.pause(self.slow)

    def _object(self, found: dict[str, Any], device: str, arrival: Arrival) -> None:
        text = found["text"]
        sent = self.simulation.ledger.sent.get(text)
        if sent is not None:
            value = found.get("temperature")
            expected = sent.number % 9
            if sent.is_filtered:
                self.simulation.broken(f"{text} arrived, and is filtered out")
            elif found.get("site") != device or not (sent.is_bad or _is_near(value, expected)):
                self.simulation.broken(f"{text} arrived as {found}, and its temperature was {expected}")
        self._arrived("objects", text, arrival)

    def _arrived(self, route: str, text: str, arrival: Arrival) -> None:
        simulation = self.simulation
        simulation.ledger.arrive(route, text, arrival)
        self.note(f"{text} by {route} {arrival.message_id}" + (" redelivered" if arrival.is_redelivered else ""))
        if text != EQUAL and text not in simulation.ledger.sent:
            simulation.broken(f"a message arrived that was not sent: {text!r}")

    def do_slow(self, seconds: float) -> None:
        """Step: take so long for each message from now on."""
        self.slow = seconds

    def close(self) -> None:
        """Close the instance."""
        self.m.close()


class GatewayRole(Role):
    """Runs the gateway, and changes its configuration."""

    simulation: GatewayWorld

    def open(self) -> None:
        """Start, by the configuration that was asked for last."""
        self.simulation.is_changing = False
        self.simulation.restarts += self.lives > 1
        self.variant: dict[str, Any] = getattr(self, "variant", dict(self.simulation.plan.options["variant"]))
        self.folder = self.world.disk.folder / FOLDER
        self._start()
        if self.lives == 1:
            while not self._is_covered():
                clock.pause(0.05)

    def _settings(self) -> GatewaySettings:
        return GatewaySettings.model_validate(self.simulation.settings(self.variant, self.folder))

    def _start(self) -> None:
        self.is_resting = self.is_turned = False
        self.simulation.depth, self.simulation.reports = -1, {}  # those of another life
        while True:
            self.depths = self._depths()
            gateway = Gateway(self._settings(), services=ServiceRegistry())
            gateway.read_settings = self._settings
            try:
                self.gateway = gateway.start()
                break
            except MessagingError as error:
                self.simulation.unexpected(self, "start", error)
            clock.pause(0.5)
        self.note(f"started with {self.depths}")
        #: routes whose counters count from the start of the gateway
        self.counted = set(self.depths)
        #: dead letters that were stored again, by route
        self.replayed: dict[str, int] = {}
        self.process.start(self._watch, "watch")

    def _depths(self) -> dict[str, int]:
        """Return how many messages the buffers hold, by route."""
        found = {}
        for name in self.simulation.routes_of(self.variant):
            path = self.folder / "routes" / name
            found[name] = 0
            if path.exists():
                try:
                    with Journal.open(path, lock_timeout=5.0) as journal:
                        cursors = journal.cursors()
                        later = [each for each in cursors if each != "target"]
                        if later or ("target" in cursors and journal.cursor("target").is_ahead):
                            del found[name]  # several ranges, or one with settled messages in between: not counted
                        else:
                            found[name] = journal.end - max(journal.begin, cursors.get("target", 0))
                except MessagingError as error:
                    self.simulation.unexpected(self, "look at a buffer", error)
                    del found[name]
        return found

    # --- which routes are subscribed

    def _watch(self) -> None:
        """Note when routes are subscribed."""
        gateway = self.gateway
        while not gateway.is_stopping and self.gateway is gateway:
            self._is_covered()
            clock.pause(0.05)

    def _is_covered(self) -> bool:
        gateway, simulation = self.gateway, self.simulation
        if gateway.is_stopping or simulation.is_changing:
            return False
        routes = gateway.report().routes
        for route in routes:
            if route.is_subscribed and route.is_enabled and not simulation.is_changing:
                simulation.cover(route.name)
        return all(route.is_subscribed or not route.is_enabled for route in routes)

    # --- steps

    def do_reload(self, variant: dict[str, Any], way: str) -> bool:
        """Step: change the configuration. Return whether that was done."""
        simulation, before = self.simulation, self.variant
        self.variant = variant
        after = simulation.settings(variant, self.folder)
        now = simulation.settings(before, self.folder)
        touched = simulation.touched(now, after)
        simulation.is_changing = True
        for name in touched:
            simulation.lose_cover(name)
        for name, each in now["instances"].items():
            if after["instances"][name] != each:
                self.counted.clear()
        self.counted &= {name for name in now["routes"] if name in after["routes"]}
        try:
            if way == "control":
                call(self.folder, "reload")
            else:
                self.gateway.reload(GatewaySettings.model_validate(after))
        except MessagingError as error:
            simulation.unexpected(self, "reload", error)
            return False
        finally:
            simulation.is_changing = False
        return True

    def do_refused(self) -> None:
        """Step: reload a configuration that cannot be run; the present one goes on."""
        settings = self.simulation.settings(self.variant, self.folder) | {"name": "another"}
        try:
            self.gateway.reload(GatewaySettings.model_validate(settings))
        except ConfigurationError as error:
            self.note(f"refused: {error}")
        else:
            self.simulation.broken("a gateway has changed its name while it runs")

    def do_status(self) -> None:
        """Step: ask for the state, as the command line does."""
        try:
            found = call(self.folder, "status", timeout=SLACK)
        except MessagingError as error:
            self.simulation.unexpected(self, "status", error)
            return
        self.note(f"status: {found['state']}, {[each['buffer']['depth'] for each in found['routes']]}")
        if found["state"] != "running":
            self.simulation.broken(f"a running gateway says that it is {found['state']}")

    def do_replay(self) -> None:
        """Step: replay all dead letters."""
        for name in self.simulation.routes_of(self.variant):
            try:
                outcome = self.gateway.route(name).replay(Selection())
            except MessagingError as error:
                self.counted.discard(name)
                self.note(f"replay {name}: {type(error).__name__}: {error}")
                continue
            self.replayed[name] = self.replayed.get(name, 0) + outcome.replayed
            self.note(f"replayed {name}: {outcome}")

    def do_reopen(self, timeout: float | None) -> None:
        """Step: close the gateway in good order, and start it again."""
        self._close(timeout)
        self._start()

    def _close(self, timeout: float | None) -> None:
        simulation = self.simulation
        simulation.restarts += 1
        begin = self.world.scheduler.now
        # the subscriptions stay with their brokers
        self.gateway.close(timeout)
        limit = simulation.plan.options["drain_timeout"] if timeout is None else timeout
        if self.world.scheduler.now > begin + limit + 2 * SLACK:
            simulation.broken(f"the gateway took {self.world.scheduler.now - begin:.3f} s to close, and had {limit}")
        try:
            self.gateway.start()
        except ClosedError as error:
            self.note(f"it does not start again: {error}")
        else:
            simulation.broken("a closed gateway has started again")

    def rest(self) -> None:
        """Run all routes that there ever were, so that their buffers become empty.

        Routes are subscribed again after a change of ``retain``.
        """
        final = self.simulation.final(self.variant)
        if "retain" in final and not self.is_turned:
            turned = {**final, "retain": "never"}
            if self.variant != turned:
                self.do_reload(turned, "call")
            self.is_turned = self.variant == turned and self._is_covered()
            return
        if not self.is_resting:
            self.is_resting = self.do_reload(final, "call")
            return
        self.look()

    def look(self) -> None:
        """Note what is stored, and the dead letters."""
        simulation = self.simulation
        routes = self.gateway.report().routes
        simulation.depth = sum(each.buffer.depth + each.buffer.storing + each.in_flight for each in routes)
        for each in routes:
            if each.buffer.dead_letters:
                for letter in letters(self.gateway.route(each.name).buffer.journal, Selection()):
                    simulation.ledger.dead.setdefault(_text_of(letter.payload), None)
        simulation.reports = {each.name: each for each in routes}
        simulation.problems = self.gateway.problems()

    def imbalance(self, route: RouteDTO) -> int | None:
        """Return by how much the counters of a route differ; ``None``: they cannot be compared."""
        name = route.name
        if name not in self.counted or name not in self.depths or name == "batch":
            return None
        came = route.received + self.depths[name] + self.replayed.get(name, 0)
        gone = (
            route.published + route.filtered + route.looped + route.repeated + route.failed + route.buffer.dropped
            + route.buffer.depth
        )  # fmt: skip
        # what was too old is dropped while the buffer is opened, before it counts
        is_bounded = "max_age" in self.simulation.plan.options["buffers"][self.simulation.kind_of(name)]
        return None if is_bounded and 0 < came - gone <= self.depths[name] else came - gone

    def close(self) -> None:
        """Close the gateway."""
        self._close(None)


def _is_near(value: float, celsius: int) -> bool:
    """Return whether a number is a temperature, in one of two units: one variant does not convert it."""
    return min(abs(value - celsius), abs(value - 32 - celsius * 1.8)) < 1e-6


def _text_of(payload: bytes) -> str:
    text = payload.rstrip(b".").decode()
    return str(json.loads(text)["text"]) if text.startswith("{") else text
