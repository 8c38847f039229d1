"""Credentials that change, with AMQP: update-secret, planned reconnects, tokens that expire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pamqp.frame
import pytest
from pamqp.commands import Basic, Channel, Connection, Exchange

from messaging.adapter import PlannedLossError
from messaging.errors import AuthenticationError, ConnectionLostError, CredentialsError, PublishRefusedError
from messaging.model.credentials import Credentials
from messaging.testing.brokers import RabbitMQ, require
from messaging.testing.servers import Servers
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, eventually_async, results, subscribed, within
from messaging_adapters.amqp import frames
from tests.amqp.harness import Client, Out
from tests.amqp.peer import Peer, Session, client_of, consuming, opened
from tests.oauth import TokenRabbitMQ, token

if TYPE_CHECKING:
    from tests.amqp.conftest import Connect


class Provider:
    """What the core sets: counts, and returns ``p1``, ``p2``, ..."""

    def __init__(self, username: str | None = "me", **validity: float) -> None:
        self.asked = 0
        self.username = username
        self.validity = validity
        self.error: CredentialsError | None = None

    def credentials(self) -> Credentials:
        return Credentials(self.username, f"p{self.asked}", **self.validity)

    async def __call__(self) -> Credentials:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.credentials()


@contextlib.asynccontextmanager
async def logged_in(
    provider: Provider | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, Peer, Session, Provider]]:
    """A client that is connected for publishing."""
    provider = provider or Provider()
    async with Peer() as peer, client_of(peer, credentials=lambda: "", **settings) as client:
        client.adapter.credentials = provider
        yield client, peer, await opened(client, peer), provider


async def published(client: Client, session: Session, message: Out) -> int:
    """Publish a message, which is not confirmed; the channel."""
    publishing = asyncio.create_task(client.adapter.publish([message]))
    channel = await session.published(1)
    await within(publishing)
    return channel


async def secret_of(session: Session) -> str:
    """The next frame, which is update-secret; its secret."""
    channel, frame = await session.frame()
    assert channel == 0
    assert isinstance(frame, Connection.UpdateSecret), frame
    return str(frame.new_secret)


async def renewing(client: Client, session: Session, provider: Provider) -> asyncio.Task[None]:
    """Have the client renew its credentials, up to the update-secret that arrives at ``session``."""
    task = asyncio.create_task(client.adapter.renew(provider.credentials()))
    assert await secret_of(session) == f"p{provider.asked}"
    return task


# --- log-in


async def test_each_connection_logs_in_with_new_credentials() -> None:
    async with logged_in() as (client, peer, one, provider):
        assert one.login == "\0me\0p1"
        _, two, _ = await consuming(client, peer)
        assert two.login == "\0me\0p2"
        assert provider.asked == 2


@table("settings, login", {"settings": ({"username": "joe"}, "\0joe\0p1"), "a token": ({}, "\0guest\0p1")})
async def test_where_the_provider_names_no_user_that_of_the_settings_serves(settings: Any, login: str) -> None:
    async with logged_in(Provider(None), **settings) as (_, _, one, _):
        assert one.login == login


async def test_where_the_provider_fails_the_credentials_in_use_serve_the_second_connection() -> None:
    async with logged_in() as (client, peer, _, provider):
        provider.error = CredentialsError("none")
        _, two, _ = await consuming(client, peer)
        assert two.login == "\0me\0p1"
        assert client.losses == []


async def test_expired_ones_do_not() -> None:
    async with logged_in(Provider(expires_at=time.time() - 1)) as (client, _, _, provider):
        provider.error = CredentialsError("none")
        with pytest.raises(ConnectionLostError, match="to consume on: none"):
            await client.subscribe("t")
        await client.lost()


async def test_a_refused_second_connection_is_a_loss_since_the_next_credentials_may_be_right() -> None:
    async with logged_in() as (client, peer, _, _):
        subscribing = asyncio.create_task(client.subscribe("t"))
        two = await peer.session()
        await two.greet()
        two.close_reason(403, "ACCESS_REFUSED - Login was refused")
        with pytest.raises(ConnectionLostError):
            await subscribing
        loss = await client.lost()
        assert isinstance(loss.__cause__, AuthenticationError)


# --- update-secret


def test_the_frame_is_the_librarys() -> None:
    ours = frames.update_secret("sécret" * 100, "why")
    assert ours == pamqp.frame.marshal(Connection.UpdateSecret("sécret" * 100, "why"), 0)


async def test_both_connections_get_the_new_secret_and_a_publish_meanwhile_does_not_wait() -> None:
    async with logged_in() as (client, peer, one, provider):
        _, two, _ = await consuming(client, peer)
        provider.asked = 7
        renewal = await renewing(client, one, provider)
        for session in (one, two):
            if session is two:
                assert await secret_of(two) == "p7"
            publishing = asyncio.create_task(client.publish("t", b"x"))
            channel = await one.published(1)
            one.send(Basic.Ack(1 if session is one else 2), channel)
            await publishing
            assert not renewal.done()
            session.send(Connection.UpdateSecretOk())
        await renewal
        assert client.losses == []


@table("code, again", {"refused": (530, True), "not implemented": (540, False), "command invalid": (503, False)})
async def test_a_broker_that_refuses_it_costs_a_planned_reconnect(code: int, again: bool) -> None:
    async with logged_in() as (client, peer, one, provider):
        unconfirmed = client.message("t")
        await published(client, one, unconfirmed)
        renewal = await renewing(client, one, provider)
        one.send(Connection.Close(code, "no", 10, 70))
        with pytest.raises(PlannedLossError):
            await renewal
        (loss,) = client.losses
        assert isinstance(loss, PlannedLossError)
        assert loss.code == code
        assert isinstance(unconfirmed.error, ConnectionLostError)  # the core sends it again
        two = await opened(client, peer)
        # a broker that does not know the method is not asked again
        renewal = asyncio.create_task(client.adapter.renew(provider.credentials()))
        if again:
            assert await secret_of(two) == "p2"
            two.send(Connection.UpdateSecretOk())
        else:
            await two.expect(Connection.Close)
            two.send(Connection.CloseOk())
        await renewal
        assert len(client.losses) == (1 if again else 2)


async def test_a_text_of_the_broker_that_repeats_a_password_shows_it_in_no_error(peer: Peer) -> None:
    provider = Provider()
    async with client_of(peer, credentials=lambda: "") as client:
        client.adapter.credentials = provider
        opening = asyncio.create_task(client.open())
        refusing = await peer.session()
        await refusing.greet()
        refusing.close_reason(403, "bad token p1" + 120 * "p1")
        with pytest.raises(AuthenticationError, match=r"403 bad token \*\*\*") as caught:
            await opening
        assert "p1" not in "".join(traceback.format_exception(caught.value))
        session = await opened(client, peer)
        provider.asked = 3
        renewal = await renewing(client, session, provider)
        session.close_reason(530, "refused: p3, after p2")
        with pytest.raises(PlannedLossError) as lost:
            await renewal
        assert lost.value.detail == "refused: ***, after ***"


async def test_a_broker_that_stops_meanwhile_is_a_loss() -> None:
    async with logged_in() as (client, _, one, provider):
        renewal = await renewing(client, one, provider)
        one.close_reason(320, "CONNECTION_FORCED - broker forced connection closure")
        with pytest.raises(ConnectionLostError):
            await renewal
        assert not isinstance(client.losses[0], PlannedLossError)


async def test_a_broker_that_does_not_answer_is_lost() -> None:
    async with logged_in(connect_timeout=0.2) as (client, _, one, provider):
        renewal = await renewing(client, one, provider)
        with pytest.raises(ConnectionLostError, match="no answer to update-secret within"):
            await renewal
        assert len(client.losses) == 1


async def test_a_broker_that_is_out_of_memory_may_answer_later() -> None:
    async with logged_in(connect_timeout=0.2) as (client, _, one, provider):
        one.send(Connection.Blocked("low on memory"))
        await eventually_async(lambda: client.events.impairments, "the alarm")
        await within(client.adapter.renew(provider.credentials()))
        assert await secret_of(one) == "p1"
        one.send(Connection.Unblocked())
        one.send(Connection.UpdateSecretOk())
        await eventually_async(lambda: len(client.events.impairments) == 2, "the end of the alarm")
        assert client.losses == []


async def test_another_user_name_takes_another_connection() -> None:
    async with logged_in() as (client, peer, one, provider):
        out = client.message("t")
        channel = await published(client, one, out)
        provider.username = "you"
        renewal = asyncio.create_task(client.adapter.renew(provider.credentials()))
        await asyncio.sleep(0)  # it has begun
        # messages that wait for their confirm get it; new ones wait for the next connection
        late = client.message("t")
        publishing = asyncio.create_task(client.adapter.publish([late]))
        one.send(Basic.Ack(1), channel)
        await out.result()
        await one.expect(Connection.Close)
        one.send(Connection.CloseOk())
        await renewal
        await publishing
        assert isinstance(late.error, ConnectionLostError)  # the core keeps it
        assert isinstance(client.losses[0], PlannedLossError)
        two = await opened(client, peer)
        assert two.login == "\0you\0p2"


async def test_access_that_is_refused_over_expired_credentials_is_a_loss_and_fails_no_message() -> None:
    async with logged_in(Provider(valid_for=2.0)) as (client, _, one, _):
        out = client.message("t")
        channel = await published(client, one, out)
        one.send(Channel.Close(403, "ACCESS_REFUSED - the token has expired", 60, 40), channel)
        loss = await client.lost()
        assert "the credentials have expired: 403 ACCESS_REFUSED" in str(loss)
        assert isinstance(out.error, ConnectionLostError)  # the core sends it again


async def test_access_that_is_refused_with_valid_credentials_fails_the_message() -> None:
    async with logged_in(Provider(valid_for=600.0)) as (client, _, one, _):
        out = client.message("t")
        channel = await published(client, one, out)
        one.send(Channel.Close(403, "ACCESS_REFUSED", 60, 40), channel)
        _, frame = await one.frame()
        assert isinstance(frame, Channel.CloseOk)
        while not isinstance(frame, Basic.Publish):  # once more, alone
            channel, frame = await one.answer()
            assert isinstance(frame, Basic.Publish | Exchange.Declare), frame
        one.send(Channel.Close(403, "ACCESS_REFUSED", 60, 40), channel)
        with pytest.raises(PublishRefusedError):
            await out.result()
        assert client.losses == []


def test_where_users_have_passwords_a_new_one_costs_no_connection(
    rabbitmq: RabbitMQ, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """RabbitMQ's own users: update-secret is accepted, and the next connection uses the new password."""
    caplog.set_level(logging.INFO)
    user = 'rabbit_auth_backend_internal:{}(<<"changing">>, {}<<"test">>)'
    made = user.format("add_user", '<<"p1">>, ')
    allowed = user.format("set_permissions", '<<"/">>, <<".*">>, <<".*">>, <<".*">>, ')
    rabbitmq.ctl("eval", f"{made}, {allowed}.")
    current = ["p1"]
    try:
        m = connect(
            f"amqp://{rabbitmq.host}:{rabbitmq.port}/", username="changing",
            credentials=lambda: Credentials(None, current[0], valid_for=0.5),
        )  # fmt: skip
        rabbitmq.ctl("eval", user.format("change_password", '<<"p2">>, ') + ".")
        current[0] = "p2"
        eventually(lambda: "credentials renewed" in caplog.text, "the new password")
        m.on("credentials.users", lambda _: None)  # the connection to consume on logs in with the new password
        m.publish("credentials.users", b"x").result(PATIENCE)
        assert "connection lost" not in caplog.text
        assert "as planned" not in caplog.text
        m.close()
    finally:
        rabbitmq.ctl("eval", user.format("delete_user", "") + ".")


# --- RabbitMQ with tokens


@pytest.fixture
def oauth(servers: Servers) -> Iterator[TokenRabbitMQ]:
    require("rabbitmq")
    with servers.borrow(TokenRabbitMQ, limit=1) as broker:
        yield broker


@pytest.mark.slow
def test_tokens_that_expire_lose_no_message_and_no_connection(oauth: TokenRabbitMQ, connect: Connect) -> None:
    """A token of three seconds lives two to three: the clock of its expiry counts whole seconds."""
    asked: list[float] = []

    def ask() -> str:
        asked.append(time.monotonic())
        return token(3.0)  # it says itself when it expires

    m = connect(oauth.bare_url, credentials=ask)
    received = subscribed(m, "credentials.tokens")
    before = oauth.connections()
    assert len(before) == 2
    states: Recorder[Any] = Recorder()
    m.connection_state.subscribe(states)
    sent = 0
    end = time.monotonic() + 4.5
    while time.monotonic() < end:
        m.publish("credentials.tokens", b"%d" % sent).result(PATIENCE)
        sent += 1
    # also what is new needs a valid token: a channel, a queue, a binding
    more = subscribed(m, "credentials.more")
    m.publish("credentials.more", b"more").result(PATIENCE)
    more.wait_for(1)
    received.wait_for(sent)
    assert (received.payloads, more.payloads) == ([b"%d" % number for number in range(sent)], [b"more"])
    assert oauth.connections() == before
    assert [state.name for state in states] == ["connected"]
    assert len(asked) >= 3


@pytest.mark.slow
def test_the_broker_of_these_tests_refuses_expired_tokens(
    oauth: TokenRabbitMQ, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The provider fails until after the expiry. Nothing is lost then, either."""
    fails = False

    def ask() -> str:
        if fails:
            raise OSError("no issuer")
        return token(2.0)

    m = connect(oauth.bare_url, credentials=ask)
    received = subscribed(m, "credentials.expired")
    fails = True
    promises: list[Any] = []

    def is_lost() -> bool:
        promises.append(m.publish("credentials.expired", b"%d" % len(promises)))
        return m.connection_state.value.name != "connected"

    eventually(is_lost)
    eventually(lambda: isinstance(m.connection_state.value.cause, CredentialsError), "the provider's failure")
    assert "the credentials have expired: 403 ACCESS_REFUSED" in caplog.text
    promises.append(m.publish("credentials.expired", b"held"))
    fails = False
    results(promises)
    everything = {b"held", *(b"%d" % number for number in range(len(promises) - 1))}
    eventually(lambda: set(received.payloads) == everything, "every message")
    assert m.connection_state.value.name == "connected"


@pytest.mark.slow
def test_a_token_that_the_broker_refuses_is_reported_and_the_next_one_is_tried(
    oauth: TokenRabbitMQ, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokens = [token(60.0, exp=int(time.time() + 60)), token(60.0, aud=["another"]), token(60.0)]
    remaining = list(tokens)

    def ask() -> Credentials:
        return Credentials("any", remaining.pop(0) if len(remaining) > 1 else remaining[0], valid_for=0.5)

    m = connect(oauth.bare_url, credentials=ask)
    eventually(lambda: "connecting anew, as planned" in caplog.text, "the refusal")
    eventually(lambda: m.connection_state.value.name == "connected" and len(remaining) == 1, "the next token")
    m.publish("credentials.refused", b"x").result(PATIENCE)
    assert not [text for text in tokens if text in caplog.text]
