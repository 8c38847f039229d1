"""Counters of a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StreamCounters:
    """What happened to the messages of a subscription so far. Each is written by one thread at a time."""

    #: arrived from the broker, redeliveries included
    received: int = 0
    #: handed to the consumer
    delivered: int = 0
    acknowledged: int = 0
    #: by a verdict, or by a filter where the protocol takes none
    rejected: int = 0
    #: rejected and delivered again by this process, because the protocol cannot
    redelivered: int = 0
    dead_lettered: int = 0
    #: discarded by the overflow policy, or unsettled when the stream ended and not delivered to another consumer
    dropped: int = 0
    #: did not fit the model, or could not be decoded
    invalid: int = 0
