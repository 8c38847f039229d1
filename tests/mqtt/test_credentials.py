"""Credentials that change, with MQTT: re-authentication, planned reconnects, sessions that bridge them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from adapters.mqtt import packets
from messaging.adapter import PlannedLossError
from messaging.errors import AuthenticationError, ConnectionLostError, CredentialsError, InvalidOptionError
from messaging.model import parse_url
from messaging.model.credentials import Credentials
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from tests.mqtt.conftest import Connect
from tests.mqtt.harness import Core, lasting
from tests.mqtt.peer import Connection, Peer, accept, farewell, sent, subscribed

METHOD = "TOKEN"


class Provider:
    """What the core sets: counts, and returns ``p1``, ``p2``, ..."""

    def __init__(self, username: str | None = "me") -> None:
        self.asked = 0
        self.username = username

    def credentials(self) -> Credentials:
        return Credentials(self.username, f"p{self.asked}")

    async def __call__(self) -> Credentials:
        self.asked += 1
        return self.credentials()


def core_with(url: str, provider: Provider, **settings: Any) -> Core:
    core = Core(url, credentials=lambda: "", **settings)
    core.adapter.credentials = provider
    return core


@contextlib.asynccontextmanager
async def logged_in(
    *, present: bool = False, provider: Provider | None = None, **settings: Any
) -> AsyncIterator[tuple[Core, Peer, Connection, Provider]]:
    async with Peer() as peer:
        provider = provider or Provider()
        core = core_with(peer.url, provider, **settings)
        connection = (await accept(core, peer, present=present))[0]
        try:
            yield core, peer, connection, provider
        finally:
            closing = asyncio.create_task(core.adapter.close())
            await asyncio.sleep(0)
            for each in peer.connections:
                each.close()
            await closing


class Connect5:
    """A CONNECT of MQTT 5, taken apart."""

    def __init__(self, body: bytes) -> None:
        flags = body[7]
        self.clean_start = bool(flags & 2)
        self.properties = Properties(PacketTypes.CONNECT)
        _, used = self.properties.unpack(body[10:])
        rest = body[10 + used :]
        fields = []
        while rest:
            size = int.from_bytes(rest[:2], "big")
            fields.append(rest[2 : 2 + size])
            rest = rest[2 + size :]
        self.client_id = fields.pop(0)
        self.username = fields.pop(0) if flags & 0x80 else None
        self.password = fields.pop(0) if flags & 0x40 else None
        assert not fields


def properties_of(kind: int, data: bytes) -> dict[str, Any]:
    found = Properties(kind)
    found.unpack(data)
    values: dict[str, Any] = found.json()
    return values


# --- log-in


async def test_each_connection_logs_in_with_new_credentials(version: str) -> None:
    async with logged_in(version=version) as (core, peer, connection, provider):
        assert b"\0\2me\0\2p1" in connection.connect
        connection.abort()
        await core.lost()
        connection, _ = await accept(core, peer)
        assert b"\0\2me\0\2p2" in connection.connect
        assert provider.asked == 2


async def test_the_user_name_of_the_url_serves_where_the_provider_names_none() -> None:
    async with Peer() as peer:
        core = core_with(peer.url.replace("//", "//joe@"), Provider(None))
        connection, _ = await accept(core, peer)
        assert b"\0\3joe\0\2p1" in connection.connect
        await farewell(core, connection)


async def test_credentials_without_any_user_name_are_an_error() -> None:
    async with Peer() as peer:
        core = core_with(peer.url, Provider(None))
        with pytest.raises(CredentialsError, match="no user name: return one with the password"):
            await core.open()
        assert peer.connections == []
        await core.adapter.close()


async def test_a_provider_that_fails_fails_the_attempt() -> None:
    async def ask() -> Credentials:
        raise CredentialsError("none")

    async with Peer() as peer:
        core = Core(peer.url, credentials=lambda: "")
        core.adapter.credentials = ask
        with pytest.raises(CredentialsError):
            await core.open()
        assert peer.connections == []
        await core.adapter.close()


def test_settings_that_contradict_a_provider_are_refused() -> None:
    for settings, option in (
        ({"password_command": "true"}, "password_command"),
        ({"password_file": "/x"}, "password_file"),
        ({"auth_method": METHOD}, "auth_method"),
        ({"auth_method": METHOD, "password": "p", "version": "3.1.1"}, "auth_method"),
        ({"auth_method": "", "password": "p"}, "auth_method"),
    ):
        with pytest.raises(InvalidOptionError) as caught:
            Core("mqtt://localhost", **settings)
        assert caught.value.option == option
    Core("mqtt://localhost", password_command="true", auth_method=METHOD)
    Core("mqtt://localhost", password_file="/x", username="me")
    assert parse_url("mqtt://localhost")


# --- a planned reconnect


async def test_unconfirmed_messages_are_waited_for_and_the_rest_is_sent_again(version: str) -> None:
    settings = {} if version == "5" else lasting(version)
    async with logged_in(**settings) as (core, peer, one, provider):
        out = core.out("t", b"1", qos="1")
        await core.send(out)
        await one.expect(packets.PUBLISH)
        provider.asked += 1
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        # held back: nothing is published between the decision and the end of the connection
        late = core.out("t", b"2", qos="0")
        sending = asyncio.create_task(core.send(late))
        await one.expect(packets.DISCONNECT)  # after a second without a confirm
        one.close()
        await renewing
        assert isinstance(core.losses[0], PlannedLossError)
        await sending
        assert isinstance(late.error, ConnectionLostError)  # the core keeps it for the next connection
        assert out.error is None
        two, _ = await accept(core, peer, present=True)
        head, body = await two.packet()
        assert head & 0xF0 == packets.PUBLISH
        assert head & packets.DUP
        assert body.endswith(b"1")
        two.answer(packets.PUBACK, int.from_bytes(body[3:5], "big"))
        await out.result()


async def test_with_confirms_it_takes_no_time() -> None:
    async with logged_in() as (core, peer, one, provider):
        out, publish = await sent(core, one, "t", b"1", qos="1")
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await asyncio.sleep(0.01)
        one.answer(packets.PUBACK, publish.id)
        await out.result()
        started = asyncio.get_running_loop().time()
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewing
        assert asyncio.get_running_loop().time() - started < 0.9
        await accept(core, peer)


async def test_a_loss_meanwhile_is_a_loss() -> None:
    async with logged_in() as (core, _, one, provider):
        await core.send(core.out("t", b"1", qos="1"))
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.PUBLISH)
        one.abort()
        await renewing
        (loss,) = core.losses
        assert not isinstance(loss, PlannedLossError)


async def test_messages_with_qos_0_are_received_up_to_the_end_of_the_connection(version: str) -> None:
    settings = {} if version == "5" else lasting(version)
    async with logged_in(**settings) as (core, _, one, provider):
        sink, _ = await subscribed(core, one, "t", qos="1")
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.DISCONNECT)
        if version == "5":
            one.deliver("t", b"0")
            one.deliver("t", b"1", packet_id=1, qos=1)  # the session has it for the next connection
            one.deliver("t", b"00")
        else:
            one.send(packets.PUBLISH, packets.text("t") + b"0")
            one.send(packets.PUBLISH | 2, packets.text("t") + b"\0\1" + b"1")
            one.send(packets.PUBLISH, packets.text("t") + b"00")
        one.close()
        await renewing
        assert sink.payloads == [b"0", b"00"]
        assert isinstance(core.losses[0], PlannedLossError)


async def test_bytes_that_are_no_packet_after_disconnect_do_no_harm() -> None:
    async with logged_in() as (core, _, one, provider):
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.DISCONNECT)
        one.write(b"\x30\xff\xff\xff\xff\x01")
        await renewing
        assert isinstance(core.losses[0], PlannedLossError)


# --- sessions that bridge a planned reconnect


async def test_a_message_that_is_settled_during_the_reconnect_is_not_delivered_twice() -> None:
    async with logged_in() as (core, peer, one, provider):
        sink, _ = await subscribed(core, one, "t", qos="1")
        one.deliver("t", b"1", packet_id=7, qos=1)
        message = await sink.next()
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.DISCONNECT)
        core.acknowledge(message)  # the answer would come after DISCONNECT
        one.close()
        await renewing
        two, _ = await accept(core, peer, present=True)
        two.deliver("t", b"1", packet_id=7, qos=1, flags=packets.DUP)
        assert await two.expect(packets.PUBACK) == b"\0\7"
        assert sink.arrived == []


async def test_the_broker_keeps_the_session_over_a_planned_reconnect_only() -> None:
    async with logged_in() as (core, peer, one, provider):
        first = Connect5(one.connect)
        assert (first.clean_start, first.properties.SessionExpiryInterval) == (True, 1)
        sink, _ = await subscribed(core, one, "t", qos="1")
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        body = await one.expect(packets.DISCONNECT)
        assert body[0] == 0
        assert properties_of(PacketTypes.DISCONNECT, body[1:]) == {"SessionExpiryInterval": 60}
        one.close()
        await renewing
        two, resumed = await accept(core, peer, present=True)
        second = Connect5(two.connect)
        assert (second.clean_start, second.client_id) == (False, first.client_id)
        assert resumed
        # what came meanwhile: the subscription lives on
        two.deliver("t", b"kept", packet_id=7, qos=1)
        message = await sink.next()
        core.acknowledge(message)
        assert await two.expect(packets.PUBACK) == b"\0\7"
        # any other loss begins anew
        two.abort()
        await core.lost(2)
        three, resumed = await accept(core, peer)
        assert Connect5(three.connect).clean_start
        assert not resumed
        # and closing ends the session at the broker
        closing = asyncio.create_task(core.adapter.close())
        body = await three.expect(packets.DISCONNECT)
        assert properties_of(PacketTypes.DISCONNECT, body[1:]) == {"SessionExpiryInterval": 0}
        three.close()
        await closing


async def test_a_session_that_the_broker_did_not_keep_is_begun_anew() -> None:
    async with logged_in() as (core, peer, one, provider):
        out = core.out("t", b"1", qos="1")
        await core.send(out)
        await one.expect(packets.PUBLISH)
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewing
        two, resumed = await accept(core, peer, present=False)
        assert not resumed
        publish = await two.publish()
        assert (publish.payload, publish.dup) == (b"1", False)
        two.answer(packets.PUBACK, publish.id)
        await out.result()


async def test_without_a_provider_nothing_is_asked_of_the_broker() -> None:
    async with Peer() as peer:
        core = Core(peer.url.replace("//", "//me:p1@"))
        connection, _ = await accept(core, peer)
        assert not hasattr(Connect5(connection.connect).properties, "SessionExpiryInterval")
        closing = asyncio.create_task(core.adapter.close())
        assert await connection.expect(packets.DISCONNECT) == b""
        connection.close()
        await closing


async def test_a_session_of_the_application_is_left_as_it_is() -> None:
    async with logged_in(**lasting("5")) as (core, peer, one, provider):
        assert Connect5(one.connect).properties.SessionExpiryInterval == 1000
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        assert await one.expect(packets.DISCONNECT) == b""
        one.close()
        await renewing
        two, resumed = await accept(core, peer, present=True)
        assert resumed
        closing = asyncio.create_task(core.adapter.close())
        assert await two.expect(packets.DISCONNECT) == b""
        two.close()
        await closing


# --- re-authentication


async def auth(connection: Connection) -> tuple[int, dict[str, Any]]:
    body = await connection.expect(packets.AUTH)
    return body[0], properties_of(PacketTypes.AUTH, body[1:])


def answer_auth(connection: Connection, reason: int = 0) -> None:
    connection.write(packets.auth(reason, METHOD, b""))


async def test_the_password_is_the_data_of_the_authentication_method() -> None:
    async with logged_in(auth_method=METHOD) as (_, _, one, _):
        connect = Connect5(one.connect)
        assert connect.properties.AuthenticationMethod == METHOD
        assert connect.properties.AuthenticationData == b"p1"
        assert (connect.username, connect.password) == (b"me", None)


async def test_a_token_needs_no_user_name_with_a_method() -> None:
    async with logged_in(auth_method=METHOD, provider=Provider(None)) as (_, _, one, _):
        connect = Connect5(one.connect)
        assert (connect.username, connect.properties.AuthenticationData) == (None, b"p1")


async def test_a_password_that_does_not_change_may_be_the_data_too() -> None:
    async with Peer() as peer:
        core = Core(peer.url, auth_method=METHOD, password="fixed")
        connection, _ = await accept(core, peer)
        assert Connect5(connection.connect).properties.AuthenticationData == b"fixed"
        await farewell(core, connection)


async def test_new_credentials_are_handed_over_on_the_same_connection() -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, provider):
        for number in (2, 3):
            provider.asked = number
            renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
            reason, properties = await auth(one)
            assert reason == packets.REAUTHENTICATE
            assert properties["AuthenticationMethod"] == METHOD
            assert properties["AuthenticationData"] == b"p%d" % number
            out, publish = await sent(core, one, "t", b"meanwhile", qos="1")
            one.answer(packets.PUBACK, publish.id)
            await out.result()
            answer_auth(one)
            await renewing
        assert core.losses == []


async def test_an_answer_without_reason_code_is_a_success() -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, provider):
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await auth(one)
        one.send(packets.AUTH, b"")
        await renewing
        assert core.losses == []


async def test_another_user_name_takes_another_connection() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        provider.username = "you"
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewing
        assert isinstance(core.losses[0], PlannedLossError)
        two, _ = await accept(core, peer)
        assert Connect5(two.connect).username == b"you"


@table("kind", ["another step", "no answer"])
async def test_where_it_does_not_work_a_planned_reconnect_follows(kind: str) -> None:
    settings = {"connect_timeout": 0.3} if kind == "no answer" else {}
    async with logged_in(auth_method=METHOD, **settings) as (core, peer, one, provider):
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await auth(one)
        if kind == "another step":
            answer_auth(one, packets.CONTINUE_AUTHENTICATION)
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewing
        assert isinstance(core.losses[0], PlannedLossError)
        await accept(core, peer, present=True)


async def test_a_broker_that_refuses_the_new_credentials_costs_a_planned_reconnect_that_resumes_the_session() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        message = core.out("t", b"unconfirmed", qos="1")
        await core.send(message)
        await one.publish()
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await auth(one)
        one.send(packets.DISCONNECT, b"\x87\0")
        with pytest.raises(ConnectionLostError):
            await renewing
        (loss,) = core.losses
        assert isinstance(loss, PlannedLossError)
        assert loss.code == 0x87
        two, resumed = await accept(core, peer, present=True)
        assert (Connect5(two.connect).clean_start, resumed) == (False, True)
        again = await two.publish()
        assert again.payload == b"unconfirmed"
        two.answer(packets.PUBACK, again.id)
        await message.done


async def test_a_broker_that_ends_the_connection_for_another_reason_meanwhile_is_a_loss() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await auth(one)
        one.send(packets.DISCONNECT, b"\x8b\0")  # shutting down
        with pytest.raises(ConnectionLostError):
            await renewing
        assert not isinstance(core.losses[0], PlannedLossError)
        await accept(core, peer)
        assert Connect5(peer.connections[-1].connect).clean_start


@table("reason", [0x00, 0x18, 0x19])
async def test_an_auth_that_answers_nothing_is_a_breach_of_the_protocol(reason: int) -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, _):
        answer_auth(one, reason)
        assert "broke the protocol: an unexpected AUTH" in str(await core.lost())


async def test_a_method_of_several_steps_is_refused_while_connecting() -> None:
    async with Peer() as peer:
        core = core_with(peer.url, Provider(), auth_method=METHOD)
        opening = asyncio.create_task(core.open())
        connection, _ = await peer.accept()
        answer_auth(connection, packets.CONTINUE_AUTHENTICATION)
        with pytest.raises(AuthenticationError, match="takes another step, which is not supported"):
            await opening
        await core.adapter.close()


async def test_a_detail_of_the_broker_that_repeats_a_password_is_not_shown() -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, provider):
        provider.asked = 2
        renewing = asyncio.create_task(core.adapter.renew(provider.credentials()))
        await auth(one)
        answer_auth(one)
        await renewing
        reason = b"\x1f" + packets.text("bad token p2")
        one.send(packets.DISCONNECT, b"\x87" + packets.varint(len(reason)) + reason)
        loss = await core.lost()
        assert "Not authorized" in str(loss)
        assert "p2" not in str(loss)


# --- mosquitto: the user's password changes, and the broker has forgotten the old one


@pytest.fixture
def users(needs_mosquitto: None, tmp_path: Path) -> Iterator[tuple[Mosquitto, Callable[..., None]]]:
    """A broker that asks for a password, and a function that sets its users."""
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto_passwd is not installed")
    file = tmp_path / "users"

    def set_users(broker: Mosquitto | None, **passwords: str) -> None:
        new = tmp_path / "new"
        new.write_text("".join(f"{name}:{password}\n" for name, password in passwords.items()))
        new.chmod(0o644)
        subprocess.run(["mosquitto_passwd", "-U", str(new)], check=True, timeout=30)
        new.rename(file)
        if broker is not None:
            broker.reload()

    set_users(None, me="p1")
    with Mosquitto(["allow_anonymous false", f"password_file {file}"]) as broker:
        yield broker, lambda **passwords: set_users(broker, **passwords)


def test_a_password_that_the_broker_has_forgotten_costs_a_reconnect_and_no_message(
    users: tuple[Mosquitto, Callable[..., None]], connect: Connect, version: str
) -> None:
    broker, set_users = users
    current = ["p1"]
    settings: dict[str, Any] = {"version": version} if version == "5" else lasting(version)
    m = connect(broker.url, username="me", credentials=lambda: current[0], **settings)
    received: list[bytes] = []
    m.on("t", lambda message: received.append(message.payload), qos="1")
    promises = []
    for generation in range(2, 5):
        for number in range(50):
            promises.append(m.publish("t", b"%d-%d" % (generation, number), qos="1"))
        set_users(me=f"p{generation}")
        current[0] = f"p{generation}"
        for number in range(50):
            promises.append(m.publish("t", b"%d-late-%d" % (generation, number), qos="1"))
    for promise in promises:
        promise.result(15)
    eventually(lambda: len(set(received)) == len(promises), "every message")


def test_requests_wait_on_over_planned_reconnects(
    mosquitto: Mosquitto, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answered = threading.Event()

    def answer(number: int) -> int:
        assert answered.wait(10)
        return number + 1

    connect(mosquitto.url).reply("slow", answer)
    asked = 0

    def ask() -> Credentials:
        nonlocal asked
        asked += 1
        return Credentials("me", f"p{asked}", valid_for=0.5)

    requester = connect(mosquitto.url, credentials=ask)
    reply = requester.request("slow", 1, int, qos=1)
    eventually(lambda: caplog.text.count("connecting anew, as planned") >= 2, "two planned reconnects")
    answered.set()
    assert reply.result(10) == 2
