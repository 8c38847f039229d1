"""Replies that come later than their handlers return, while the responder closes: an answer is always given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import messaging
from messaging import Messaging
from messaging.dispatch.calls import CallServer, call
from messaging.errors import ClosedError, ReplyError
from messaging.execution import Promise
from messaging.replyto import DeferredReply
from messaging.testing import waiting
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.leases.conftest import Connect
from tests.leases.conftest import channel as channel
from tests.leases.conftest import connect as connect
from tests.leases.conftest import memory as memory
from tests.threads import in_background

Pending = waiting.Recorder[Promise[Any]]
Serve = Callable[[Messaging, str, Pending], Any]
Ask = Callable[[Messaging, str], Promise[Any]]


def _pending(waits: Pending) -> Promise[Any]:
    waits.append(Promise("a reply"))
    return waits[-1]


def _handler(m: Messaging, channel: str, waits: Pending) -> Any:
    return m.reply(channel, lambda _: DeferredReply(_pending(waits)))


def _call_server(m: Messaging, channel: str, waits: Pending) -> Any:
    return CallServer(m, channel, {"wait": lambda *_: _pending(waits)})


def _end(server: Any) -> None:
    server.close() if isinstance(server, CallServer) else server.unregister()


def _ask(m: Messaging, channel: str) -> Promise[Any]:
    return m.request(channel, b"", timeout=PATIENCE)


def _call(m: Messaging, channel: str) -> Promise[Any]:
    return call(m, channel, "wait", timeout=PATIENCE)


@table(
    ("serve", "ask", "ends_first"),
    [(_handler, _ask, False), (_handler, _ask, True), (_call_server, _call, False), (_call_server, _call, True)],
)
def test_a_deferred_reply_that_becomes_ready_while_the_responder_closes_is_sent(
    connect: Connect, channel: str, serve: Serve, ask: Ask, ends_first: bool
) -> None:
    requester, responder, waits = connect(), connect(), Pending()
    server = serve(responder, channel, waits)
    server.ready.result(PATIENCE)
    answer = ask(requester, channel)
    waits.wait_for(1)
    if ends_first:
        _end(server)
    closed = in_background(responder.close)
    waiting.eventually(lambda: _is_closing(responder))
    waits[0].resolve(b"ready")
    closed()
    found = answer.result(PATIENCE)
    assert (found.payload if isinstance(found, messaging.Message) else found) == b"ready"


@table(("serve", "ask"), [(_handler, _ask), (_call_server, _call)])
def test_a_deferred_reply_that_is_not_ready_when_the_responder_closes_becomes_a_fault(
    connect: Connect, channel: str, serve: Serve, ask: Ask
) -> None:
    requester, responder, waits = connect(), connect(), Pending()
    serve(responder, channel, waits).ready.result(PATIENCE)
    answer = ask(requester, channel)
    waits.wait_for(1)
    responder.close(0.5)
    error = answer.exception(PATIENCE)
    assert isinstance(error, ReplyError)
    assert error.kind == ClosedError.__name__
    waits[0].resolve(b"too late")


@table(("serve", "ask"), [(_handler, _ask), (_call_server, _call)])
@table("spent", ["no time", "by an observer", "without a thread"])
def test_a_deferred_request_is_answered_if_no_time_is_left_for_closing(
    connect: Connect, channel: str, monkeypatch: pytest.MonkeyPatch, serve: Serve, ask: Ask, spent: str
) -> None:
    monkeypatch.setattr("messaging.connection.connection._ANSWER_SECONDS", PATIENCE)  # the machine may be busy
    requester, responder, waits = connect(), connect(), Pending()
    serve(responder, channel, waits).ready.result(PATIENCE)
    answer = ask(requester, channel)
    waits.wait_for(1)
    release = threading.Event()
    if spent == "by an observer":
        busy = threading.Event()

        def observe(_: messaging.Message) -> None:
            busy.set()
            release.wait(PATIENCE)

        stream = responder.subscribe("busy")
        stream.subscribe(observe)
        stream.ready.result(PATIENCE)
        requester.publish("busy", b"").result(PATIENCE)
        assert busy.wait(PATIENCE)
    elif spent == "without a thread":
        monkeypatch.setattr("messaging.replyto.replies.workers", lambda: _NoThreads)
    try:
        responder.close(0.05 if spent == "by an observer" else 0.0)
        error = answer.exception(PATIENCE)
    finally:
        release.set()
    assert isinstance(error, ReplyError)
    assert error.kind == ClosedError.__name__


class _NoThreads:
    @staticmethod
    def submit(_: Any) -> None:
        raise RuntimeError("can't start new thread")


def _is_closing(m: Messaging) -> bool:
    try:
        m.__enter__()
    except ClosedError:
        return True
    return False
