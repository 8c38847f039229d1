"""Which streams a message is for."""

from __future__ import annotations

import pytest

from adapters.mqtt.packets import Properties, Publish
from adapters.mqtt.router import Router
from adapters.mqtt.streams import Stream
from tests.mqtt.harness import In


def message(topic: str, *identifiers: int, retain: bool = False) -> Publish:
    properties = Properties()
    properties.subscriptions = identifiers
    return Publish(topic, b"", 0, retain, False, 0, properties)


def add(router: Router, pattern: str, queue: str | None = None, qos: int = 0) -> Stream:
    return router.add(queue, pattern, qos, In())


@pytest.fixture
def router() -> Router:
    return Router(persistent=False)


def test_by_topic_every_matching_stream_gets_one_copy(router: Router) -> None:
    wide, narrow, again, other = add(router, "a/#"), add(router, "a/b"), add(router, "a/b"), add(router, "b")
    assert set(router.receivers(message("a/b"))) == {wide, narrow, again}
    assert router.receivers(message("b")) == [other]
    assert router.receivers(message("c")) == []
    router.remove(wide)
    assert set(router.receivers(message("a/b"))) == {narrow, again}
    late = add(router, "+/b")
    assert set(router.receivers(message("a/b"))) == {narrow, again, late}


def test_by_identifier_each_packet_serves_the_routes_it_names(router: Router) -> None:
    wide, narrow = add(router, "a/#"), add(router, "a/b")
    first, second = router.identify(wide), router.identify(narrow)
    assert router.receivers(message("a/b", first)) == [wide]
    assert router.receivers(message("a/b", second)) == [narrow]
    assert router.receivers(message("a/b", first, second)) == [wide, narrow]
    assert router.receivers(message("a/b", 999)) == []  # a subscription that has ended meanwhile


def test_every_subscribe_has_an_identifier_and_earlier_ones_stay_known_for_a_while(router: Router) -> None:
    first, second = add(router, "a"), add(router, "a")
    old, new = router.identify(first), router.identify(second)
    assert old != new
    assert router.receivers(message("a", old)) == router.receivers(message("a", new)) == [first, second]
    for _ in range(100):
        newest = router.identify(second)
    assert router.receivers(message("a", newest)) == [first, second]
    assert len(router._identified) == 64
    router.remove(first)
    router.remove(second)
    assert not router._identified


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


def test_a_queue_takes_turns(router: Router) -> None:
    members = [add(router, "a", "q") for _ in range(3)]
    single = add(router, "a", "other")
    turns = [router.receivers(message("a")) for _ in range(6)]
    assert all(len(turn) == 2 and turn[1] is single for turn in turns)
    assert [turn[0] for turn in turns] == (members[1:] + members[:1]) * 2
    router.remove(members[0])
    assert {router.receivers(message("a"))[0] for _ in range(4)} == {*members[1:]}
    assert members[1].route.filter == "$share/q/a"


def test_a_retained_message_is_for_the_stream_whose_subscribe_it_answers(router: Router) -> None:
    first, second = add(router, "a/#"), add(router, "a/#")
    one, two = router.identify(first), router.identify(second)
    assert router.receivers(message("a/b", one, retain=True)) == [first]
    assert router.receivers(message("a/b", two, retain=True)) == [second]
    router.remove(second)
    assert router.receivers(message("a/b", two, retain=True)) == []
    assert router.receivers(message("a/b", two)) == [first]
    queue = add(router, "a/#", "q")
    assert router.receivers(message("a/b", router.identify(queue), retain=True)) == []


def test_without_identifiers_a_retained_message_is_for_the_newest_that_has_not_had_it(router: Router) -> None:
    first = add(router, "a/#")
    kept = message("a/b", retain=True)
    assert router.receivers(kept) == [first]
    second, third, queue = add(router, "a/b"), add(router, "a/#"), add(router, "a/#", "q")
    assert router.receivers(kept) == [third]
    assert router.receivers(kept) == [second]
    assert router.receivers(kept) == []
    assert router.receivers(message("a/c", retain=True)) == [third]
    assert queue not in router.receivers(message("a/d", retain=True))


def test_bookkeeping_is_bounded(router: Router) -> None:
    stream = add(router, "#")
    for number in range(10_000):
        router.receivers(message(f"a/{number}"))
        router.receivers(message(f"a/{number}", retain=True))
    assert len(stream.replayed) <= 4096
    assert len(router._matched) <= 4096


def test_the_highest_qos_of_a_route_counts_and_is_confirmed_anew(router: Router) -> None:
    route = add(router, "a", qos=1).route
    route.confirmed = True
    assert add(router, "a", qos=0).route is route
    assert (route.qos, route.confirmed) == (1, True)
    add(router, "a", qos=2)
    assert (route.qos, route.confirmed) == (2, False)


def test_reset_voids_every_handle(router: Router) -> None:
    stream = add(router, "a")
    router.identify(stream)
    router.orphans.add("x")
    router.reset()
    assert stream.ended
    assert router.receivers(message("a")) == []
    assert not router.orphans
