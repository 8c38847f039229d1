"""What tests of the pipeline share: routes in few words, and messages that note how they are settled."""

from __future__ import annotations

import json
from typing import Any

from messaging.gateway.pipeline import Draft, Pipeline
from messaging.gateway.settings import RouteSettings


def route(source: str = "in/{x}", target: str = "out/{x}", **other: Any) -> RouteSettings:
    """Return the settings of a route."""
    return RouteSettings.model_validate(
        {
            "from": {"instance": "a", "channel": source, **other.pop("source", {})},
            "to": {"instance": "b", "channel": target},
            "buffer": {"full": "block"},
            **other,
        }
    )


def pipeline(source: str = "in/{x}", target: str = "out/{x}", **other: Any) -> Pipeline:
    """Return the pipeline of a route ``r`` of the gateway ``gw``."""
    return Pipeline(route(source, target, **other), gateway="gw", name="r")


class Context:
    """The context of a message of the source."""

    def __init__(self) -> None:
        self.channel = "in/1"
        self.extensions: dict[str, Any] = {}
        self.settled: list[bool] = []

    def settle(self, acknowledged: bool) -> None:
        self.settled.append(acknowledged)


class Source:
    """A message of the source."""

    def __init__(self, payload: bytes = b"") -> None:
        self.context = Context()
        self.payload = payload

    @property
    def settled(self) -> list[bool]:
        return self.context.settled


def draft(value: Any = None, channel: str = "in/1", *, x: str = "1", source: Any = None, **other: Any) -> Draft:
    """Return a message; a value that is no bytes is sent as JSON."""
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    other.setdefault("captures", {"x": x})
    return Draft(channel, payload).copy(sources=() if source is None else (source,), **other)


def values(drafts: list[Draft]) -> list[Any]:
    """Return the JSON values of messages."""
    return [json.loads(each.payload) for each in drafts]
