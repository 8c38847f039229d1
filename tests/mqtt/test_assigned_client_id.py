"""``client_id=""``: the broker chooses (MQTT 5, 3.2.2.3.7; 3.1.1, 3.1.3.1)."""

from __future__ import annotations

import pytest

from messaging.errors import ConnectFailedError
from messaging.testing.brokers import Mosquitto
from messaging.testing.conformance.helpers import manual, online, publish, receive
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from messaging_adapters.mqtt import packets
from tests.mqtt.conftest import Connect
from tests.mqtt.harness import Core
from tests.mqtt.peer import Peer, accept, reconnect, refused

pytestmark = pytest.mark.usefixtures("needs_mosquitto")

ASSIGNED = b"\x12" + packets.text("given")


@table("settings, clean", {"a session": ({"session_expiry": 60}, 0x00), "no session": ({}, 0x02)})
async def test_an_assigned_id_is_used_for_reconnecting(peer: Peer, settings: dict[str, int], clean: int) -> None:
    """Also without a session to resume: logs and access rules of the broker know the client by it."""
    core = Core(peer.url, client_id="", **settings)
    assert core.adapter.capabilities.client_id == ""
    connection, _ = await accept(core, peer, ASSIGNED)
    assert connection.connect.endswith(b"\x00\x00")  # a client id of no length
    assert connection.connect[7] == 0x02
    assert core.adapter.capabilities.client_id == "given"
    connection, _ = await reconnect(core, peer, connection, present=not clean)
    assert connection.connect.endswith(packets.text("given"))
    assert connection.connect[7] == clean
    assert core.adapter.capabilities.client_id == "given"
    connection.close()
    await core.lost(2)
    await core.adapter.close()


async def test_a_refused_attempt_assigns_nothing(peer: Peer) -> None:
    core = Core(peer.url, client_id="")
    error = await refused(core, peer, b"\x20" + bytes((3 + len(ASSIGNED), 0, 0x85, len(ASSIGNED))) + ASSIGNED)
    assert "Client identifier not valid" in str(error)
    assert error.code == 0x85
    assert core.adapter.capabilities.client_id == ""
    connection, _ = await accept(core, peer, ASSIGNED)
    assert connection.connect.endswith(b"\x00\x00")
    connection.abort()
    await core.lost()
    await core.adapter.close()


def test_mosquitto_resumes_the_session_of_an_id_it_assigned(mosquitto: Mosquitto, connect: Connect) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        m = connect(f"mqtt://{proxy.host}:{proxy.port}", client_id="", session_expiry=100)
        other = connect()
        given = m.runtime.get_runtime_dto().connection.client_id
        assert given
        stream = m.subscription.subscribe(manual(m, "assigned/x", qos="1"))
        stream.ready.result(PATIENCE)
        publish(other, "assigned/x", [b"before"], qos=1)
        before = stream.receive(PATIENCE)
        proxy.refuse()
        eventually(lambda: not m.connection_state.value.is_up, "the loss is noticed")
        publish(other, "assigned/x", [b"meanwhile"], qos=1)
        proxy.accept()
        online(m)
        assert receive(stream, 1) == [b"meanwhile"]
        assert before.acknowledge() is True  # the session goes on, and so does the message of before
        assert m.runtime.get_runtime_dto().connection.client_id == given
        stream.close().result(PATIENCE)


def test_the_runtime_dto_shows_the_client_id_at_the_broker(mosquitto: Mosquitto, connect: Connect) -> None:
    def shown(client_id: str | None) -> str | None:
        return connect(client_id=client_id).runtime.get_runtime_dto().connection.client_id

    assert shown("mine") == "mine"
    assert len({shown("") for _ in range(3)} - {"", None}) == 3
    made = shown(None)
    assert made is not None
    assert 1 <= len(made) <= 23
    assert made.isalnum()
    assert f"as {made} " in mosquitto.log()


def test_with_3_1_1_the_id_of_a_nameless_client_stays_unknown(mosquitto: Mosquitto, connect: Connect) -> None:
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        m = connect(f"mqtt://{proxy.host}:{proxy.port}", version="3.1.1", client_id="")
        assert m.runtime.get_runtime_dto().connection.client_id == ""
        with m.subscribe("nameless", qos=1) as stream:
            publish(m, "nameless", [b"1"], qos=1)
            assert receive(stream, 1) == [b"1"]
            proxy.sever()
            eventually(lambda: m.runtime.get_runtime_dto().connection.cause is not None, "the loss is noticed")
            online(m)
            publish(m, "nameless", [b"2"], qos=1)
            while (payload := stream.receive(PATIENCE).payload) == b"1":
                pass  # its acknowledgement may have been lost
            assert payload == b"2"


@table("version, code", [("5", 0x80), ("3.1.1", 0x85)])
def test_a_broker_that_wants_ids_says_so(connect: Connect, version: str, code: int) -> None:
    """mosquitto does not give the reason there is for it with MQTT 5."""
    with Mosquitto(["allow_zero_length_clientid false"]) as broker:
        with pytest.raises(ConnectFailedError, match="refused the connection") as refusal:
            connect(broker.url, version=version, client_id="")
        assert refusal.value.code == code
        connect(broker.url, version=version)
