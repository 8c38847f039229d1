"""Receiving: subscriptions and their buffers, streams, message handlers, redelivery (RFC 5.4, 5.8).

May import: ``connection``, ``adapter`` (the contract), ``model``, ``execution``, ``services``. Independent of
``publishing``.
"""

from messaging.receiving.consumers import in_observer
from messaging.receiving.counters import StreamCounters
from messaging.receiving.handler import HandlerOnInvalid, HandlerRegistration, MessageHandler
from messaging.receiving.parameters import NOT_ANNOTATED, MessageParameter, evaluated, parameter_of
from messaging.receiving.runners import (
    Handler,
    HandlerExhaustedError,
    LoopRunner,
    Origin,
    Runner,
    ThreadRunner,
    Verdict,
    is_awaitable,
)
from messaging.receiving.service import Acknowledge, MessageSubscription
from messaging.receiving.stream import MessageObserver, MessageStream
from messaging.receiving.subscription import Consumption, OnInvalid, Subscription

__all__ = [
    "NOT_ANNOTATED",
    "Acknowledge",
    "Consumption",
    "Handler",
    "HandlerExhaustedError",
    "HandlerOnInvalid",
    "HandlerRegistration",
    "LoopRunner",
    "MessageHandler",
    "MessageObserver",
    "MessageParameter",
    "MessageStream",
    "MessageSubscription",
    "OnInvalid",
    "Origin",
    "Runner",
    "StreamCounters",
    "Subscription",
    "ThreadRunner",
    "Verdict",
    "evaluated",
    "in_observer",
    "is_awaitable",
    "parameter_of",
]
