"""Routes of requests: a requester at one broker is answered by a responder at another one, whatever their protocols."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pika
import pytest

import messaging
from messaging import DeadlineError, Message, MessagingError, ReplyError
from messaging.gateway import Gateway, GatewaySettings
from messaging.gateway.reports import RequestRouteDTO
from messaging.testing.brokers import Mosquitto, RabbitMQ
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually
from tests.gateway.kit import settings, unique

PROTOCOLS = ("mqtt3.1.1", "mqtt5", "amqp")

Urls = Callable[[str], str]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Urls:
    """The URL of a broker by its protocol."""

    def find(protocol: str) -> str:
        if protocol == "memory":
            return unique("memory://requests")
        if protocol == "amqp":
            return str(request.getfixturevalue("rabbitmq").url)
        mosquitto = request.getfixturevalue("mosquitto").url
        return f"{mosquitto}?version=5" if protocol == "mqtt5" else f"{mosquitto}?version=3.1.1&envelope=true"

    return find


class Bridge:
    """A gateway with one route of requests, from ``{name}/ask/{device}`` to ``{name}/{device}/ask``."""

    def __init__(self, gateway: Gateway, requester: Any, responder: Any, name: str) -> None:
        self.gateway = gateway
        self.requester = requester
        self.responder = responder
        self.name = name

    def respond(self, device: str, handler: Callable[..., Any], **options: Any) -> None:
        self.responder.reply(f"{self.name}/{device}/ask", handler, **options).ready.result(PATIENCE)

    def ask(self, device: str, content: Any = b"", **options: Any) -> Any:
        return self.requester.request(f"{self.name}/ask/{device}", content, timeout=PATIENCE, **options)

    def ask_many(self, device: str, content: Any = b"") -> Any:
        return self.requester.request_many(f"{self.name}/ask/{device}", content, timeout=PATIENCE)

    def report(self) -> RequestRouteDTO:
        (found,) = self.gateway.report().requests
        return found

    def wait_ready(self) -> None:
        """Wait until requests reach the gateway: it subscribes in the background."""
        before = self.report()
        channel = f"{self.name}/ask/ready"

        def is_answered() -> bool:
            if self.gateway.settings.requests["ask"].many:
                return len([*self.requester.request_many(channel, timeout=1.0)]) == 1
            return bool(self.requester.request(channel, timeout=1.0).result())

        eventually(lambda: answered(is_answered))
        eventually(lambda: self.report().pending == 0)
        assert self.report().answered > before.answered


def answered(ask: Callable[[], bool]) -> bool:
    """Return the result of ``ask``; a request that fails is not answered."""
    try:
        return ask()
    except MessagingError:
        return False


@contextmanager
def bridging(source: str, target: str, folder: Path, **options: Any) -> Iterator[Bridge]:
    name = unique("r")
    given = GatewaySettings.model_validate({
        "name": f"gw-{name}",
        "data": str(folder / name),
        "instances": {"source": {"url": source}, "target": {"url": target}},
        "requests": {
            "ask": {
                "from": {"instance": "source", "channel": f"{name}/ask/{{device}}"},
                "to": {"instance": "target", "channel": f"{name}/{{device}}/ask", **options.pop("to", {})},
                "timeout": 5.0,  # a busy machine takes longer than 1 s
                **options,
            }
        },
    })  # fmt: skip
    with ExitStack() as stack:
        requester = stack.enter_context(messaging.connect(source, name=f"requester-{name}"))
        responder = stack.enter_context(messaging.connect(target, name=f"responder-{name}"))
        bridge = Bridge(stack.enter_context(Gateway(given)), requester, responder, name)
        bridge.respond("ready", lambda: b"ready")
        bridge.wait_ready()
        yield bridge


PAIRS = [(a, b) for a in PROTOCOLS for b in PROTOCOLS if a != b] + [("memory", "memory"), ("mqtt5", "memory")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_request_is_answered_across_protocols(source: str, target: str, url: Urls, tmp_path: Path) -> None:
    seen: list[Message] = []

    def handle(request: Message) -> Message:
        seen.append(request)
        answer = messaging.MessageContextBuilder().content_type("application/json")
        answer.extension_entry("headers", {"unit": "degC"})
        return Message(b'{"celsius": 21.5}', answer.build_context())

    with bridging(url(source), url(target), tmp_path, to={"headers": {"device": "{device}"}}) as bridge:
        bridge.respond("d1", handle)
        before = bridge.report()
        reply = bridge.ask("d1", {"want": "temperature"}, headers={"trace": "7"}).result()
        assert reply.value() == {"celsius": 21.5}
        assert reply.context.content_type == "application/json"
        assert dict(reply.context.extensions["headers"]) == {"unit": "degC"}
        (request,) = seen
        assert request.value() == {"want": "temperature"}
        headers = dict(request.context.extensions["headers"])
        assert headers == {"trace": "7", "device": "d1", "messaging-gateways": bridge.gateway.name}
        after = bridge.report()
        assert (after.answered - before.answered, after.failed - before.failed, after.pending) == (1, 0, 0)


@pytest.mark.parametrize(("source", "target"), [("mqtt3.1.1", "amqp"), ("amqp", "mqtt5"), ("mqtt5", "mqtt3.1.1")])
def test_many_replies_cross_in_order(source: str, target: str, url: Urls, tmp_path: Path) -> None:
    with bridging(url(source), url(target), tmp_path, many=True) as bridge:

        def count(most: int) -> Iterator[int]:
            yield from range(most)

        bridge.respond("d1", count)
        assert [each.value() for each in bridge.ask_many("d1", 200)] == [*range(200)]
        assert [each.value() for each in bridge.ask_many("d1", 0)] == []
        eventually(lambda: bridge.report().pending == 0)
        assert bridge.report().answered >= 2


def test_a_stream_of_replies_fails_with_the_error_of_its_responder(url: Urls, tmp_path: Path) -> None:
    with bridging(url("mqtt5"), url("amqp"), tmp_path, many=True) as bridge:

        def fail() -> Iterator[int]:
            yield 1
            raise LookupError("no more")

        bridge.respond("d1", fail)
        replies = iter(bridge.ask_many("d1"))
        assert next(replies).value() == 1
        with pytest.raises(ReplyError, match="LookupError: no more") as caught:
            next(replies)
        assert (caught.value.kind, caught.value.reason) == ("LookupError", "no more")
        eventually(lambda: bridge.report().pending == 0)


def test_a_requester_that_wants_no_more_stops_the_responder(url: Urls, tmp_path: Path) -> None:
    closed: Recorder[bool] = Recorder()
    with bridging(url("mqtt5"), url("amqp"), tmp_path, many=True) as bridge:

        def endless() -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                closed.append(True)

        bridge.respond("d1", endless)
        with bridge.ask_many("d1") as replies:
            assert next(iter(replies)).value() == 0
        closed.wait_for(1)
        eventually(lambda: bridge.report().pending == 0)


@pytest.mark.parametrize(("source", "target"), [("mqtt3.1.1", "amqp"), ("amqp", "mqtt3.1.1"), ("memory", "memory")])
def test_the_error_of_a_responder_keeps_kind_and_reason(
    source: str, target: str, url: Urls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise LookupError("no such valve")

    with bridging(url(source), url(target), tmp_path) as bridge:
        bridge.respond("d1", refuse)
        with pytest.raises(ReplyError) as caught:
            bridge.ask("d1").result()
        assert (caught.value.kind, caught.value.reason) == ("LookupError", "no such valve")
        ours = [each for each in caplog.records if each.name == "messaging.gateway.requests"]
        assert ours[-1].levelno == logging.WARNING
        assert ours[-1].exc_info is None


@pytest.mark.parametrize(("source", "target"), [("mqtt5", "mqtt3.1.1"), ("amqp", "mqtt5")])
def test_a_device_that_does_not_answer_is_reported_in_time(source: str, target: str, url: Urls, tmp_path: Path) -> None:
    with bridging(url(source), url(target), tmp_path, timeout=1.0) as bridge:
        bridge.responder.on(f"{bridge.name}/mute/ask", lambda message: None).ready.result(PATIENCE)
        before = bridge.report().failed
        begun = time.monotonic()
        with pytest.raises(ReplyError) as caught:
            bridge.ask("mute").result()
        assert caught.value.kind == "OutcomeUnknownError"
        assert 0.9 < time.monotonic() - begun < PATIENCE
        assert bridge.report().failed == before + 1


def test_a_missing_device_is_reported_at_once_where_the_protocol_tells(url: Urls, tmp_path: Path) -> None:
    with bridging(url("mqtt5"), url("amqp"), tmp_path, timeout=PATIENCE) as bridge:
        begun = time.monotonic()
        with pytest.raises(ReplyError) as caught:
            bridge.ask("missing").result()
        assert caught.value.kind == "UnroutableError"
        assert time.monotonic() - begun < PATIENCE / 2


def test_a_request_expires_when_its_requester_has_given_up(url: Urls, tmp_path: Path) -> None:
    lives: list[Any] = []

    def handle(request: Message) -> None:
        lives.append(request.context.extensions.get("timeToLive"))

    with bridging(url("amqp"), url("mqtt5"), tmp_path, timeout=7.0) as bridge:
        bridge.respond("d1", handle)
        bridge.ask("d1").result()
    assert len(lives) == 1
    assert 5.0 < lives[0] <= 7.0


def test_headers_that_the_other_protocol_does_not_have_become_text(url: Urls, tmp_path: Path) -> None:
    seen: list[Any] = []

    def handle(request: Message) -> Message:
        seen.append(request.context.extensions["headers"]["count"])
        return request

    with bridging(url("amqp"), url("mqtt5"), tmp_path) as bridge:
        bridge.respond("d1", handle)
        bridge.ask("d1", headers={"count": 3}).result()
    assert seen == ["3"]

    def typed(request: Message) -> Message:
        context = messaging.MessageContextBuilder().extension_entry("headers", {"count": 3, "ok": True})
        return Message(b"x", context.build_context())

    with bridging(url("mqtt5"), url("amqp"), tmp_path) as bridge:
        bridge.respond("d1", typed)
        assert dict(bridge.ask("d1").result().context.extensions["headers"]) == {"count": "3", "ok": "true"}


def test_many_requests_at_a_time_are_told_apart(url: Urls, tmp_path: Path) -> None:
    with bridging(url("mqtt3.1.1"), url("amqp"), tmp_path, timeout=PATIENCE, concurrency=16) as bridge:
        bridge.respond("d1", lambda content: b"1" + content)
        bridge.respond("d2", lambda content: b"2" + content)
        promises = [bridge.ask(f"d{1 + number % 2}", str(number).encode()) for number in range(200)]
        found = [promise.result().payload for promise in promises]
        assert found == [f"{1 + number % 2}{number}".encode() for number in range(200)]
        assert bridge.report().pending == 0


def test_correlation_ids_of_the_two_sides_are_independent(url: Urls, tmp_path: Path) -> None:
    seen: list[Message] = []

    def handle(request: Message) -> None:
        seen.append(request)

    with bridging(url("amqp"), url("mqtt5"), tmp_path) as bridge:
        bridge.respond("d1", handle)
        reply = bridge.ask("d1", correlation_id="mine").result()
    assert reply.context.correlation_id == "mine"
    assert seen[0].context.correlation_id != "mine"


@table("hops", ["gateway", "many"])
def test_a_request_that_comes_back_is_refused(hops: str, url: Urls, tmp_path: Path) -> None:
    with bridging(url("mqtt5"), url("amqp"), tmp_path) as bridge:
        bridge.respond("d1", lambda: b"x")
        passed = bridge.gateway.name if hops == "gateway" else ",".join(f"g{number}" for number in range(16))
        with pytest.raises(ReplyError, match="there is a loop of routes"):
            bridge.ask("d1", headers={"messaging-gateways": passed}).result()
        bridge.ask("d1", headers={"messaging-gateways": "other"}).result()


def test_a_circle_of_requests_ends(url: Urls, tmp_path: Path) -> None:
    a, b = url("memory"), url("memory")
    requests = {
        name: {"from": {"instance": x, "channel": "x"}, "to": {"instance": y, "channel": "x"}, "timeout": 5.0}
        for name, x, y in (("there", "a", "b"), ("back", "b", "a"))
    }
    given = settings(tmp_path, instances={"a": {"url": a}, "b": {"url": b}}, routes={}, requests=requests)
    with Gateway(given), messaging.connect(a) as m:

        def is_refused() -> bool:
            try:
                m.request("x", timeout=2.0).result()
            except ReplyError as error:
                return "there is a loop of routes" in error.reason
            except DeadlineError:
                return False
            return False

        eventually(is_refused)


def test_requests_are_taken_when_the_source_comes_later(mosquitto: Mosquitto, url: Urls, tmp_path: Path) -> None:
    target, name = url("memory"), unique("late")
    with Proxy(mosquitto.host, mosquitto.port) as proxy:
        proxy.refuse()
        source = {"url": f"mqtt://127.0.0.1:{proxy.port}?version=5", "reconnect_max": 0.2, "timeout": 0.3}
        requests = {"ask": {"from": {"instance": "a", "channel": name}, "to": {"instance": "b", "channel": "ask"}}}
        given = settings(tmp_path, instances={"a": source, "b": {"url": target}}, routes={}, requests=requests)
        with (
            Gateway(given) as gateway,
            messaging.connect(target) as responder,
            messaging.connect(f"{mosquitto.url}?version=5") as requester,
        ):
            responder.reply("ask", lambda: b"here").ready.result(PATIENCE)
            time.sleep(0.5)  # sleeps: longer than the timeout of the instance, which nothing tells of
            proxy.accept()

            def is_answered() -> bool:
                return requester.request(name, qos=1, timeout=1.0).result().payload == b"here"

            eventually(lambda: answered(is_answered))
            assert gateway.problems() == []


def test_a_reload_keeps_what_is_the_same_and_ends_what_is_gone(url: Urls, tmp_path: Path) -> None:
    with bridging(url("mqtt5"), url("amqp"), tmp_path) as bridge:
        bridge.respond("d1", lambda: b"x")
        bridge.ask("d1").result()
        answered = bridge.report().answered
        before = bridge.gateway.settings
        bridge.gateway.reload(before.model_copy(update={"drain_timeout": 3.0}))
        assert bridge.report().answered == answered  # the same route, with its counters
        bridge.ask("d1").result()
        bridge.gateway.reload(before.model_copy(update={"requests": {}}))
        with pytest.raises(MessagingError):
            bridge.requester.request(f"{bridge.name}/ask/d1", qos=1, timeout=0.5).result()
        bridge.gateway.reload(before)
        bridge.wait_ready()
        bridge.ask("d1").result()


def test_a_refused_subscription_is_a_problem_and_is_made_again(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    name = unique("refused")
    source = {"instance": "a", "channel": name, "queue": name}
    requests = {"ask": {"from": source, "to": {"instance": "b", "channel": "ask"}}}
    instances = {"a": {"url": rabbitmq.url}, "b": {"url": f"memory://{name}"}}
    given = settings(tmp_path, instances=instances, routes={}, requests=requests)
    owner = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
    owner.channel().queue_declare(name, exclusive=True)  # no other connection may use the queue
    with Gateway(given) as gateway, messaging.connect(f"memory://{name}") as responder:
        responder.reply("ask", lambda: b"here").ready.result(PATIENCE)
        eventually(gateway.problems)
        assert gateway.problems()[0].startswith("requests 'ask': ")
        owner.close()
        eventually(lambda: not gateway.problems())
        with messaging.connect(rabbitmq.url) as requester:

            def is_answered() -> bool:
                return requester.request(name, timeout=1.0).result().payload == b"here"

            eventually(lambda: answered(is_answered))
