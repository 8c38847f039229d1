"""The runtime DTOs (RFC 7): complete, consistent, without secrets.

Scenarios 98-102 are in ``tests/conformance/test_runtime.py``, 99 in ``tests/connection/test_connection.py``, too.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

from messaging import MessageServiceRuntime
from messaging.errors import PublishRefusedError
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS
from messaging.runtime import MessagingRuntimeDTO
from messaging.services import ServiceRegistry
from tests.doubles.fake import PATIENCE, FakeBroker
from tests.doubles.fixtures import Connect


def plain(dto: MessagingRuntimeDTO) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(dto), default=lambda value: [*value]))


def test_the_runtime_describes_its_instance(broker: FakeBroker, connect: Connect, registry: ServiceRegistry) -> None:
    broker.limit = 1000
    m = connect(broker, name="one")
    dto = m.runtime.get_runtime_dto()
    assert (dto.instance_id, dto.provider_name, dto.protocols) == ("one", "tests.fake", ("fake",))
    assert dto.connection_uri == broker.url
    assert dto.features == tuple(sorted(broker.features | {GENERATE_REPLY_CHANNEL_ALIAS}))
    assert dto.subscriptions == ()
    assert (dto.connection.state, dto.connection.cause) == ("connected", None)
    assert dataclasses.astuple(dto.publisher) == (0, 0, 0)
    assert dto.max_message_size == 1000
    (reference,) = registry.find(MessageServiceRuntime)
    assert dto.service.id == reference.id
    assert dto.service.properties["osgi.messaging.name"] == "one"


def test_it_becomes_plain_data(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    with m.subscribe("a"):
        data = plain(m.runtime.get_runtime_dto())
    assert data["subscriptions"][0]["channel"]["name"] == "a"
    assert data["connection"]["state"] == "connected"


def test_publishing_is_counted(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    broker.hold = True
    promises = [m.publish("a", b"1") for _ in range(3)]
    broker.wait_sent(3)
    assert dataclasses.astuple(m.runtime.get_runtime_dto().publisher) == (3, 0, 0)
    broker.fail(PublishRefusedError("no"))
    broker.confirm(1)
    promises[0].exception(PATIENCE)
    promises[1].result(PATIENCE)
    assert dataclasses.astuple(m.runtime.get_runtime_dto().publisher) == (1, 1, 1)
    broker.confirm()
    promises[2].result(PATIENCE)


def test_the_uri_does_not_show_the_password(broker: FakeBroker, connect: Connect) -> None:
    """Scenario 103 [I]."""
    m = connect(f"fake://me:hunter2@{broker.name}:1?password=hunter2&colour=green")
    dto = m.runtime.get_runtime_dto()
    assert dto.connection_uri == f"fake://me:***@{broker.name}:1?password=***&colour=green"
    assert "hunter2" not in repr(dto) + json.dumps(plain(dto)) + repr(m)


def test_asking_while_everything_changes_is_safe(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    stop = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.wait(0.0005):
                repr(m.runtime.get_runtime_dto())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for _ in range(30):
        streams = [m.subscribe("a") for _ in range(5)]
        m.publish("a", b"1")
        for stream in streams:
            stream.close().result(PATIENCE)
    m.close()
    stop.set()
    for thread in asking:
        thread.join(PATIENCE)
    assert errors == []


def test_after_closing_it_still_answers(broker: FakeBroker, connect: Connect) -> None:
    m = connect(broker)
    m.close()
    dto = m.runtime.get_runtime_dto()
    assert dto.connection.state == "closed"
    assert dto.subscriptions == ()
    assert dto.service.properties["osgi.messaging.name"] == m.name
