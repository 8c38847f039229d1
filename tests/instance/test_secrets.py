"""No secret in any log, repr, DTO or traceback: one is planted everywhere it can be given, then looked for."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Connection
from pamqp.frame import marshal

import messaging
from messaging.errors import AuthenticationError, ConnectFailedError, InvalidOptionError, MessagingError
from messaging.services import ServiceRegistry
from messaging.testing.brokers import RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.doubles.fake import FakeBroker, brokers, settle_loop
from tests.threads import serving

SECRET = "hunter2-pl4nted"

#: how a secret is handed in: (URL template, settings, environment); {host} is filled in
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "url": (f"{{scheme}}://me:{SECRET}@{{host}}", {}, {}),
    "option": (f"{{scheme}}://me@{{host}}?password={SECRET}", {}, {}),
    "keyword": ("{scheme}://me@{host}", {"password": SECRET}, {}),
    "environment": ("{scheme}://me@{host}", {}, {"MESSAGING_PASSWORD": SECRET}),
    "file": ("{scheme}://me@{host}", {}, {"MESSAGING_PASSWORD_FILE": "{file}"}),
    "url from the environment": ("", {}, {"MESSAGING_URL": f"{{scheme}}://me:{SECRET}@{{host}}"}),
}


#: credentials that change, by the option that names their source
SOURCES: dict[str, Callable[[Path], Any]] = {
    "credentials": lambda _: lambda: SECRET,
    "password_command": lambda file: ["cat", str(file)],
    "password_file": lambda file: file,
}


class Watch:
    """Sees every log record of every logger, formatted with its traceback."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []

    def text(self) -> str:
        formatter = logging.Formatter("%(name)s %(message)s %(args)s")
        parts = []
        for record in self.records:
            parts.append(formatter.format(record))
            parts.append(repr(record.args))
        return "\n".join(parts)


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Iterator[Watch]:
    watch = Watch()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            watch.records.append(record)

    handler = Handler(level=0)
    root = logging.getLogger()
    root.addHandler(handler)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "messaging"):
        yield watch
    root.removeHandler(handler)


Connect = Callable[..., messaging.Messaging]
each_way = table("way", [*WAYS])


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """Connects by way, scheme, host and settings, with the secret handed in that way."""

    def connect(way: str, scheme: str, host: str, **more: Any) -> messaging.Messaging:
        file = tmp_path / "password"
        file.write_text(SECRET + "\n")
        source = {way: SOURCES[way](file)} if way in SOURCES else {}
        template, settings, environment = ("{scheme}://me@{host}", source, {}) if source else WAYS[way]
        url = template.format(scheme=scheme, host=host) or None
        with pytest.MonkeyPatch.context() as patched:
            for variable, value in environment.items():
                patched.setenv(variable, value.format(scheme=scheme, host=host, file=file))
            return messaging.connect(url, services=ServiceRegistry(), **{**settings, **more})

    return connect


def locals_below(error: BaseException, application: str = __file__) -> Iterator[str]:
    """What a report with locals shows of the frames below the application, which a test file stands for."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename != application:
            for name, value in frame.f_locals.items():
                yield f"{frame.f_code.co_qualname}: {name} = {value!r}"


def told(error: BaseException, *, frames: bool = True, application: str = __file__) -> str:
    """Everything an error can end up as in a log or a report with locals, causes and contexts included."""
    seen: set[int] = set()
    parts = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        parts += [str(each), repr(each), repr(each.args), "".join(traceback.format_exception(each))]
        parts += [repr(value) for name, value in vars(each).items() if not name.startswith("__")]
        parts += locals_below(each, application) if frames else ()
        pending += [each.__cause__, each.__context__]
    return "\n".join(parts)


def shown(m: messaging.Messaging, broker: FakeBroker) -> str:
    dto = m.runtime.get_runtime_dto()
    adapter = broker.adapter
    references = m.services.find()
    return "\n".join(
        [
            repr(m),
            str(m),
            repr(dto),
            json.dumps(dataclasses.asdict(dto), default=lambda value: [*value]),
            str(adapter.url),
            repr(adapter.url),
            f"{adapter.url!s:>200}",
            repr(adapter.settings),
            str(adapter.settings),
            adapter.settings.model_dump_json(),
            repr(adapter.settings.model_dump()),
            repr(adapter),
            repr(m.ready),
            *(repr(dict(reference.properties)) for reference in references),
        ]
    )


def check(watch: Watch, *texts: str) -> None:
    for text in (*texts, watch.text()):
        assert SECRET not in text


def test_the_watch_would_see_it(watch: Watch) -> None:
    for argument in (SECRET, {"password": SECRET}):
        watch.records.clear()
        logging.getLogger("some.library").debug("options: %r", argument)
        with pytest.raises(AssertionError):
            check(watch)
    watch.records.clear()
    below, above = ValueError(SECRET), MessagingError("above")
    above.__context__ = below
    above.__suppress_context__ = True
    assert SECRET in told(above)


@table(
    "keywords, variables",
    {
        "wrong headers": ({"ws_headers": {"Authorization": SECRET, "": "1"}}, {}),
        "headers beside a wrong option": ({"ws_headers": {"Authorization": SECRET}, "timeout": -1}, {}),
        "malformed headers of the environment": ({}, {"WS_HEADERS": '{"Authorization": "' + SECRET}),
        "the environment beside a wrong option": ({"timeout": -1}, {"WS_HEADERS": '{"a": "' + SECRET + '"}'}),
        "a command beside a wrong variable": ({}, {"PASSWORD_COMMAND": SECRET, "TIMEOUT": "-1"}),
    },
)
def test_settings_that_are_refused_show_nothing(
    monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], variables: dict[str, str]
) -> None:
    """Options that are secret by their names only are text in the settings."""
    for name, value in variables.items():
        monkeypatch.setenv(f"MESSAGING_{name}", value)
    with pytest.raises(InvalidOptionError) as caught:
        messaging.connect("ws://broker.invalid", services=ServiceRegistry(), **keywords)
    assert SECRET not in told(caught.value)


@each_way
def test_a_working_connection_shows_nothing(watch: Watch, connect: Connect, way: str, broker: FakeBroker) -> None:
    m = connect(way, "fake", broker.name)
    given = broker.adapter.url.password or broker.adapter.settings.password
    assert given is not None
    assert given.get_secret_value() == SECRET  # it arrived, at least
    with m, m.subscribe("a") as stream:
        broker.deliver(b"1")
        stream.receive(PATIENCE)
        m.publish("a", b"1").result(PATIENCE)
        check(watch, shown(m, broker))
        broker.lose_and_reconnect()
    check(watch, shown(m, broker))


@each_way
@table("failure", [AuthenticationError("refused"), ConnectFailedError("no route"), OSError("x"), None])
def test_a_failing_or_slow_connection_shows_nothing(
    watch: Watch, connect: Connect, way: str, broker: FakeBroker, failure: Exception | None
) -> None:
    if failure is None:
        broker.gates["open"].close()
    else:
        broker.errors["open"].append(failure)
    with pytest.raises(ConnectFailedError) as caught:
        connect(way, "fake", broker.name, connect_timeout=0.05 if failure is None else 10.0)
    check(watch, told(caught.value))


@each_way
def test_a_mistake_beside_it_shows_nothing(watch: Watch, connect: Connect, way: str, broker: FakeBroker) -> None:
    for mistake in ({"tiemout": 1}, {"timeout": "soon"}, {"overflow": "x"}, {"name": ""}, {"labels": 7}):
        with pytest.raises(MessagingError) as caught:
            connect(way, "fake", broker.name, **mistake)
        check(watch, told(caught.value))


@each_way
@table("scheme", ["memory", "nats"])
def test_an_adapter_that_wants_no_password_shows_nothing(watch: Watch, connect: Connect, way: str, scheme: str) -> None:
    with pytest.raises(MessagingError) as caught:
        connect(way, scheme, "x")
    check(watch, told(caught.value))


@each_way
@table("scheme", ["mqtt", "mqtts", "amqp", "amqps"])
def test_a_closed_port_shows_nothing(watch: Watch, connect: Connect, way: str, scheme: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ConnectFailedError) as caught:
            connect(way, scheme, f"127.0.0.1:{closed.getsockname()[1]}", connect_timeout=5.0)
    check(watch, told(caught.value))
    assert "127.0.0.1" in str(caught.value)


START = marshal(Connection.Start(mechanisms="PLAIN", locales="en_US", server_properties={}), 0)


@table("way", [*WAYS, *SOURCES])
@table(
    ("scheme", "greeting", "settings"),
    [("mqtt", b"", {}), ("mqtt", b"", {"auth_method": "M"}), ("amqp", START, {})],
    ids=["mqtt", "mqtt with method", "amqp"],
)
def test_a_connection_lost_at_login_shows_nothing(
    watch: Watch, connect: Connect, way: str, scheme: str, greeting: bytes, settings: dict[str, Any]
) -> None:
    def end(peer: socket.socket) -> None:
        """Greet, read what comes, and reset the connection."""
        peer.sendall(greeting)
        while SECRET.encode() not in peer.recv(65_536):
            pass
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with serving(end) as port, pytest.raises(ConnectFailedError) as caught:
        connect(way, scheme, f"127.0.0.1:{port}", **settings)
    check(watch, told(caught.value))


@each_way
def test_a_refused_password_shows_nothing(watch: Watch, connect: Connect, way: str, rabbitmq: RabbitMQ) -> None:
    with pytest.raises(AuthenticationError, match="refused the credentials of 'me': 403 ACCESS_REFUSED") as caught:
        connect(way, "amqp", f"127.0.0.1:{rabbitmq.port}")
    check(watch, told(caught.value))


@each_way
def test_the_asyncio_face_shows_nothing(watch: Watch, connect: Connect, way: str, broker: FakeBroker) -> None:
    broker.errors["open"].append(AuthenticationError("refused"))

    async def fail() -> MessagingError:
        with pytest.raises(AuthenticationError) as caught:
            async with connect(way, "fake", broker.name):
                raise AssertionError("entered")
        return caught.value

    async def work() -> str:
        async with connect(way, "fake", broker.name) as m:
            return shown(m, broker)

    check(watch, told(asyncio.run(fail())), asyncio.run(work()))


@table(
    "url",
    [
        f"fake://me:{SECRET}@host:port",
        f"fake://me:{SECRET}@",
        f"fake://me:{SECRET}@ho st",
        f"fake://me:{SECRET}/@host",
        f"fake://me:{SECRET}@@host",
        f"fake://me:a:{SECRET}@host",
        f"fake://me:%zz{SECRET}@host",
        f"fake://me:%ff{SECRET}@host",
        f"fake://:{SECRET}@host",
        f"fake:/me:{SECRET}@host",
        f"me:{SECRET}@host",
        f"fake://me:{SECRET}#@host",
        f"fake://me:{SECRET}@host?password={SECRET}&password={SECRET}",
        f"fake://host?password={SECRET}%",
        f"fake://host?password={SECRET}&tiemout=1",
    ],
)
def test_a_url_that_is_refused_shows_nothing(watch: Watch, url: str) -> None:
    with pytest.raises(MessagingError) as caught:
        messaging.connect(url, services=ServiceRegistry())
    check(watch, told(caught.value))


@table("option", ["timeout", "labels"])
def test_the_value_of_an_option_that_does_not_fit_is_not_repeated(watch: Watch, option: str) -> None:
    """Not even that of an option which is no secret by its name. Variables of frames may show the latter."""
    with pytest.raises(MessagingError) as caught:
        messaging.connect(f"fake://host?{option}={SECRET}", services=ServiceRegistry())
    check(watch, told(caught.value, frames=False))


@each_way
def test_a_failed_promise_that_is_never_retrieved_shows_nothing(
    watch: Watch, connect: Connect, way: str, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def forget() -> None:
        broker.errors["open"].append(AuthenticationError("refused"))
        connect(way, "fake", broker.name)

    asyncio.run(forget())
    eventually(lambda: not broker.errors["open"], "the failure")
    settle_loop()
    eventually(lambda: gc.collect() is not None and "was never retrieved" in caplog.text, "the log entry")
    check(watch)
    caplog.clear()


def test_payloads_and_headers_are_not_logged_either(watch: Watch, broker: FakeBroker) -> None:
    with messaging.connect(broker.url, services=ServiceRegistry()) as m:
        m.publish("a", SECRET, headers={"authorization": SECRET}).result(PATIENCE)
        with m.subscribe("a", dict[str, int], on_invalid="skip", buffer_size=1, overflow="drop_oldest") as stream:
            for _ in range(3):
                broker.deliver(
                    f'{{"x": "{SECRET}"}}'.encode(),
                    content_type="application/json",
                    extensions={"headers": {"authorization": SECRET}},
                )
            with pytest.raises(TimeoutError):
                stream.receive(0.05)  # what arrives is invalid, and skipped
            eventually(lambda: stream.counters.received == 3)
            with pytest.raises(TimeoutError):
                stream.receive(0)
            assert stream.counters.invalid + stream.counters.dropped == 3
        check(watch, shown(m, broker))


@pytest.fixture(autouse=True)
def _forget_brokers() -> Iterator[None]:
    yield
    brokers.clear()
