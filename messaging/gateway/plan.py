"""The plan of a gateway: what goes where, as rows for people and programs. No broker is asked."""

from __future__ import annotations

from typing import Any, NamedTuple

from messaging.errors import InvalidUrlError
from messaging.errors.checks import check_instance
from messaging.errors.text import counted
from messaging.gateway.patterns import ChannelPattern
from messaging.gateway.settings import BufferSettings, GatewaySettings, RouteSettings, SourceSettings, TargetSettings
from messaging.model import parse_url


class PlannedFlow(NamedTuple):
    """One route, request or group of devices.

    Attributes:
        kind: ``route``, ``request``, ``devices`` or ``status``.
        name: of the part.
        source: instance and channel pattern; empty for ``status``.
        subscribes: the plain pattern that the gateway subscribes to.
        steps: what happens in between, in order.
        buffer: how messages are stored; empty where they are not.
        target: instance and channel template.
        is_enabled: whether it runs.
    """

    kind: str
    name: str
    source: str
    subscribes: str
    steps: tuple[str, ...]
    buffer: str
    target: str
    is_enabled: bool


class Plan(NamedTuple):
    """What a gateway does.

    Attributes:
        name: of the gateway.
        data: its data folder.
        instances: names of instances -> their URLs, without secrets.
        flows: routes, requests, devices and status, in the order of the configuration.
    """

    name: str
    data: str
    instances: dict[str, str]
    flows: tuple[PlannedFlow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {**self._asdict(), "flows": [each._asdict() for each in self.flows]}


def plan(settings: GatewaySettings) -> Plan:
    """Return the plan of settings, which need not be free of problems.

    Raises:
        ArgumentError: ``settings`` are no ``GatewaySettings``.
    """
    check_instance("settings", settings, GatewaySettings)
    flows = [
        PlannedFlow(
            "route", name, *_source(route.source), _steps(route), _buffer(route.buffer), _target(route.target),
            route.enabled,
        )
        for name, route in settings.routes.items()
    ]  # fmt: skip
    flows += [
        PlannedFlow(
            "request", name, *_source(request.source),
            (f"reply within {_seconds(request.timeout)}", f"{request.concurrency} at a time"), "",
            _target(request.target), request.enabled,
        )
        for name, request in settings.requests.items()
    ]  # fmt: skip
    flows += [
        PlannedFlow(
            "devices", name, *_source(devices.source),
            (f"offline {_seconds(devices.after)} after the source is lost",), "", _target(devices.target), True,
        )
        for name, devices in settings.devices.items()
    ]  # fmt: skip
    status = settings.status
    if status is not None:
        channel = status.channel.replace("{gateway}", settings.name)
        steps = (f"each {_seconds(status.interval)}, retained; offline by last will",)
        flows.append(PlannedFlow("status", "status", "", "", steps, "", f"{status.instance}:{channel}", True))
    instances = {name: _shown(each.url) for name, each in settings.instances.items()}
    return Plan(settings.name, str(settings.data), instances, tuple(flows))


def _shown(url: str) -> str:
    try:
        return str(parse_url(url))
    except InvalidUrlError:
        return "***"


def _source(source: SourceSettings) -> tuple[str, str]:
    text = f"{source.instance}:{source.channel}"
    if source.qos is not None:
        text += f" QoS {source.qos}"
    if source.queue is not None:
        text += f" queue {source.queue}"
    try:
        return text, ChannelPattern(source.channel).pattern
    except ValueError:
        return text, "?"


def _target(target: TargetSettings) -> str:
    text = f"{target.instance}:{target.channel}"
    if target.qos is not None:
        text += f" QoS {target.qos}"
    if target.retain != "never":
        text += f" retain {target.retain}"
    return text


def _steps(route: RouteSettings) -> tuple[str, ...]:
    found = [] if route.where is None else [f"where {route.where}"]
    for step in route.transform:
        (kind,) = step.model_fields_set
        value = getattr(step, kind)
        if kind == "unit":
            found.append(f"unit {value.field}: {value.source} to {value.target}")
        elif kind in ("model", "call"):
            found.append(f"{kind} {value}")
        elif kind == "sparkplug":
            found.append("sparkplug")
        else:
            found.append(f"{kind} {', '.join(value)}")
    if route.deadband is not None:
        band = route.deadband
        least = f"{band.absolute:g}" if band.absolute is not None else f"{band.percent:g} %"
        found.append(f"deadband {band.field}: {least}")
    if route.sample is not None:
        found.append(f"sample {route.sample.keep} of {_seconds(route.sample.every)}")
    if route.batch is not None:
        batch = route.batch
        found.append(f"batch {counted(batch.count, 'message')}, {_size(batch.max_bytes)}, {_seconds(batch.delay)}")
    if route.compress is not None:
        found.append(route.compress)
    if route.rate is not None:
        found.append(f"rate {route.rate.messages:g}/s")
    if route.priority != type(route).model_fields["priority"].default:
        found.append(f"priority {route.priority}")
    return tuple(found)


def _buffer(buffer: BufferSettings) -> str:
    parts = [f"{_size(buffer.max_bytes)}", buffer.full]
    if buffer.max_age is not None:
        parts.append(f"{_seconds(buffer.max_age)} old")
    if buffer.order != "oldest_first":
        parts.append(buffer.order)
    return ", ".join(parts)


def _seconds(value: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= size and value % size == 0:
            return f"{value / size:g} {unit}"
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"


def _size(value: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"
