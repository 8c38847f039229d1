"""Checks of the settings of a gateway beyond the types of their values: what refers to what, and what brokers can do.

Each rule is a function that yields the problems it finds, at keys below the part that it checks. The tuples
:data:`PART_RULES`, :data:`ROUTE_RULES`, :data:`REQUEST_RULES`, :data:`DEVICE_RULES` and :data:`GATEWAY_RULES` list the
rules in the order in which they are applied.

No broker is asked, and nothing is written: an adapter tells what it can do before it is connected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from messaging.errors import ArgumentError, MessagingError
from messaging.errors.checks import check_instance
from messaging.errors.text import did_you_mean
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
from messaging.gateway.instances import UnconnectedInstance, check_instances, unusable_folder
from messaging.gateway.patterns import GIVEN_NAMES, ChannelPattern, ChannelTemplate, template_names
from messaging.gateway.pipeline import Pipeline
from messaging.gateway.pipeline.steps import SPARKPLUG_NAMES, condition, transform
from messaging.gateway.problems import Finding, KeyPath, Problem, Problems, error, warning
from messaging.gateway.settings import GatewaySettings, listening_address
from messaging.model import ANY_LEVELS, Features, overlap, parse_url, publish_options, subscribe_options
from messaging.model.context import check_printable
from messaging.observability.monitor.publisher import checked_channel, checked_interval


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
    checked = _Checked(settings, check_instances(settings, problems, from_environment))
    for part in checked.parts:
        for rule in (*PART_RULES, *_RULES_OF_KIND[part.kind]):
            problems.add_all(rule(part), part.path)
    for each in GATEWAY_RULES:
        problems.add_all(each(checked))
    problems.add_all(unusable_folder(settings.data, "data"))
    problems.add_all(_unused_instances(checked))


class _Flow(NamedTuple):
    """Messages from a source to a target: patterns of both."""

    path: KeyPath
    source: str
    pattern: str
    target: str
    channels: str


@dataclass
class _Checked:
    """Settings, and the known facts of their instances."""

    settings: GatewaySettings
    #: of those without errors, by name
    instances: dict[str, UnconnectedInstance]
    parts: list[_Section] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [
            _Section(self, kind, name, each)
            for kind in _RULES_OF_KIND
            for name, each in getattr(self.settings, kind).items()
        ]

    @cached_property
    def flows(self) -> list[_Flow]:
        """The flows of messages of the parts that run."""
        return [
            _Flow(
                part.path,
                part.settings.source.instance,
                part.pattern.pattern,
                part.settings.target.instance,
                _channels(part.template, part.pattern),
            )
            for part in self.parts
            if part.is_enabled and part.pattern is not None and part.template is not None
        ]

    def unknown_instance(self, name: str, *path: str) -> Iterator[Finding]:
        """Find that there is no instance of a name."""
        instances = self.settings.instances
        if name not in instances:
            hint = did_you_mean(name, instances) or f"there are {', '.join(instances)}"
            yield error((*path, "instance"), f"there is no instance {name!r}; {hint}")


@dataclass
class _Section:
    """A route, a route of requests, or devices.

    Attributes:
        kind: the table of the configuration: ``routes``, ``requests`` or ``devices``.
    """

    checked: _Checked
    kind: str
    name: str
    settings: Any

    @property
    def path(self) -> KeyPath:
        """Where it stands."""
        return self.kind, self.name

    @property
    def is_enabled(self) -> bool:
        """Whether it runs."""
        return getattr(self.settings, "enabled", True)

    @property
    def source(self) -> UnconnectedInstance | None:
        """The instance of the source; ``None`` if it is unknown, or has errors."""
        return self.checked.instances.get(self.settings.source.instance)

    @property
    def target(self) -> UnconnectedInstance | None:
        """The instance of the target; ``None`` if it is unknown, or has errors."""
        return self.checked.instances.get(self.settings.target.instance)

    @property
    def sides(self) -> Iterator[tuple[str, Any, UnconnectedInstance]]:
        """Key, settings and instance of source and target, where the instance is known."""
        for where, side, instance in (
            ("from", self.settings.source, self.source), ("to", self.settings.target, self.target)
        ):  # fmt: skip
            if instance is not None:
                yield where, side, instance

    @cached_property
    def pattern(self) -> ChannelPattern | None:
        """The channels of the source; ``None`` if they are malformed."""
        try:
            return ChannelPattern(self.settings.source.channel)
        except ArgumentError:
            return None

    @cached_property
    def template(self) -> ChannelTemplate | None:
        """The channel of the target; ``None`` if it is malformed."""
        try:
            return ChannelTemplate(self.settings.target.channel)
        except ArgumentError:
            return None

    def unknown_names(self, wanted: Iterable[str], *path: str) -> Iterator[Finding]:
        """Find the captures that a template needs and the pattern of the source does not have."""
        if self.pattern is None:
            return
        captures = self.pattern.names
        names = captures | GIVEN_NAMES
        if any(each.sparkplug for each in getattr(self.settings, "transform", ())):
            names |= SPARKPLUG_NAMES
        for name in sorted(set(wanted) - names):
            hint = did_you_mean(name, names) or "the pattern of the source has " + (
                ", ".join(f"{{{each}}}" for each in sorted(names - GIVEN_NAMES)) or "no captures"
            )
            yield error(path, f"there is no capture {{{name}}}; {hint}")


# --- sources and targets


def _instances(part: _Section) -> Iterator[Finding]:
    yield from part.checked.unknown_instance(part.settings.source.instance, "from")
    yield from part.checked.unknown_instance(part.settings.target.instance, "to")


def _both_channels(part: _Section) -> Iterator[Finding]:
    for where, side, kind in (
        ("from", part.settings.source, ChannelPattern), ("to", part.settings.target, ChannelTemplate)
    ):  # fmt: skip
        try:
            kind(side.channel)
        except ArgumentError as wrong:
            yield error((where, "channel"), str(wrong))
    if part.template is not None:
        yield from part.unknown_names(part.template.names, "to", "channel")


def _headers(part: _Section) -> Iterator[Finding]:
    for key, text in part.settings.target.headers.items():
        yield from part.unknown_names(template_names(text), "to", "headers", key)
        if key == PASSED_HEADER:
            yield error(("to", "headers", key), "the gateway sets this header itself: loops are found by it")


def _features(part: _Section) -> Iterator[Finding]:
    for where, side, instance in part.sides:
        for key, extension in (SOURCE_KEYS if where == "from" else TARGET_KEYS).items():
            is_set = getattr(side, key) not in (None, "never", {})
            if is_set and extension not in instance.capabilities.features:
                yield error((where, key), _lacking(side.instance, instance, extension))


def _content_type(part: _Section) -> Iterator[Finding]:
    target, instance = part.settings.target, part.target
    if instance is None or target.content_type is None:
        return
    if Features.MESSAGE_PROPERTIES not in instance.capabilities.features:
        yield error(("to", "content_type"), _lacking(target.instance, instance, Features.MESSAGE_PROPERTIES))
    try:
        check_printable("content_type", target.content_type)
    except MessagingError as wrong:
        yield error(("to", "content_type"), str(wrong))


def _extensions(part: _Section) -> Iterator[Finding]:
    """Find extensions that the gateway refuses, and extensions that the instance does not have."""
    for where, side, instance in part.sides:
        refused = dict(refusals(side, instance.capabilities, publishing=where == "to"))
        for key in side.extensions:
            text = refused.get(key)
            if text is None and key not in instance.capabilities.features:
                text = _lacking(side.instance, instance, key)
            if text is not None:
                yield error((where, "extensions", key), text)


def _options(part: _Section) -> Iterator[Finding]:
    """Find what a subscription or a publication would refuse."""
    for where, side, instance in part.sides:
        features = instance.capabilities.features
        if where == "from":
            extensions = of_source(side, features)
            if "prefetch" in side.model_fields_set:
                extensions[Features.EXTENSION_PREFETCH] = side.prefetch
        else:
            extensions = of_target(side, features)
            if side.headers:
                extensions[Features.EXTENSION_HEADERS] = dict(side.headers)
        given = {key: value for key, value in extensions.items() if key in features}
        try:
            if where == "from":
                subscribe_options(given, instance.capabilities, instance.adapter.settings)
            else:
                publish_options(given, instance.capabilities)
        except MessagingError as wrong:
            yield error((where, *_key_of(wrong, side.extensions)), str(wrong))


def _key_of(wrong: MessagingError, extensions: Mapping[str, Any]) -> KeyPath:
    """Return the key of a source or target that an error means."""
    # of a feature such as ``qos=2``, the extension
    key = str(getattr(wrong, "key", "") or getattr(wrong, "feature", "")).partition("=")[0]
    if key in extensions:
        return "extensions", key
    own = {extension: key for keys in (SOURCE_KEYS, TARGET_KEYS) for key, extension in keys.items()}
    own[Features.EXTENSION_PREFETCH] = "prefetch"
    return (own.get(key, "channel"),)


def _lacking(name: str, instance: UnconnectedInstance, feature: str) -> str:
    capabilities = instance.capabilities
    way_out = capabilities.ways_out.get(feature) or did_you_mean(feature, instance.features)
    if not way_out and feature == Features.REPLY_TO:
        way_out = capabilities.ways_out.get(Features.MESSAGE_PROPERTIES, "")
    text = f"the instance '{name}' ({', '.join(capabilities.protocols)}) has no feature {feature!r}"
    return f"{text}; {way_out}" if way_out else text


# --- routes


def _key(part: _Section) -> Iterator[Finding]:
    route = part.settings
    if route.key is not None:
        yield from part.unknown_names(template_names(route.key), "key")
        if route.deadband is None and route.sample is None:
            yield warning(("key",), "has no effect without deadband or sample")


def _compress(part: _Section) -> Iterator[Finding]:
    target, properties = part.target, Features.MESSAGE_PROPERTIES
    if part.settings.compress is not None and target is not None and properties not in target.capabilities.features:
        yield error(("compress",), _lacking(part.settings.target.instance, target, properties))


def _steps(part: _Section) -> Iterator[Finding]:
    """Find steps that are malformed; if none is, what does not fit together."""
    route, where = part.settings, f"routes.{part.name}"
    is_right = part.template is not None
    if route.where is not None:
        try:
            condition(route.where)
        except MessagingError as wrong:
            yield error(("where",), str(wrong))
            is_right = False
    for number, step in enumerate(route.transform):
        at = f"{where}.transform[{number}]"
        (kind,) = step.model_fields_set
        try:
            transform(step, at)
        except MessagingError as wrong:
            yield error(("transform", number, kind), str(wrong).removeprefix(f"{at}.{kind}: "))
            is_right = False
    if not is_right:
        return
    try:
        Pipeline(route, gateway=part.checked.settings.name, name=part.name)
    except MessagingError as wrong:
        text = str(wrong).removeprefix(f"{where}: ").removeprefix(f"{where}.")
        if text.startswith(("from.channel: ", "to.channel: ", "key: ")):  # found already
            return
        key = next((each for each in ("deadband", "sample", "batch", "compress", "key") if each in text), None)
        if key is None and route.compress is not None and "zstd" in text:
            key = "compress"
        yield error(() if key is None else (key,), text)


def _retain(part: _Section) -> Iterator[Finding]:
    source = part.source
    if part.settings.target.retain == "keep" and source is not None and RETAIN_AS_PUBLISHED not in source.features:
        yield warning(
            ("to", "retain"),
            f"the instance '{part.settings.source.instance}' ({', '.join(source.capabilities.protocols)}) does not "
            "tell which messages are retained, but for those from before the subscription; use MQTT 5 or 'always'",
        )


def _unconfirmed_target(part: _Section) -> Iterator[Finding]:
    target = part.settings.target
    if is_unacknowledged(of_target(target, frozenset())):
        yield warning(
            ("to", "qos" if target.qos is not None else "extensions"),
            "messages of QoS 0 are deleted when they are sent: a loss of the connection loses those on their way",
        )


def _unconfirmed_source(part: _Section) -> Iterator[Finding]:
    if is_unacknowledged(of_source(part.settings.source, frozenset())) and part.settings.buffer.full == "block":
        yield warning(
            ("buffer", "full"), "messages of QoS 0 cannot be held back: they are dropped when the buffer is full"
        )


def _buffer(part: _Section) -> Iterator[Finding]:
    buffer, batch = part.settings.buffer, part.settings.batch
    if buffer.order == "newest_first" and buffer.full == "drop_newest":
        yield warning(
            ("buffer", "order"), "newest_first with full = 'drop_newest' drops the live messages; use 'drop_oldest'"
        )
    if buffer.fsync != "always":
        yield warning(("buffer", "fsync"), "a loss of power loses messages that were acknowledged; 'always' loses none")
    if batch is not None and batch.max_bytes > buffer.max_bytes:
        yield error(("batch", "max_bytes"), "a batch must fit into the buffer: buffer.max_bytes is less")


# --- requests and devices


def _replies(part: _Section) -> Iterator[Finding]:
    feature = Features.REPLY_TO_MANY_PUBLISH if part.settings.many else Features.REPLY_TO
    for where, side, instance in part.sides:
        if feature not in instance.features:
            yield error((where, "instance"), _lacking(side.instance, instance, feature))


def _offline(part: _Section) -> Iterator[Finding]:
    yield from part.unknown_names(template_names(part.settings.offline), "offline")


# --- all together


def _shared_queues(checked: _Checked) -> Iterator[Finding]:
    seen: dict[tuple[str, str], str] = {}
    for part in checked.parts:
        source = part.settings.source
        if part.kind == "devices" or source.queue is None or not part.is_enabled:
            continue
        first = seen.setdefault((source.instance, source.queue), f"{part.kind}.{part.name}")
        if first != f"{part.kind}.{part.name}":
            yield warning(
                (*part.path, "from", "queue"),
                f"{first} takes from the same queue: each message goes to one of them only",
            )


def _exclusive_subscriptions(checked: _Checked) -> Iterator[Finding]:
    """Find parts of which the source refuses one for ever, because of the options of another."""
    seen: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for part in checked.parts:
        if part.source is None or part.pattern is None or not part.is_enabled:
            continue
        name, pattern, instance = f"{part.kind}.{part.name}", part.pattern.pattern, part.settings.source.instance
        features = part.source.features
        is_route = part.kind == "routes"
        extensions = of_route(part.settings, features) if is_route else of_source(part.settings.source, features)
        others = seen.setdefault((instance, pattern), [])
        first = next((each for each, its in others if exclude_each_other(its, extensions, features)), None)
        if first is not None:
            yield error(
                (*part.path, "from", "channel"),
                f"{first} and {name} both subscribe to {pattern!r} at the instance '{instance}', "
                "which refuses one of them: MQTT 5 has one subscription for each channel of an instance, with one "
                "value of retainAsPublished, which retain = 'keep' sets, and of noLocal, and one consumer with "
                "retainAsPublished. Give one of them another instance for the same broker, or make them one",
            )
        others.append((name, extensions))


def _prefetch(checked: _Checked) -> Iterator[Finding]:
    """Find bounds of an instance that its routes and devices replace by their own."""
    sources = {part.settings.source.instance for part in checked.parts if part.kind != "requests"}
    for name in sources & checked.instances.keys():
        instance = checked.settings.instances[name]
        for option in ("prefetch", "buffer_size"):
            if option in instance.model_fields_set or option in parse_url(instance.url).options:
                yield warning(
                    ("instances", name, option if option in instance.model_fields_set else "url"),
                    f"{option!r} has no effect on routes and devices: their key 'prefetch' of 'from' is used",
                )


def _loops(checked: _Checked) -> Iterator[Finding]:
    """Find circles of routes: what one publishes is the source of the next."""
    known = checked.instances
    flows = [each for each in checked.flows if each.source in known and each.target in known]

    def feeds(first: _Flow, second: _Flow) -> bool:
        is_same = known[first.target].place == known[second.source].place
        return is_same and overlap(first.channels, second.pattern)

    follows = {each.path: [other for other in flows if feeds(each, other)] for each in flows}
    reported: set[frozenset[KeyPath]] = set()
    for start in flows:
        circle = _circle(start, follows)
        if circle is None or frozenset(each.path for each in circle) in reported:
            continue
        reported.add(frozenset(each.path for each in circle))
        names = " -> ".join(f"{each.path[0]}.{each.path[1]}" for each in [*circle, circle[0]])
        path = (*start.path, "to", "channel")
        if all(Features.EXTENSION_HEADERS in known[each.target].capabilities.features for each in circle):
            yield warning(path, f"messages go in a circle: {names}; they are dropped when they return to this gateway")
        else:
            yield error(
                path,
                f"messages go in a circle: {names}; a broker in it carries no headers by which they are "
                "recognised. Publish to a channel that the pattern of the source does not match",
            )


def _status(checked: _Checked) -> Iterator[Finding]:
    status = checked.settings.status
    if status is None:
        return
    yield from checked.unknown_instance(status.instance, "status")
    try:
        template = ChannelTemplate(status.channel)
    except ArgumentError as wrong:
        yield error(("status", "channel"), str(wrong))
        return
    unknown = sorted(template.names - {"gateway"})
    if unknown:
        yield error(("status", "channel"), f"there is no value {{{unknown[0]}}} here; there is {{gateway}}")
        return
    channel = template.render({"gateway": checked.settings.name})
    own = checked.instances.get(status.instance)
    for flow in checked.flows:
        other = checked.instances.get(flow.source)
        is_same = own is not None and other is not None and other.place == own.place
        if is_same and overlap(channel, flow.pattern):
            yield warning(
                ("status", "channel"), f"{flow.path[0]}.{flow.path[1]} takes the messages of this channel, too"
            )


def _monitor(checked: _Checked) -> Iterator[Finding]:
    monitor = checked.settings.monitor
    if monitor is None:
        return
    yield from checked.unknown_instance(monitor.instance, "monitor")
    try:
        checked_channel(monitor.channel, checked.settings.name)
    except ArgumentError as wrong:
        yield error(("monitor", "channel"), str(wrong))
    try:
        checked_interval(monitor.interval)
    except ArgumentError as wrong:
        yield error(("monitor", "interval"), str(wrong))


def _monitoring(checked: _Checked) -> Iterator[Finding]:
    if checked.settings.monitoring is not None:
        try:
            listening_address(checked.settings.monitoring)
        except ValueError as wrong:
            yield error(("monitoring",), str(wrong))


def _unused_instances(checked: _Checked) -> Iterator[Finding]:
    settings = checked.settings
    if not checked.parts:
        yield warning((), "there are no routes, requests and devices: the gateway has nothing to do")
        return
    sides = [side for part in checked.parts for side in (part.settings.source, part.settings.target)]
    used = {each.instance for each in (*sides, settings.status, settings.monitor) if each is not None}
    if used <= settings.instances.keys():  # otherwise one of the names is misspelt
        for name in settings.instances:
            if name not in used:
                yield warning(("instances", name), "no route, request or status uses this instance")


_SectionRule = Callable[[_Section], Iterator[Finding]]

#: of every source and target
PART_RULES: Final[tuple[_SectionRule, ...]] = (
    _instances, _both_channels, _headers, _features, _content_type, _extensions, _options,
)  # fmt: skip
ROUTE_RULES: Final[tuple[_SectionRule, ...]] = (
    _key, _compress, _steps, _retain, _unconfirmed_target, _unconfirmed_source, _buffer,
)  # fmt: skip
REQUEST_RULES: Final[tuple[_SectionRule, ...]] = (_replies,)
DEVICE_RULES: Final[tuple[_SectionRule, ...]] = (_offline,)
#: of the whole, after its parts
GATEWAY_RULES: Final[tuple[Callable[[_Checked], Iterator[Finding]], ...]] = (
    _shared_queues, _exclusive_subscriptions, _prefetch, _loops, _status, _monitor, _monitoring,
)  # fmt: skip
_RULES_OF_KIND: Final = {"routes": ROUTE_RULES, "requests": REQUEST_RULES, "devices": DEVICE_RULES}


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
