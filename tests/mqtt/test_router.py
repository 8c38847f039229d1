"""Which streams a message is for."""

from __future__ import annotations

import pytest

from adapters.mqtt.packets import Properties, Publish
from adapters.mqtt.router import Router
from adapters.mqtt.streams import Stream
from tests.mqtt.harness import Sink


def message(topic: str, *identifiers: int, retain: bool = False) -> Publish:
    properties = Properties()
    properties.subscriptions = identifiers
    return Publish(topic, b"", 0, retain, False, 0, properties)


def add(router: Router, pattern: str, queue: str | None = None, qos: int = 0) -> Stream:
    return router.add(queue, pattern, qos, Sink())


@pytest.fixture
def router() -> Router:
    return Router(persistent=False)


def test_by_identifier_each_packet_serves_the_routes_it_names(router: Router) -> None:
    wide, narrow = add(router, "a/#"), add(router, "a/b")
    first, second = router.identify(wide), router.identify(narrow)
    assert router.receivers(message("a/b", first)) == [wide]
    assert router.receivers(message("a/b", second)) == [narrow]
    assert router.receivers(message("a/b", first, second)) == [wide, narrow]
    assert router.receivers(message("a/b", 999)) == []  # a subscription that has ended meanwhile


def test_identifiers_of_an_earlier_process_route_by_topic() -> None:
    router = Router(persistent=True)
    stream, other = add(router, "a/#"), add(router, "b")
    mine = router.identify(stream)
    foreign = mine % 268_435_455 + 1000
    assert router.receivers(message("a/b", mine)) == [stream]
    assert router.receivers(message("a/b", foreign)) == [stream]
    assert router.receivers(message("b", mine)) == []  # the same number by chance: never to the wrong stream
    assert router.receivers(message("b", foreign)) == [other]
    ended = router.identify(other)
    router.remove(other)
    assert router.receivers(message("a/b", ended)) == []


def test_bookkeeping_is_bounded(router: Router) -> None:
    stream = add(router, "#")
    for number in range(10_000):
        router.receivers(message(f"a/{number}"))
        router.receivers(message(f"a/{number}", retain=True))
    assert len(stream.replayed) <= 4096
    assert len(router._matched) <= 4096
    for _ in range(100):
        router.identify(stream)
    assert len(router._identified) == 64


def test_the_highest_qos_of_a_route_counts_and_is_confirmed_anew(router: Router) -> None:
    route = add(router, "a", qos=1).route
    route.confirmed = True
    assert add(router, "a", qos=0).route is route
    assert (route.qos, route.confirmed) == (1, True)
    add(router, "a", qos=2)
    assert (route.qos, route.confirmed) == (2, False)


def test_the_next_stream_of_a_filter_gets_the_messages_that_a_session_holds_for_the_last_one() -> None:
    router = Router(persistent=True)
    router.connected(is_resumed=True)
    first = router.add(None, "a", 1, Sink())
    identifier = router.identify(first)
    router.remove(first)
    assert router.receivers(message("a", identifier)) == []
    assert router.receivers(message("a", identifier)) == []
    second = router.add(None, "a", 1, Sink())
    router.add(None, "+", 1, Sink())
    assert router.receivers(message("a", identifier)) == [second]
    router.identify(second)
    assert router.receivers(message("a", identifier)) == [second]
    for number in range(2000):
        ended = router.add(None, f"b/{number}", 1, Sink())
        router.identify(ended)
        router.remove(ended)
    assert len(router._former) <= 1024
    router.reset()
    router.add(None, "a", 1, Sink())
    assert router.receivers(message("a", identifier)) == []


def test_a_message_is_not_taken_for_a_copy_of_an_equal_one_that_came_for_a_filter_that_has_ended() -> None:
    """A restored session gets one copy: those for the other filters are awaited in vain."""
    router = Router(persistent=True)
    router.connected(is_resumed=True)
    streams = [add(router, pattern, qos=1) for pattern in ("a/b", "a/+", "#")]
    copies = [message("a/b", router.identify(each)) for each in streams]
    for copy in copies:
        copy.qos = 1
    assert router.receivers(copies[0]) == streams
    router.remove(streams[0])
    assert router.receivers(copies[1]) == streams[1:]
    assert router.receivers(copies[2]) == []
