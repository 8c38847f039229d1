"""Streams of replies that the broker does not take: their handlers have not failed (RFC 5.7.5)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest
import reactivex

from messaging import DeadlineError, Messaging, MessagingError, OutcomeUnknownError, PublishRefusedError
from messaging.interception import InboundMessage, Interceptor
from messaging.replyto import markers
from messaging.testing.tables import table
from messaging.testing.waiting import Recorder, eventually
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect
from tests.doubles.fixtures import broker as broker
from tests.doubles.fixtures import connect as connect
from tests.doubles.fixtures import fake_distribution as fake_distribution
from tests.doubles.fixtures import no_brokers as no_brokers
from tests.doubles.fixtures import no_defects as no_defects
from tests.doubles.fixtures import registry as registry

#: replies of one request that may be unconfirmed at a time
AHEAD: Final = 64


def generator() -> Iterator[str]:
    yield from map(str, itertools.count())


async def async_generator() -> AsyncIterator[str]:
    for each in generator():
        yield each


def observable() -> reactivex.Observable[str]:
    return reactivex.from_iterable(generator())


HANDLERS: Final = (generator, async_generator, observable)


class Ends(Interceptor):
    """Notes how handlers end."""

    def __init__(self) -> None:
        self.all: Recorder[BaseException | None] = Recorder()

    def intercept_process(self, inbound: InboundMessage) -> Any:
        ends = self.all

        class Scope:
            def __enter__(self) -> None: ...

            def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
                ends(error)

        return Scope()


def begin(m: Messaging, broker: FakeBroker, handler: Any) -> None:
    """Have a handler send as many replies as it may before the first is confirmed."""
    m.reply("c", handler, many=True, queue="q")
    broker.wait_subscribed()
    broker.hold = True
    many = {"headers": markers.Marker("many").headers()}
    broker.deliver(b"", channel="c", handle=0, extensions=many, reply_to_channel="r", correlation_id="1")
    eventually(lambda: len([each for each in broker.held if each.payload.isdigit()]) == AHEAD, "a full window")


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records if record.name == "messaging.replyto.served_request"]


@table("handler", HANDLERS)
def test_replies_that_are_unconfirmed_when_the_instance_closes_are_no_failure_of_their_handler(
    connect: Connect, broker: FakeBroker, caplog: pytest.LogCaptureFixture, handler: Any
) -> None:
    ends = Ends()
    m = connect(broker, interceptors=[ends])
    begin(m, broker, handler)
    m.close(0.0)
    assert ends.all.wait_for(1) == [None]
    eventually(lambda: "the instance is closed" in caplog.text, "that is logged")
    assert {*levels(caplog)} == {logging.INFO}


@table("handler", HANDLERS)
@table("error", [PublishRefusedError("too large"), DeadlineError("not sent"), OutcomeUnknownError("not confirmed")])
def test_a_reply_that_the_broker_does_not_take_ends_its_stream_with_a_fault(
    connect: Connect, broker: FakeBroker, caplog: pytest.LogCaptureFixture, error: MessagingError, handler: Any
) -> None:
    ends = Ends()
    m = connect(broker, interceptors=[ends])
    begin(m, broker, handler)
    broker.hold = False
    broker.fail(error, [each.payload for each in broker.held].index(b"0"))
    broker.confirm()
    broker.wait_acknowledged(1)
    assert str(error).encode() in broker.payloads
    assert ends.all.wait_for(1) == [None]
    assert levels(caplog) == [logging.WARNING]
    assert f"a reply on 'r' was not taken: {error}" in caplog.text
