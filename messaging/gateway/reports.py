"""The state of a gateway as data transfer objects, for metrics, health checks and the monitor."""

from __future__ import annotations

from dataclasses import dataclass, field

from messaging.services.reporting import HistogramDTO, counter, gauge, histogram, info, label, part


@dataclass(frozen=True, slots=True)
class BufferDTO:
    """The messages of a route on disk."""

    depth: int = field(metadata=gauge("messages that are stored and not confirmed by the target", "messages"))
    bytes: int = field(metadata=gauge("bytes of the files of the buffer", "bytes"))
    age: float = field(metadata=gauge("age of the oldest message that is not confirmed", "seconds"))
    storing: int = field(metadata=gauge("messages on their way to the disk", "messages"))
    accepted: int = field(metadata=counter("messages that were stored", "messages"))
    dropped: int = field(
        metadata=counter("messages that were dropped for lack of room or their age, or lost by the disk", "messages")
    )
    dead_letters: int = field(metadata=gauge("dead letters that are kept", "messages"))
    is_held_back: bool = field(
        default=False, metadata=gauge("whether the source is held back: the disk or the buffer is full")
    )


@dataclass(frozen=True, slots=True)
class RouteDTO:
    """A route of a gateway."""

    name: str = field(metadata=label("route"))
    source: str = field(metadata=info())
    target: str = field(metadata=info())
    is_enabled: bool = field(metadata=gauge("whether the route is enabled"))
    is_source_up: bool = field(metadata=gauge("whether the source is connected"))
    is_subscribed: bool = field(metadata=gauge("whether the source's broker has confirmed the subscription"))
    is_target_up: bool = field(metadata=gauge("whether the target is connected"))
    received: int = field(metadata=counter("messages that were received from the source", "messages"))
    filtered: int = field(metadata=counter("messages that the pipeline filtered out", "messages"))
    looped: int = field(metadata=counter("messages that were dropped because they came back", "messages"))
    repeated: int = field(metadata=counter("messages that were delivered again and are stored already", "messages"))
    failed: int = field(metadata=counter("messages that became dead letters", "messages"))
    published: int = field(metadata=counter("messages that the target has taken", "messages"))
    retried: int = field(metadata=counter("publications that were repeated", "messages"))
    in_flight: int = field(metadata=gauge("messages that are published and not settled", "messages"))
    latency: HistogramDTO = field(
        metadata=histogram("time from the disk to the confirmation of the target, of some messages", "seconds")
    )
    buffer: BufferDTO = field(metadata=part("buffer"))


@dataclass(frozen=True, slots=True)
class RequestRouteDTO:
    """A route of requests."""

    name: str = field(metadata=label("route"))
    source: str = field(metadata=info())
    target: str = field(metadata=info())
    pending: int = field(metadata=gauge("requests that wait for their replies", "requests"))
    answered: int = field(metadata=counter("requests that were answered", "requests"))
    failed: int = field(metadata=counter("requests that got an error instead of a reply", "requests"))


@dataclass(frozen=True, slots=True)
class DeviceStateDTO:
    """The states of bridged devices."""

    name: str = field(metadata=label("devices"))
    known: int = field(metadata=gauge("devices that are known", "devices"))
    is_offline: bool = field(metadata=gauge("whether the devices are published as offline"))


@dataclass(frozen=True, slots=True)
class GatewayDTO:
    """A gateway."""

    name: str = field(metadata=label("gateway"))
    state: str = field(metadata=info())
    #: begin of the run, seconds since the epoch
    started: float = field(metadata=gauge("begin of the run", "seconds", name="start_time"))
    reloads: int = field(metadata=counter("changes of the configuration while running", "reloads"))
    routes: tuple[RouteDTO, ...]
    requests: tuple[RequestRouteDTO, ...]
    devices: tuple[DeviceStateDTO, ...]
