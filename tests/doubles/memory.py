"""The broker behind ``memory://``, from the side of a test."""

from __future__ import annotations

from adapters.memory.broker import Broker, join
from messaging.instance import Messaging
from tests.doubles.fake import on_loop


def broker_of(m: Messaging) -> Broker:
    """Return the broker that ``m`` is connected to."""

    def find() -> Broker:
        broker = join(m.runtime.get_runtime_dto().connection_uri.removeprefix("memory://"))
        broker.release()
        return broker

    return on_loop(find)


def drop(m: Messaging) -> None:
    """Have the broker drop the connection of ``m``, as for a client that misbehaves."""
    broker = broker_of(m)
    assert on_loop(broker.disconnect, m.name)
