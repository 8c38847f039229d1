"""What is done to every protocol: the faults whose course does not depend on it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import messaging
from messaging import Promise
from messaging.testing.brokers import Broker
from messaging.testing.proxy import Proxy
from tests.faults.scenario import PATIENCE, Scene, eventually, state, through


def large(sequence: int) -> bytes:
    """A body of some thousand bytes, so that most of what is under way is the middle of a frame."""
    return b"." * (2000 + sequence % 1000)


def cut_within_a_frame(scene: Scene, *, reset: bool) -> None:
    """End connections in each direction. Of two places in a row one at least is within a frame."""
    for proxy in (scene.sending, scene.receiving):
        for flow in (proxy.up, proxy.down):
            for count in (101, 102):
                cuts = flow.cuts
                scene.outlived(partial(flow.cut_after, count, reset=reset), proxy)
                assert flow.cuts == cuts + 1


def cut_within_the_handshake(scene: Scene, *places: int) -> None:
    """End the receiver's connection after so many bytes, in each direction."""
    for flow in (scene.receiving.up, scene.receiving.down):
        for count in places:
            scene.receiving.refuse()
            flow.cut_after(count)
            cuts = flow.cuts
            scene.receiving.accept()
            eventually(lambda flow=flow, cuts=cuts: flow.cuts > cuts, "the cut")  # type: ignore[misc]
            scene.progress()


def go_byte_by_byte(scene: Scene) -> None:
    """Have everything arrive so for a while."""
    flows = (scene.sending.up, scene.sending.down, scene.receiving.up, scene.receiving.down)
    for flow in flows:
        flow.shape(piece=1, pause=0.001)
    scene.progress()  # what was under way already may have come as it was
    before = [flow.bytes - flow.pieces for flow in flows]
    scene.progress()
    assert [flow.bytes - flow.pieces for flow in flows] == before
    for flow in flows:
        flow.shape()


def half_open(
    broker: Broker, settings: dict[str, Any], context: dict[str, Any], patience: float = PATIENCE
) -> dict[str, float]:
    """How long it takes to notice, in seconds: with one direction gone, or both; idle, and with messages.

    Args:
        broker: to connect to.
        settings: of the instances.
        context: of what is published and subscribed to.
        patience: how long a message may take once the connection is back, seconds.
    """
    took: dict[str, float] = {}

    def cut(ways: tuple[str, ...], busy: bool) -> None:
        channel = f"half/{'-'.join(ways)}/{'busy' if busy else 'idle'}"
        promises: list[Promise[None]] = []
        with (
            Proxy(broker.host, broker.port) as proxy,
            messaging.connect(through(proxy, broker.url), **settings) as m,
            m.subscribe(channel, **context) as stream,
        ):
            m.publish(channel, **context).result(PATIENCE)
            stream.receive(PATIENCE)
            flows = [getattr(proxy, way) for way in ways]
            for flow in flows:
                flow.swallow()
            passed = [flow.bytes for flow in flows]
            start = time.monotonic()
            while state(m) == "connected":
                assert time.monotonic() - start < 2 * PATIENCE, f"{channel}: the loss is not noticed"
                if busy and len(promises) < 1000:
                    promises.append(m.publish(channel, **context))
                time.sleep(0.005)
            took[channel] = time.monotonic() - start
            # a broker that had no turn for seconds, on a busy machine, has sent nothing that could be swallowed
            assert proxy.up.swallowed > 0 or "up" not in ways
            assert [flow.bytes for flow in flows] == passed
            for flow in flows:
                flow.restore()
            for promise in promises:
                promise.result(patience)

    cuts = [(ways, busy) for ways in (("up", "down"), ("up",), ("down",)) for busy in (False, True)]
    with ThreadPoolExecutor(len(cuts)) as threads:
        for done in [threads.submit(cut, *each) for each in cuts]:
            done.result(3 * PATIENCE)
    return took
