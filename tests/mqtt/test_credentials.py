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

from messaging.adapter import PlannedLossError
from messaging.errors import AuthenticationError, ConnectionLostError, CredentialsError, InvalidOptionError
from messaging.model import parse_url
from messaging.model.credentials import Credentials
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually, results
from messaging.testing.waiting import subscribed as subscribed_at
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt import session as session_module
from tests.mqtt.conftest import Connect, both_versions
from tests.mqtt.harness import Core, lasting
from tests.mqtt.peer import Connection, Peer, accept, farewell, reconnect, refused, sent, session, subscribed

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


def core_with(url: str, provider: Any, **settings: Any) -> Core:
    core = Core(url, credentials=lambda: "", **settings)
    core.adapter.credentials = provider
    return core


@contextlib.asynccontextmanager
async def logged_in(
    provider: Provider | None = None, **settings: Any
) -> AsyncIterator[tuple[Core, Peer, Connection, Provider]]:
    provider = provider or Provider()
    async with session(provider=provider, credentials=lambda: "", **settings) as (core, peer, connection):
        yield core, peer, connection, provider


def renewing(core: Core, provider: Provider) -> asyncio.Task[None]:
    return asyncio.create_task(core.adapter.renew(provider.credentials()))


async def moved(core: Core, connection: Connection, provider: Provider) -> bytes:
    """Renew the credentials by a planned reconnect, up to the end of the connection: the body of DISCONNECT."""
    renewal = renewing(core, provider)
    body = await connection.expect(packets.DISCONNECT)
    connection.close()
    await renewal
    assert isinstance(core.losses[-1], PlannedLossError)
    return body


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


@both_versions
async def test_each_connection_logs_in_with_new_credentials(version: str) -> None:
    async with logged_in(version=version) as (core, peer, connection, provider):
        assert b"\0\2me\0\2p1" in connection.connect
        connection, _ = await reconnect(core, peer, connection, present=False)
        assert b"\0\2me\0\2p2" in connection.connect
        assert provider.asked == 2


async def test_the_user_name_of_the_url_serves_where_the_provider_names_none(peer: Peer) -> None:
    core = core_with(peer.url.replace("//", "//joe@"), Provider(None))
    connection, _ = await accept(core, peer)
    assert b"\0\3joe\0\2p1" in connection.connect
    await farewell(core, connection)


async def failing() -> Credentials:
    raise CredentialsError("none")


@table("provider, match", [(Provider(None), "no user name: return one with the password"), (failing, "none")])
async def test_an_attempt_without_credentials_has_failed(peer: Peer, provider: Any, match: str) -> None:
    core = core_with(peer.url, provider)
    with pytest.raises(CredentialsError, match=match):
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


@both_versions
async def test_unconfirmed_messages_are_waited_for_and_the_rest_is_sent_again(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_PLANNED_TIMEOUT", 0.1)
    settings = {} if version == "5" else lasting(version)
    async with logged_in(**settings) as (core, peer, one, provider):
        out = core.out("t", b"1", qos="1")
        await core.send(out)
        await one.expect(packets.PUBLISH)
        provider.asked += 1
        renewal = renewing(core, provider)
        # held back: nothing is published between the decision and the end of the connection
        late = core.out("t", b"2", qos="0")
        sending = asyncio.create_task(core.send(late))
        await one.expect(packets.DISCONNECT)  # after a while without a confirm
        one.close()
        await renewal
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


async def test_with_confirms_it_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_PLANNED_TIMEOUT", 3 * PATIENCE)
    async with logged_in() as (core, peer, one, provider):
        out, publish = await sent(core, one, "t", b"1", qos="1")
        renewal = renewing(core, provider)
        assert await one.is_silent()
        await one.confirm(out, publish)
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewal
        await accept(core, peer)


async def test_a_loss_meanwhile_is_a_loss() -> None:
    async with logged_in() as (core, _, one, provider):
        await core.send(core.out("t", b"1", qos="1"))
        renewal = renewing(core, provider)
        await one.expect(packets.PUBLISH)
        one.abort()
        await renewal
        (loss,) = core.losses
        assert not isinstance(loss, PlannedLossError)


@both_versions
async def test_messages_with_qos_0_are_received_up_to_the_end_of_the_connection(version: str) -> None:
    settings = {} if version == "5" else lasting(version)
    async with logged_in(**settings) as (core, _, one, provider):
        sink, _ = await subscribed(core, one, "t", qos="1")
        renewal = renewing(core, provider)
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
        await renewal
        assert sink.payloads == [b"0", b"00"]
        assert isinstance(core.losses[0], PlannedLossError)


async def test_bytes_that_are_no_packet_after_disconnect_do_no_harm() -> None:
    async with logged_in() as (core, _, one, provider):
        renewal = renewing(core, provider)
        await one.expect(packets.DISCONNECT)
        one.write(b"\x30\xff\xff\xff\xff\x01")
        await renewal
        assert isinstance(core.losses[0], PlannedLossError)


# --- sessions that bridge a planned reconnect


async def test_a_message_that_is_settled_during_the_reconnect_is_not_delivered_twice() -> None:
    async with logged_in() as (core, peer, one, provider):
        sink, _ = await subscribed(core, one, "t", qos="1")
        one.deliver("t", b"1", packet_id=7, qos=1)
        message = await sink.next()
        renewal = renewing(core, provider)
        await one.expect(packets.DISCONNECT)
        core.acknowledge(message)  # the answer would come after DISCONNECT
        one.close()
        await renewal
        two, _ = await accept(core, peer, present=True)
        two.deliver("t", b"1", packet_id=7, qos=1, flags=packets.DUP)
        assert await two.expect(packets.PUBACK) == b"\0\7"
        assert sink.arrived == []


async def test_the_broker_keeps_the_session_over_a_planned_reconnect_only() -> None:
    async with logged_in() as (core, peer, one, provider):
        first = Connect5(one.connect)
        assert (first.clean_start, first.properties.SessionExpiryInterval) == (True, 1)
        sink, _ = await subscribed(core, one, "t", qos="1")
        body = await moved(core, one, provider)
        assert body[0] == 0
        assert properties_of(PacketTypes.DISCONNECT, body[1:]) == {"SessionExpiryInterval": 60}
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
        body = await farewell(core, three)
        assert properties_of(PacketTypes.DISCONNECT, body[1:]) == {"SessionExpiryInterval": 0}


async def test_a_session_that_the_broker_did_not_keep_is_begun_anew() -> None:
    async with logged_in() as (core, peer, one, provider):
        out = core.out("t", b"1", qos="1")
        await core.send(out)
        await one.expect(packets.PUBLISH)
        await moved(core, one, provider)
        two, resumed = await accept(core, peer, present=False)
        assert not resumed
        publish = await two.publish()
        assert (publish.payload, publish.dup) == (b"1", False)
        await two.confirm(out, publish)


async def test_without_a_provider_nothing_is_asked_of_the_broker(peer: Peer) -> None:
    core = Core(peer.url.replace("//", "//me:p1@"))
    connection, _ = await accept(core, peer)
    assert not hasattr(Connect5(connection.connect).properties, "SessionExpiryInterval")
    assert await farewell(core, connection) == b""


async def test_a_session_of_the_application_is_left_as_it_is() -> None:
    async with logged_in(**lasting("5")) as (core, peer, one, provider):
        assert Connect5(one.connect).properties.SessionExpiryInterval == 1000
        assert await moved(core, one, provider) == b""
        two, resumed = await accept(core, peer, present=True)
        assert resumed
        assert await farewell(core, two) == b""


# --- re-authentication


async def auth(connection: Connection) -> tuple[int, dict[str, Any]]:
    body = await connection.expect(packets.AUTH)
    return body[0], properties_of(PacketTypes.AUTH, body[1:])


def answer_auth(connection: Connection, reason: int = 0) -> None:
    connection.write(packets.auth(reason, METHOD, b""))


@table("user, name", {"with a user name": ("me", b"me"), "a token": (None, None)})
async def test_the_password_is_the_data_of_the_authentication_method(user: str | None, name: bytes | None) -> None:
    async with logged_in(Provider(user), auth_method=METHOD) as (_, _, one, _):
        connect = Connect5(one.connect)
        assert connect.properties.AuthenticationMethod == METHOD
        assert connect.properties.AuthenticationData == b"p1"
        assert (connect.username, connect.password) == (name, None)


async def test_a_password_that_does_not_change_may_be_the_data_too() -> None:
    async with session(auth_method=METHOD, password="fixed") as (_, _, connection):
        assert Connect5(connection.connect).properties.AuthenticationData == b"fixed"


async def test_new_credentials_are_handed_over_on_the_same_connection() -> None:
    """An answer without a reason code is a success, too."""
    async with logged_in(auth_method=METHOD) as (core, _, one, provider):
        for number in (2, 3):
            provider.asked = number
            renewal = renewing(core, provider)
            reason, properties = await auth(one)
            assert reason == packets.REAUTHENTICATE
            assert properties["AuthenticationMethod"] == METHOD
            assert properties["AuthenticationData"] == b"p%d" % number
            out, publish = await sent(core, one, "t", b"meanwhile", qos="1")
            await one.confirm(out, publish)
            answer_auth(one) if number == 2 else one.send(packets.AUTH, b"")
            await renewal
        assert core.losses == []


async def test_another_user_name_takes_another_connection() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        provider.username = "you"
        await moved(core, one, provider)
        two, _ = await accept(core, peer)
        assert Connect5(two.connect).username == b"you"


@table("kind", ["another step", "no answer"])
async def test_where_it_does_not_work_a_planned_reconnect_follows(kind: str) -> None:
    settings = {"connect_timeout": 0.3} if kind == "no answer" else {}
    async with logged_in(auth_method=METHOD, **settings) as (core, peer, one, provider):
        renewal = renewing(core, provider)
        await auth(one)
        if kind == "another step":
            answer_auth(one, packets.CONTINUE_AUTHENTICATION)
        await one.expect(packets.DISCONNECT)
        one.close()
        await renewal
        assert isinstance(core.losses[0], PlannedLossError)
        await accept(core, peer, present=True)


async def test_a_broker_that_refuses_the_new_credentials_costs_a_planned_reconnect_that_resumes_the_session() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        message = core.out("t", b"unconfirmed", qos="1")
        await core.send(message)
        await one.publish()
        renewal = renewing(core, provider)
        await auth(one)
        one.send(packets.DISCONNECT, b"\x87\0")
        with pytest.raises(ConnectionLostError):
            await renewal
        (loss,) = core.losses
        assert isinstance(loss, PlannedLossError)
        assert loss.code == 0x87
        two, resumed = await accept(core, peer, present=True)
        assert (Connect5(two.connect).clean_start, resumed) == (False, True)
        again = await two.publish()
        assert again.payload == b"unconfirmed"
        await two.confirm(message, again)


async def test_a_broker_that_ends_the_connection_for_another_reason_meanwhile_is_a_loss() -> None:
    async with logged_in(auth_method=METHOD) as (core, peer, one, provider):
        renewal = renewing(core, provider)
        await auth(one)
        one.send(packets.DISCONNECT, b"\x8b\0")  # shutting down
        with pytest.raises(ConnectionLostError):
            await renewal
        assert not isinstance(core.losses[0], PlannedLossError)
        await accept(core, peer)
        assert Connect5(peer.connections[-1].connect).clean_start


@table("reason", [0x00, 0x18, 0x19])
async def test_an_auth_that_answers_nothing_is_a_breach_of_the_protocol(reason: int) -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, _):
        answer_auth(one, reason)
        assert "broke the protocol: an unexpected AUTH" in str(await core.lost())


async def test_a_method_of_several_steps_is_refused_while_connecting(peer: Peer) -> None:
    core = core_with(peer.url, Provider(), auth_method=METHOD)
    error = await refused(core, peer, packets.auth(packets.CONTINUE_AUTHENTICATION, METHOD, b""))
    assert isinstance(error, AuthenticationError)
    assert "takes another step, which is not supported" in str(error)
    await core.adapter.close()


async def test_a_detail_of_the_broker_that_repeats_a_password_is_not_shown() -> None:
    async with logged_in(auth_method=METHOD) as (core, _, one, provider):
        provider.asked = 2
        renewal = renewing(core, provider)
        await auth(one)
        answer_auth(one)
        await renewal
        reason = b"\x1f" + packets.text("bad token p2")
        one.send(packets.DISCONNECT, b"\x87" + packets.varint(len(reason)) + reason)
        loss = await core.lost()
        assert "Not authorized" in str(loss)
        assert "p2" not in str(loss)


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


@both_versions
def test_a_password_that_the_broker_has_forgotten_costs_a_reconnect_and_no_message(
    users: tuple[Mosquitto, Callable[..., None]], connect: Connect, version: str
) -> None:
    broker, set_users = users
    set_users(me="p1")
    current = ["p1"]
    settings = {} if version == "5" else lasting(version)
    with connect(broker.url, username="me", credentials=lambda: current[0], retry_connect=True, **settings) as m:
        received = subscribed_at(m, "t", qos="1")
        count = 0
        for generation in range(2, 5):
            promises = [m.publish("t", b"%d-%d" % (generation, number), qos="1") for number in range(50)]
            set_users(me=f"p{generation}")
            current[0] = f"p{generation}"
            promises += [m.publish("t", b"%d-late-%d" % (generation, number), qos="1") for number in range(50)]
            # it is connected: mosquitto 2.0.11 was seen to crash when it ended a session that was away once more
            results(promises)
            count += len(promises)
        eventually(lambda: len({*received.payloads}) == count, "every message")


def test_requests_wait_on_over_planned_reconnects(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answered = threading.Event()

    def answer(number: int) -> int:
        assert answered.wait(PATIENCE)
        return number + 1

    connect().reply("slow", answer)
    asked = 0

    def ask() -> Credentials:
        nonlocal asked
        asked += 1
        return Credentials("me", f"p{asked}", valid_for=0.5)

    requester = connect(credentials=ask)
    reply = requester.request("slow", 1, int, qos=1)
    eventually(lambda: caplog.text.count("connecting anew, as planned") >= 2, "two planned reconnects")
    answered.set()
    assert reply.result(PATIENCE) == 2
