"""The broker behind ``memory://``, from the side of a test."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from messaging.instance import Messaging
from messaging.testing.waiting import eventually
from messaging_adapters.memory import MemoryAdapter
from messaging_adapters.memory.broker import MemoryBroker, join
from tests.doubles.fake import on_loop


def change_capabilities(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Give every instance at ``memory://`` that is made from now on other capabilities."""
    make = MemoryAdapter.__init__

    def make_changed(self: MemoryAdapter, *arguments: Any) -> None:
        make(self, *arguments)
        self.capabilities = dataclasses.replace(self.capabilities, **changes)

    monkeypatch.setattr(MemoryAdapter, "__init__", make_changed)


def broker_of(m: Messaging) -> MemoryBroker:
    """Return the broker that ``m`` is connected to."""

    def find() -> MemoryBroker:
        broker = join(m.runtime.get_runtime_dto().connection_uri.removeprefix("memory://"))
        broker.release()
        return broker

    return on_loop(find)


def drop(m: Messaging) -> None:
    """Have the broker drop the connection of ``m``, as for a client that misbehaves."""
    broker = broker_of(m)
    assert on_loop(broker.disconnect, m.name)


def drop_and_reconnect(m: Messaging) -> None:
    """Drop the connection of ``m``; return when it and its subscriptions are back."""
    broker = broker_of(m)
    before = on_loop(lambda: {*broker.clients})
    drop(m)

    def is_back() -> bool:
        dto = m.runtime.get_runtime_dto()
        return (
            dto.connection.state == "connected"
            and any(client.name == m.name for client in on_loop(lambda: {*broker.clients}) - before)
            and all(each.channel.connected for each in dto.subscriptions)
        )

    eventually(is_back, "connected again")
