"""What RFC 214 requires of every way to publish, in its own words: 5.1.1, 5.1.4 and 7.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from messaging.distributedeventing import DistributableEvent, DistributedEventAdmin, PushEvent
from messaging.errors import ArgumentError, NullEventError
from messaging.testing.tables import table
from tests.distributedeventing.conftest import Admins, flush, record

Publish = Callable[[DistributedEventAdmin, Any], object]

#: every way in which data is published
WAYS: dict[str, Publish] = {
    "publish_event": lambda admin, data: admin.publish_event("a", data),
    "publish_event, as in 7.1": lambda admin, data: admin.publish_event("a", "id", data),
    "publish": lambda admin, data: admin.publish(DistributableEvent("a", data=data)),
    "publish_event_with_notification": lambda admin, data: admin.publish_event_with_notification("a", data),
    "publish_with_notification": lambda admin, data: admin.publish_with_notification(
        DistributableEvent("a", data=data)
    ),
    "session.publish_event": lambda admin, data: admin.create_session("a").publish_event(data),
    "session.publish": lambda admin, data: admin.create_session("a").publish(DistributableEvent("a", data=data)),
    "session.publish_event_with_notification": lambda admin, data: admin.create_session(
        "a"
    ).publish_event_with_notification(data),
    "session.publish_with_notification": lambda admin, data: admin.create_session("a").publish_with_notification(
        DistributableEvent("a", data=data)
    ),
    "session.publish_with_notification of a payload": lambda admin, data: admin.create_session(
        "a"
    ).publish_with_notification(data),
}
#: payloads that end a session, and the error for them
NO_DATA: dict[str, tuple[Any, type[Exception]]] = {
    "close": (PushEvent.close(), ArgumentError),
    "error": (PushEvent.error(ValueError("x")), ArgumentError),
    "close in a data event": (PushEvent.data(PushEvent.close()), ArgumentError),
    "no data": (None, NullEventError),
    "a data event without data": (PushEvent.data(None), NullEventError),
}


@table("way", WAYS)
@table("payload, error", NO_DATA)
def test_a_close_or_error_event_is_no_data(admins: Admins, way: Publish, payload: Any, error: type[Exception]) -> None:
    """5.1.1: close and error events must not be published as the data of simple broadcast."""
    admin = admins()
    consumer, aware = record(admin, "a"), record(admin, "a", lifecycle="SESSION")
    with pytest.raises(error):
        way(admin, payload)
    flush(admin)
    assert consumer.kinds == []
    assert aware.kinds == []
    admin.close(0)


@table("way", WAYS)
def test_a_data_event_is_published_as_its_data(admins: Admins, way: Publish) -> None:
    admin = admins()
    consumer = record(admin, "a")
    way(admin, PushEvent.data(7))
    flush(admin)
    assert consumer.values == [7]
    admin.close(0)
