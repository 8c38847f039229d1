"""Checks of the settings of a gateway beyond the types of their values: what refers to what, and what brokers can do.

No broker is asked, and nothing is written: an adapter tells what it can do before it is connected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ArgumentError, MessagingError, check_instance
from messaging.gateway.destinations import PASSED_HEADER
from messaging.gateway.extensions import (
    RETAIN_AS_PUBLISHED,
    SOURCE_KEYS,
    TARGET_KEYS,
    exclude_each_other,
    is_unacknowledged,
    of_route,
    of_source,
    of_target,
    refusals,
)
from messaging.gateway.instance_checks import Broker, check_folder, check_instances
from messaging.gateway.pipeline import ChannelPattern, ChannelTemplate, Pipeline
from messaging.gateway.pipeline.steps import SPARKPLUG_NAMES, condition, template_names, transform
from messaging.gateway.problems import KeyPath, Problem, Problems
from messaging.gateway.settings import GatewaySettings, listening_address
from messaging.model import ANY_LEVELS, Features, overlap, parse_url, publish_options, subscribe_options
from messaging.model.context import check_printable
from messaging.observability.monitor.publisher import checked_channel, checked_interval
from messaging.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from messaging.gateway.settings import (
        DeviceStateSettings,
        RequestSettings,
        RouteSettings,
        SourceSettings,
        TargetSettings,
    )

#: names that templates have beside the captures
_GIVEN: Final = frozenset({"channel", "gateway"})


def check(settings: GatewaySettings) -> list[Problem]:
    """Return the problems of settings that come from no file.

    Raises:
        ArgumentError: ``settings`` are no ``GatewaySettings``.
    """
    check_instance("settings", settings, GatewaySettings)
    problems = Problems()
    check_into(settings, problems)
    return problems.found


def check_into(
    settings: GatewaySettings, problems: Problems, from_environment: Collection[KeyPath] = frozenset()
) -> None:
    """Record the problems of settings.

    Args:
        settings: what the file says.
        problems: where they are recorded.
        from_environment: the values that have a variable of the environment in them.
    """
    _Checks(settings, problems, from_environment).run()


class _Flow(NamedTuple):
    """Messages from a source to a target: patterns of both."""

    path: KeyPath
    source: str
    pattern: str
    target: str
    channels: str


class _Checks:
    def __init__(
        self, settings: GatewaySettings, problems: Problems, from_environment: Collection[KeyPath]
    ) -> None:  # fmt: skip
        self._settings = settings
        self._problems = problems
        self._brokers = check_instances(settings, problems, from_environment)
        self._flows: list[_Flow] = []

    def run(self) -> None:
        settings, problems = self._settings, self._problems
        for name, route in settings.routes.items():
            self._check_route(name, route)
        for name, request in settings.requests.items():
            self._check_request(name, request)
        for name, devices in settings.devices.items():
            self._check_devices(name, devices)
        self._check_queues()
        self._check_subscriptions()
        self._check_prefetch()
        self._check_loops()
        self._check_status()
        self._check_monitor()
        self._check_monitoring()
        check_folder(problems, ("data",), settings.data)
        parts: list[RouteSettings | RequestSettings | DeviceStateSettings] = [
            *settings.routes.values(), *settings.requests.values(), *settings.devices.values(),
        ]  # fmt: skip
        if not parts:
            problems.warning((), "there are no routes, requests and devices: the gateway has nothing to do")
        used = {each for part in parts for each in (part.source.instance, part.target.instance)}
        used |= {each.instance for each in (settings.status, settings.monitor) if each is not None}
        if not used <= settings.instances.keys():
            return  # one of the names is misspelt
        for name in settings.instances:
            if name not in used and parts:
                problems.warning(("instances", name), "no route, request or status uses this instance")

    # --- instances

    def _broker(self, path: KeyPath, name: str) -> Broker | None:
        """Return what is known of an instance; record that there is none of that name."""
        instances = self._settings.instances
        if name not in instances:
            hint = did_you_mean(name, instances) or f"there are {', '.join(instances)}"
            self._problems.error((*path, "instance"), f"there is no instance {name!r}; {hint}")
        return self._brokers.get(name)

    # --- sources and targets

    def _check_source(self, path: KeyPath, source: SourceSettings) -> ChannelPattern | None:
        problems = self._problems
        broker = self._broker(path, source.instance)
        try:
            pattern = ChannelPattern(source.channel)
        except ArgumentError as error:
            problems.error((*path, "channel"), str(error))
            return None
        if broker is None:
            return pattern
        features = broker.capabilities.features
        for key, extension in SOURCE_KEYS.items():
            if getattr(source, key) is not None and extension not in features:
                problems.error((*path, key), self._lacking(source.instance, broker, extension))
        self._check_extensions(path, source, broker, publishing=False)
        extensions = of_source(source, features)
        if "prefetch" in source.model_fields_set:
            extensions[Features.EXTENSION_PREFETCH] = source.prefetch
        try:
            subscribe_options(
                {key: value for key, value in extensions.items() if key in features},
                broker.capabilities,
                broker.adapter.settings,
            )
        except MessagingError as error:
            problems.error(self._extension_path(path, source.extensions, error), str(error))
        return pattern

    def _check_target(
        self,
        path: KeyPath,
        target: TargetSettings,
        pattern: ChannelPattern | None,
        added: frozenset[str] = frozenset(),
    ) -> ChannelTemplate | None:
        problems = self._problems
        broker = self._broker(path, target.instance)
        names = None if pattern is None else pattern.names | _GIVEN | added
        template: ChannelTemplate | None = None
        try:
            template = ChannelTemplate(target.channel)
        except ArgumentError as error:
            problems.error((*path, "channel"), str(error))
        else:
            self._check_names((*path, "channel"), template.names, names)
        for key, text in target.headers.items():
            self._check_names((*path, "headers", key), template_names(text), names)
            if key == PASSED_HEADER:
                problems.error((*path, "headers", key), "the gateway sets this header itself: loops are found by it")
        if broker is None:
            return template
        features = broker.capabilities.features
        for key, extension in TARGET_KEYS.items():
            is_set = getattr(target, key) not in (None, "never", {})
            if is_set and extension not in features:
                problems.error((*path, key), self._lacking(target.instance, broker, extension))
        if target.content_type is not None:
            if Features.MESSAGE_PROPERTIES not in features:
                properties = self._lacking(target.instance, broker, Features.MESSAGE_PROPERTIES)
                problems.error((*path, "content_type"), properties)
            try:
                check_printable("content_type", target.content_type)
            except MessagingError as error:
                problems.error((*path, "content_type"), str(error))
        self._check_extensions(path, target, broker, publishing=True)
        extensions = of_target(target, features)
        if target.headers:
            extensions[Features.EXTENSION_HEADERS] = dict(target.headers)
        try:
            publish_options({key: value for key, value in extensions.items() if key in features}, broker.capabilities)
        except MessagingError as error:
            problems.error(self._extension_path(path, target.extensions, error), str(error))
        return template

    def _check_names(self, path: KeyPath, wanted: Iterable[str], names: frozenset[str] | None) -> None:
        """Record the captures that a template needs and the pattern of the source does not have."""
        if names is None:
            return
        for name in sorted(set(wanted) - names):
            hint = did_you_mean(name, names) or "the pattern of the source has " + (
                ", ".join(f"{{{each}}}" for each in sorted(names - _GIVEN)) or "no captures"
            )
            self._problems.error(path, f"there is no capture {{{name}}}; {hint}")

    def _check_extensions(
        self, path: KeyPath, side: SourceSettings | TargetSettings, broker: Broker, *, publishing: bool
    ) -> None:
        """Record the extensions that the gateway refuses, and those that the instance does not have."""
        refused = dict(refusals(side, broker.capabilities, publishing=publishing))
        for key in side.extensions:
            text = refused.get(key)
            if text is None and key not in broker.capabilities.features:
                text = self._lacking(side.instance, broker, key)
            if text is not None:
                self._problems.error((*path, "extensions", key), text)

    @staticmethod
    def _extension_path(path: KeyPath, extensions: Mapping[str, Any], error: MessagingError) -> KeyPath:
        # of a feature such as ``qos=2``, the extension
        key = str(getattr(error, "key", "") or getattr(error, "feature", "")).partition("=")[0]
        if key in extensions:
            return (*path, "extensions", key)
        own = {extension: key for keys in (SOURCE_KEYS, TARGET_KEYS) for key, extension in keys.items()}
        own[Features.EXTENSION_PREFETCH] = "prefetch"
        return (*path, own[key]) if key in own else (*path, "channel")

    @staticmethod
    def _lacking(instance: str, broker: Broker, feature: str) -> str:
        capabilities = broker.capabilities
        way_out = capabilities.ways_out.get(feature) or did_you_mean(feature, broker.features)
        if not way_out and feature == Features.REPLY_TO:
            way_out = capabilities.ways_out.get(Features.MESSAGE_PROPERTIES, "")
        text = f"the instance '{instance}' ({', '.join(capabilities.protocols)}) has no feature {feature!r}"
        return f"{text}; {way_out}" if way_out else text

    # --- routes

    def _check_route(self, name: str, route: RouteSettings) -> None:
        path, problems = ("routes", name), self._problems
        pattern = self._check_source((*path, "from"), route.source)
        added = SPARKPLUG_NAMES if any(each.sparkplug for each in route.transform) else frozenset()
        template = self._check_target((*path, "to"), route.target, pattern, added)
        if pattern is not None and template is not None and route.enabled:
            self._flows.append(
                _Flow(path, route.source.instance, pattern.pattern, route.target.instance, _channels(template, pattern))
            )
        if route.key is not None:
            self._check_names(
                (*path, "key"), template_names(route.key), None if pattern is None else pattern.names | _GIVEN | added
            )
            if route.deadband is None and route.sample is None:
                problems.warning((*path, "key"), "has no effect without deadband or sample")
        target = self._brokers.get(route.target.instance)
        properties = Features.MESSAGE_PROPERTIES
        if route.compress is not None and target is not None and properties not in target.capabilities.features:
            problems.error((*path, "compress"), self._lacking(route.target.instance, target, properties))
        self._check_steps(name, route, is_parsed=template is not None)
        buffer = (*path, "buffer")
        source = self._brokers.get(route.source.instance)
        if route.target.retain == "keep" and source is not None and RETAIN_AS_PUBLISHED not in source.features:
            problems.warning(
                (*path, "to", "retain"),
                f"the instance '{route.source.instance}' ({', '.join(source.capabilities.protocols)}) does not tell "
                "which messages are retained, but for those from before the subscription; use MQTT 5 or 'always'",
            )
        if is_unacknowledged(of_target(route.target, frozenset())):
            problems.warning(
                (*path, "to", "qos" if route.target.qos is not None else "extensions"),
                "messages of QoS 0 are deleted when they are sent: a loss of the connection loses those on their way",
            )
        if is_unacknowledged(of_source(route.source, frozenset())) and route.buffer.full == "block":
            problems.warning(
                (*buffer, "full"), "messages of QoS 0 cannot be held back: they are dropped when the buffer is full"
            )
        if route.buffer.order == "newest_first" and route.buffer.full == "drop_newest":
            problems.warning(
                (*buffer, "order"), "newest_first with full = 'drop_newest' drops the live messages; use 'drop_oldest'"
            )
        if route.buffer.fsync != "always":
            problems.warning(
                (*buffer, "fsync"), "a loss of power loses messages that were acknowledged; 'always' loses none"
            )
        if route.batch is not None and route.batch.max_bytes > route.buffer.max_bytes:
            problems.error((*path, "batch", "max_bytes"), "a batch must fit into the buffer: buffer.max_bytes is less")

    def _check_steps(self, name: str, route: RouteSettings, *, is_parsed: bool) -> None:
        path, problems = ("routes", name), self._problems
        is_right = is_parsed
        if route.where is not None:
            try:
                condition(route.where)
            except MessagingError as error:
                problems.error((*path, "where"), str(error))
                is_right = False
        for number, step in enumerate(route.transform):
            where = f"routes.{name}.transform[{number}]"
            (kind,) = step.model_fields_set
            try:
                transform(step, where)
            except MessagingError as error:
                problems.error((*path, "transform", number, kind), str(error).removeprefix(f"{where}.{kind}: "))
                is_right = False
        if not is_right:
            return
        try:
            Pipeline.compile(route, gateway=self._settings.name, name=name)
        except MessagingError as error:
            text = str(error).removeprefix(f"routes.{name}: ").removeprefix(f"routes.{name}.")
            if text.startswith(("from.channel: ", "to.channel: ", "key: ")):  # recorded already
                return
            key = next((each for each in ("deadband", "sample", "batch", "compress", "key") if each in text), None)
            if key is None and route.compress is not None and "zstd" in text:
                key = "compress"
            problems.error(path if key is None else (*path, key), text)

    def _check_request(self, name: str, request: RequestSettings) -> None:
        path = ("requests", name)
        pattern = self._check_source((*path, "from"), request.source)
        template = self._check_target((*path, "to"), request.target, pattern)
        if pattern is not None and template is not None and request.enabled:
            self._flows.append(
                _Flow(
                    path,
                    request.source.instance,
                    pattern.pattern,
                    request.target.instance,
                    _channels(template, pattern),
                )
            )
        feature = Features.REPLY_TO_MANY_PUBLISH if request.many else Features.REPLY_TO
        for side, instance in (("from", request.source.instance), ("to", request.target.instance)):
            broker = self._brokers.get(instance)
            if broker is not None and feature not in broker.features:
                self._problems.error((*path, side, "instance"), self._lacking(instance, broker, feature))

    def _check_devices(self, name: str, devices: DeviceStateSettings) -> None:
        path = ("devices", name)
        pattern = self._check_source((*path, "from"), devices.source)
        template = self._check_target((*path, "to"), devices.target, pattern)
        if pattern is not None and template is not None:
            self._flows.append(
                _Flow(
                    path,
                    devices.source.instance,
                    pattern.pattern,
                    devices.target.instance,
                    _channels(template, pattern),
                )
            )
        self._check_names(
            (*path, "offline"), template_names(devices.offline), None if pattern is None else pattern.names | _GIVEN
        )

    # --- all together

    def _check_queues(self) -> None:
        seen: dict[tuple[str, str], str] = {}
        for kind in ("routes", "requests"):
            for name, each in getattr(self._settings, kind).items():
                if each.source.queue is None or not each.enabled:
                    continue
                key = (each.source.instance, each.source.queue)
                if key in seen:
                    self._problems.warning(
                        (kind, name, "from", "queue"),
                        f"{seen[key]} takes from the same queue: each message goes to one of them only",
                    )
                seen.setdefault(key, f"{kind}.{name}")

    def _check_subscriptions(self) -> None:
        """Record parts of which the source refuses one for ever, because of the options of another."""
        seen: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
        for kind, name, source, extensions in self._subscribed():
            try:
                pattern = ChannelPattern(source.channel).pattern
            except ArgumentError:
                continue  # recorded already
            others = seen.setdefault((source.instance, pattern), [])
            features = self._brokers[source.instance].features
            first = next((each for each, its in others if exclude_each_other(its, extensions, features)), None)
            if first is not None:
                self._problems.error(
                    (kind, name, "from", "channel"),
                    f"{first} and {kind}.{name} both subscribe to {pattern!r} at the instance '{source.instance}', "
                    "which refuses one of them: MQTT 5 has one subscription for each channel of an instance, with one "
                    "value of retainAsPublished, which retain = 'keep' sets, and of noLocal, and one consumer with "
                    "retainAsPublished. Give one of them another instance for the same broker, or make them one",
                )
            others.append((f"{kind}.{name}", extensions))

    def _subscribed(self) -> Iterator[tuple[str, str, SourceSettings, Mapping[str, Any]]]:
        """Yield kind, name, source and extensions of the parts that run, where the instance is known."""
        settings, brokers = self._settings, self._brokers
        for name, route in settings.routes.items():
            if route.enabled and route.source.instance in brokers:
                yield "routes", name, route.source, of_route(route, brokers[route.source.instance].features)
        for kind in ("requests", "devices"):
            for name, each in getattr(settings, kind).items():
                if getattr(each, "enabled", True) and each.source.instance in brokers:
                    yield kind, name, each.source, of_source(each.source, brokers[each.source.instance].features)

    def _check_prefetch(self) -> None:
        """Warn of bounds of an instance that its routes and devices replace by their own."""
        sources = {each.source.instance for each in self._settings.routes.values()}
        sources |= {each.source.instance for each in self._settings.devices.values()}
        for name in sources & self._brokers.keys():
            instance = self._settings.instances[name]
            for option in ("prefetch", "buffer_size"):
                if option in instance.model_fields_set or option in parse_url(instance.url).options:
                    self._problems.warning(
                        ("instances", name, option if option in instance.model_fields_set else "url"),
                        f"{option!r} has no effect on routes and devices: their key 'prefetch' of 'from' is used",
                    )

    def _check_loops(self) -> None:
        """Record circles of routes: what one publishes is the source of the next."""
        flows = [each for each in self._flows if each.source in self._brokers and each.target in self._brokers]
        follows = {each.path: [other for other in flows if self._feeds(each, other)] for each in flows}
        reported: set[frozenset[KeyPath]] = set()
        for start in flows:
            circle = _circle(start, follows)
            if circle is None or frozenset(each.path for each in circle) in reported:
                continue
            reported.add(frozenset(each.path for each in circle))
            names = " -> ".join(f"{each.path[0]}.{each.path[1]}" for each in [*circle, circle[0]])
            carries = all(
                Features.EXTENSION_HEADERS in self._brokers[each.target].capabilities.features for each in circle
            )
            if carries:
                self._problems.warning(
                    (*start.path, "to", "channel"),
                    f"messages go in a circle: {names}; they are dropped when they return to this gateway",
                )
            else:
                self._problems.error(
                    (*start.path, "to", "channel"),
                    f"messages go in a circle: {names}; a broker in it carries no headers by which they are "
                    "recognised. Publish to a channel that the pattern of the source does not match",
                )

    def _feeds(self, first: _Flow, second: _Flow) -> bool:
        is_same = self._brokers[first.target].place == self._brokers[second.source].place
        return is_same and overlap(first.channels, second.pattern)

    def _check_status(self) -> None:
        status = self._settings.status
        if status is None:
            return
        path = ("status",)
        broker = self._broker(path, status.instance)
        try:
            template = ChannelTemplate(status.channel)
        except ArgumentError as error:
            self._problems.error((*path, "channel"), str(error))
            return
        wrong = sorted(template.names - {"gateway"})
        if wrong:
            self._problems.error((*path, "channel"), f"there is no value {{{wrong[0]}}} here; there is {{gateway}}")
            return
        channel = template.render({"gateway": self._settings.name})
        for flow in self._flows:
            other = self._brokers.get(flow.source)
            if broker is not None and other is not None and other.place == broker.place and overlap(
                channel, flow.pattern
            ):  # fmt: skip
                self._problems.warning(
                    (*path, "channel"), f"{flow.path[0]}.{flow.path[1]} takes the messages of this channel, too"
                )

    def _check_monitor(self) -> None:
        monitor = self._settings.monitor
        if monitor is None:
            return
        self._broker(("monitor",), monitor.instance)
        try:
            checked_channel(monitor.channel, self._settings.name)
        except ArgumentError as error:
            self._problems.error(("monitor", "channel"), str(error))
        try:
            checked_interval(monitor.interval)
        except ArgumentError as error:
            self._problems.error(("monitor", "interval"), str(error))

    def _check_monitoring(self) -> None:
        if self._settings.monitoring is not None:
            try:
                listening_address(self._settings.monitoring)
            except ValueError as error:
                self._problems.error(("monitoring",), str(error))


def _channels(template: ChannelTemplate, source: ChannelPattern) -> str:
    """Return the pattern of the channels that messages of a source are published to."""
    channels = template.as_pattern()
    is_whole = template.text == "{channel}" or template.text.endswith("/{channel}")
    if is_whole and template.text.count("{channel}") == 1:
        return channels.removesuffix(ANY_LEVELS) + source.pattern
    return channels


def _circle(start: _Flow, follows: Mapping[KeyPath, list[_Flow]]) -> list[_Flow] | None:
    """Return the flows of a circle through ``start``."""
    pending: Iterator[_Flow]
    stack: list[tuple[_Flow, Iterator[_Flow]]] = [(start, iter(follows[start.path]))]
    seen: set[KeyPath] = set()
    while stack:
        _, pending = stack[-1]
        for following in pending:
            if following.path == start.path:
                return [flow for flow, _ in stack]
            if following.path not in seen:
                seen.add(following.path)
                stack.append((following, iter(follows[following.path])))
                break
        else:
            stack.pop()
    return None
