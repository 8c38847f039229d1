"""Stands in for the core: drives one adapter directly, on a loop of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

from messaging.errors import MessagingError
from messaging.model import Incoming, MessageContext, SubscriptionSpec, parse_url, subscribe_options
from messaging.model.settings import load_settings
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually_async
from messaging_adapters.mqtt import MqttAdapter
from tests.doubles.core import Out as Out
from tests.doubles.core import Sink as Sink
from tests.doubles.core import run as run
from tests.doubles.core import settled as settled
from tests.doubles.events import Recorded


def url_of(proxy: Proxy) -> str:
    """The URL of the broker behind ``proxy``."""
    return f"mqtt://{proxy.host}:{proxy.port}"


def lasting(version: str, client_id: str | None = None) -> dict[str, Any]:
    """Settings of a session that outlives its connection, by default one of this test's own."""
    expiry = {"session_expiry": 1000} if version == "5" else {}
    client_id = client_id or f"test-{secrets.token_hex(6)}"
    return {"version": version, "client_id": client_id, "clean_start": False, **expiry}


class Core:
    """An adapter and the callbacks it was given."""

    def __init__(self, url: str, **settings: Any) -> None:
        parsed = parse_url(url)
        self.adapter = MqttAdapter(parsed, load_settings(MqttAdapter.settings_type, parsed, settings), "test")
        self.events = Recorded()
        self.losses = self.events.losses

    async def open(self) -> bool:
        async with asyncio.timeout(PATIENCE):
            return await self.adapter.open(self.events)

    async def reopen(self) -> bool:
        """Open as soon as the broker is there again."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(MessagingError):
                    return await self.adapter.open(self.events)

    async def lost(self, count: int = 1) -> MessagingError:
        await eventually_async(lambda: len(self.losses) >= count, "loss")
        return self.losses[count - 1]

    def vanish(self) -> None:
        """Break the connection without DISCONNECT."""
        connection = self.adapter.session.connection
        assert connection is not None
        assert connection.transport._sock is not None
        socket.socket.shutdown(connection.transport._sock, socket.SHUT_RDWR)

    def out(self, channel: str, payload: bytes = b"", /, **context: Any) -> Out:
        """``extensions`` beside the arguments of ``MessageContext``; snake case is camel case there."""
        known = ("content_type", "content_encoding", "correlation_id", "reply_to_channel")
        values = {key: context.pop(key) for key in known if key in context}
        return Out(self.adapter, payload, MessageContext(channel, extensions=_extensions(context), **values))

    async def send(self, *messages: Out) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.adapter.publish(messages)

    async def publish(self, channel: str, payload: bytes = b"", /, **context: Any) -> Out:
        """Publish and wait for the outcome."""
        out = self.out(channel, payload, **context)
        await self.send(out)
        async with asyncio.timeout(PATIENCE):
            await out.done
        return out

    def spec(self, channel: str, **extensions: Any) -> SubscriptionSpec:
        spec = SubscriptionSpec(
            channel, None, subscribe_options(_extensions(extensions), self.adapter.capabilities, self.adapter.settings)
        )
        self.adapter.check_subscribe(spec)
        return spec

    async def subscribe(self, channel: str, sink: Sink | None = None, **extensions: Any) -> tuple[Sink, Any]:
        sink = sink or Sink()
        async with asyncio.timeout(PATIENCE):
            return sink, await self.adapter.subscribe(self.spec(channel, **extensions), sink)

    def acknowledge(self, *messages: Incoming) -> None:
        self.adapter.acknowledge([message.token for message in messages if message.token is not None])


def _extensions(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    def camel(name: str) -> str:
        head, *tail = name.split("_")
        return head + "".join(word.capitalize() for word in tail)

    return MappingProxyType({camel(name): value for name, value in keywords.items()})


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[Core]:
    core = Core(url, **settings)
    try:
        await core.open()
        yield core
    finally:
        await core.adapter.close()
