"""What tests of the gateway share: settings in few words, sources and targets that can be away."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import messaging
from messaging import Message
from messaging.gateway import Gateway, GatewaySettings
from messaging.testing.brokers import Mosquitto
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, Recorder, eventually, results


def unique(name: str) -> str:
    """Return a name that no other test uses: brokers are shared."""
    return f"{name}-{uuid4().hex[:8]}"


def settings(
    data: Path, *, instances: dict[str, Any] | None = None, routes: dict[str, Any] | None = None, **other: Any
) -> GatewaySettings:
    """Return settings; without instances, ``a`` and ``b`` in this process."""
    return GatewaySettings.model_validate(
        {
            "name": "gw",
            "data": str(data),
            "instances": instances or {"a": {"url": "memory://kit-a"}, "b": {"url": "memory://kit-b"}},
            "routes": {"r": route()} if routes is None else routes,
            **other,
        }
    )


def route(source: Any = "in/{x}", target: Any = "out/{x}", buffer: Any = None, **other: Any) -> dict[str, Any]:
    """Return the settings of a route from ``a`` to ``b``; a text stands for a channel."""
    source = {"channel": source, "queue": "gw"} if isinstance(source, str) else source
    target = {"channel": target} if isinstance(target, str) else target
    return {
        "from": {"instance": "a", **source},
        "to": {"instance": "b", **target},
        "buffer": {"full": "block", **(buffer or {})},
        **other,
    }


class Broker:
    """A program at a broker of this process, or of another one: what it sends, and the messages that it receives."""

    def __init__(self, url: str, pattern: str | None = None, **options: Any) -> None:
        self.m = messaging.connect(url)
        self.messages: Recorder[Message] = Recorder()
        if pattern is not None:
            self.m.on(pattern, self.messages, **options).ready.result(PATIENCE)

    def send(self, channel: str, *payloads: bytes, **options: Any) -> None:
        """Publish, and wait for the confirmation."""
        results(self.m.publish(channel, each, **options) for each in payloads)

    @property
    def received(self) -> list[tuple[str, bytes]]:
        """Channels and payloads of the messages."""
        return [(each.context.channel or "", each.payload) for each in self.messages]

    @property
    def payloads(self) -> list[bytes]:
        """Payloads of the messages."""
        return self.messages.payloads

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.m.close()


def started(gateway: Gateway) -> Gateway:
    """Wait until the routes of a gateway have subscribed."""
    eventually(
        lambda: all(each.is_source_up and each.is_subscribed and each.is_target_up for each in gateway.report().routes),
        "connected",
    )
    return gateway


class Away:
    """A target at mosquitto that can be away: its URL leads over a proxy."""

    def __init__(self, broker: Mosquitto) -> None:
        self._proxy = Proxy(broker.host, broker.port)
        self._broker = broker

    def __enter__(self) -> Away:
        self._proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()

    @property
    def instance(self) -> dict[str, Any]:
        """The settings of the instance."""
        return {"url": f"mqtt://127.0.0.1:{self._proxy.port}", "reconnect_max": 0.1, "connect_timeout": 2.0}

    def leave(self) -> None:
        """Refuse connections."""
        self._proxy.refuse()

    def come_back(self) -> None:
        """Accept connections."""
        self._proxy.accept()
