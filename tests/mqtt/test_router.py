"""Which streams a message is for."""

from __future__ import annotations

import pytest

from messaging.model import SubscriptionSpec
from messaging.model.extensions import SubscribeOptions
from messaging_adapters.mqtt.capabilities import NO_LOCAL
from messaging_adapters.mqtt.packets import PacketProperties, Publish
from messaging_adapters.mqtt.router import Router
from messaging_adapters.mqtt.streams import Stream
from tests.mqtt.harness import Sink


def message(topic: str, *identifiers: int, retain: bool = False) -> Publish:
    properties = PacketProperties()
    properties.subscriptions = identifiers
    return Publish(topic, b"", 0, retain, False, 0, properties)


def add(router: Router, pattern: str, queue: str | None = None, qos: int = 0, *, no_local: bool = False) -> Stream:
    options = SubscribeOptions(qos=str(qos), queue=queue, custom={NO_LOCAL: no_local})
    return router.add(SubscriptionSpec(pattern, None, options), Sink())


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
    router.copies.connected(is_resumed=True)
    first = add(router, "a", qos=1)
    identifier = router.identify(first)
    router.remove(first)
    assert router.receivers(message("a", identifier)) == []
    assert router.receivers(message("a", identifier)) == []
    second = add(router, "a", qos=1)
    add(router, "+", qos=1)
    assert router.receivers(message("a", identifier)) == [second]
    router.identify(second)
    assert router.receivers(message("a", identifier)) == [second]
    for number in range(2000):
        ended = add(router, f"b/{number}", qos=1)
        router.identify(ended)
        router.remove(ended)
    assert len(router._former) <= 1024
    router.reset()
    add(router, "a", qos=1)
    assert router.receivers(message("a", identifier)) == []


def test_a_message_is_not_taken_for_a_copy_of_an_equal_one_that_came_for_a_filter_that_has_ended() -> None:
    """A restored session gets one copy: those for the other filters are awaited in vain."""
    router = Router(persistent=True)
    router.copies.connected(is_resumed=True)
    streams = [add(router, pattern, qos=1) for pattern in ("a/b", "a/+", "#")]
    copies = [message("a/b", router.identify(each)) for each in streams]
    for copy in copies:
        copy.qos = 1
    assert router.receivers(copies[0]) == streams
    router.remove(streams[0])
    assert router.receivers(copies[1]) == streams[1:]
    assert router.receivers(copies[2]) == []


#: numbers of the streams
ALL = [0, 1, 2]


class Copies:
    """A persistent session with streams of overlapping filters, and the copies that a broker sends of its messages."""

    def __init__(self, *patterns: str, is_resumed: bool = False) -> None:
        self.router = Router(persistent=True)
        self.router.copies.connected(is_resumed=is_resumed)
        self.streams = [add(self.router, pattern, qos=2) for pattern in patterns]
        self.identifiers = [self.router.identify(each) for each in self.streams]

    def reconnect(self, *, is_resumed: bool = True) -> None:
        self.router.copies.connected(is_resumed=is_resumed)

    def copy(
        self,
        of: int,
        packet_id: int,
        payload: bytes = b"1",
        topic: str = "a/b",
        *,
        qos: int = 2,
        user: list[tuple[str, str]] | None = None,
    ) -> list[int]:
        """Return the numbers of the streams that get a copy, which comes for filter number ``of``."""
        publish = message(topic, self.identifiers[of])
        publish.payload, publish.qos, publish.id = payload, qos, packet_id if qos else 0
        publish.properties.user = user or []
        return [self.streams.index(each) for each in self.router.receivers(publish)]


def test_copies_of_a_message_that_come_after_a_loss_are_for_their_own_streams_alone() -> None:
    copies = Copies("a/b", "a/+", "#")
    assert copies.copy(0, 7) == [0]
    assert copies.copy(1, 8, qos=0) == [1]  # of another message, without a place in the broker's queue
    copies.reconnect()
    assert (copies.copy(1, 8), copies.copy(2, 9)) == ([1], [2])
    # an equal message: of a broker that restored the session, and of one that did not
    assert copies.copy(0, 10) == ALL
    assert [copies.copy(number, 13 + number) for number in ALL] == [ALL, [], []]


def test_copies_of_a_message_that_all_streams_have_are_dropped_after_a_loss_too() -> None:
    copies = Copies("a/b", "a/+", "#", is_resumed=True)
    assert (copies.copy(0, 0xFFFE), copies.copy(1, 0xFFFF)) == (ALL, [])
    copies.reconnect()
    copies.reconnect()
    assert copies.copy(2, 1) == []
    assert copies.copy(2, 2, b"2") == ALL
    copies = Copies("a/b", "a/+", "#", is_resumed=True)
    assert copies.copy(0, 5) == ALL
    copies.reconnect()
    assert (copies.copy(1, 6), copies.copy(2, 7)) == ([], [])
    assert copies.copy(0, 8) == ALL


def test_copies_for_filters_of_another_kind_may_come_between_those_that_a_loss_has_parted() -> None:
    copies = Copies("a/b", "#")
    copies.streams.append(add(copies.router, "a/+", "queue", qos=2))
    copies.streams.append(add(copies.router, "a/#", qos=2, no_local=True))
    copies.identifiers += [copies.router.identify(each) for each in copies.streams[2:]]
    assert (copies.copy(0, 1), copies.copy(2, 2)) == ([0], [2])
    copies.reconnect()
    assert (copies.copy(3, 3), copies.copy(1, 4)) == ([3], [1])


def test_a_restored_copy_for_a_filter_with_no_local_is_for_the_others_too() -> None:
    """It is of another client. What this instance published comes for the filters without noLocal alone."""

    def resumed(*no_local: int, count: int = 3) -> Copies:
        copies = Copies()
        copies.reconnect()
        for number, pattern in enumerate(("a/b", "a/+", "a/#", "#")[:count]):
            copies.streams.append(add(copies.router, pattern, qos=2, no_local=number in no_local))
        copies.identifiers = [copies.router.identify(each) for each in copies.streams]
        return copies

    copies = resumed(0)
    assert copies.copy(0, 1) == ALL  # the only copy
    assert [copies.copy(number, 3 + number, b"2") for number in ALL] == [ALL, [], []]  # one of three
    assert [copies.copy(number, 5 + number, b"own") for number in (1, 2)] == [[1, 2], []]
    copies.router.detach(copies.streams[2])
    assert copies.router.kept_beside(message("a/b", copies.identifiers[0])) == [copies.streams[2]]
    copies = resumed(1)
    assert [copies.copy(number, 1 + number) for number in ALL] == [[0, 2], [1], []]
    assert [copies.copy(number, 5 + number, b"own") for number in (0, 2)] == [[0, 2], []]
    copies = resumed(0, 3, count=4)
    assert [copies.copy(number, 1 + number) for number in range(4)] == [[*ALL, 3], [], [], []]
    copies = resumed(0, 2)
    assert [copies.copy(number, 1 + number) for number in ALL] == [ALL, [], []]
    copies = resumed(0, 1)
    assert [copies.copy(number, 1 + number) for number in ALL] == [ALL, [], []]
    assert [copies.copy(number, 4 + number) for number in ALL] == [ALL, [], []]  # an equal message
    assert copies.copy(0, 7) == ALL
    copies.reconnect()
    assert (copies.copy(1, 8), copies.copy(2, 9)) == ([], [])
    assert copies.copy(0, 11) == ALL  # the only copy
    assert copies.copy(2, 14) == [2]  # an equal message of this instance
    copies.router.detach(copies.streams[2])
    assert copies.router.kept_beside(message("a/b", copies.identifiers[1])) == []


def test_copies_that_a_loss_has_parted_wait_for_the_next_streams_of_their_own_filters_alone() -> None:
    copies = Copies("a/b", "a/+", "#")
    copies.router.detach(copies.streams[2])
    assert copies.copy(0, 1) == [0]
    copies.reconnect()
    assert copies.copy(1, 2) == [1]
    assert copies.router.kept_beside(message("a/b", copies.identifiers[1])) == []
    assert copies.copy(2, 3) == []
    assert copies.copy(0, 4) == [0, 1]
    assert copies.router.kept_beside(message("a/b", copies.identifiers[0])) == [copies.streams[2]]


def test_a_copy_waits_for_the_next_streams_of_the_kept_filters_that_it_came_for() -> None:
    copies = Copies("a/b", "a/+", "#")
    router, streams = copies.router, copies.streams
    queue = add(router, "a/#", "queue", qos=2)
    own = add(router, "+/b", qos=2, no_local=True)
    others = [router.identify(each) for each in (queue, own)]
    for each in (*streams[1:], queue, own):
        router.detach(each)
    router.remove(streams[0])
    former = copies.identifiers[0]
    narrow, wide = copies.identifiers[1:]

    def kept(*identifiers: int, retain: bool = False) -> list[Stream]:
        return router.kept(message("a/b", *identifiers, retain=retain), streams[:1])

    assert (kept(narrow), kept(wide)) == ([streams[1]], [streams[2]])
    assert (kept(others[0]), kept(others[1])) == ([queue], [own])
    assert kept(former) == [streams[0]]
    assert router.kept(message("a/b", former), ()) == []  # sent before the broker ended the subscription
    assert kept() == [streams[1], streams[2], queue, own, streams[0]]
    copies.reconnect()  # the broker may have restored the session: one copy for the plain subscriptions
    for identifier in (narrow, wide, former):
        assert kept(identifier) == [streams[1], streams[2], streams[0]]
    assert (kept(others[0]), kept(others[1])) == ([queue], [own])
    assert kept(narrow, retain=True) == [streams[1]]
    assert router.kept(message("a/b", former), ()) == [streams[1], streams[2], queue, own]


def test_a_restored_copy_that_a_stream_takes_is_not_kept_for_filters_with_copies_of_their_own() -> None:
    copies = Copies("a/b", "#", is_resumed=True)
    queue = add(copies.router, "a/#", "queue", qos=2)
    copies.router.identify(queue)
    copies.router.detach(queue)
    copies.router.detach(copies.streams[1])
    assert copies.router.kept_beside(message("a/b", copies.identifiers[0])) == [copies.streams[1]]


def test_a_copy_after_a_loss_that_does_not_continue_the_last_message_is_for_all_streams() -> None:
    """A broker that has restored the session sends one copy: to take it for one of the last message would lose it."""

    def parted() -> Copies:
        copies = Copies("a/b", "a/+", "#")
        assert copies.copy(1, 7) == [1]
        return copies

    copies = parted()
    copies.reconnect()
    assert copies.copy(2, 9) == ALL  # not the next packet identifier
    copies = parted()
    copies.reconnect()
    assert copies.copy(2, 8, b"2") == ALL
    copies = parted()
    copies.reconnect()
    assert copies.copy(2, 8, topic="a/b/c") == [2]
    assert copies.copy(2, 8) == ALL  # another message came between
    copies = parted()
    assert copies.copy(2, 8, topic="a/b/c") == [2]
    copies.reconnect()
    assert copies.copy(2, 8) == ALL
    copies = parted()
    copies.reconnect()
    assert copies.copy(0, 8) == ALL  # the broker finds this filter before the one that came
    copies = parted()
    copies.reconnect()
    assert copies.copy(1, 8) == ALL
    copies = parted()
    copies.reconnect(is_resumed=False)
    copies.reconnect()
    assert copies.copy(2, 8) == ALL
    copies = parted()
    copies.router.remove(copies.streams[1])
    copies.reconnect()
    assert copies.copy(2, 8) == [0, 2]  # the filter that came is no longer subscribed to
    copies = parted()
    copies.router.remove(copies.streams[0])
    copies.reconnect()
    assert copies.copy(2, 8) == [2]
    copies = Copies("a/b", "a/+", "#")
    assert copies.copy(0, 7, user=[("message-id", "x")]) == [0]
    copies.reconnect()
    assert copies.copy(1, 8, user=[("message-id", "y")]) == ALL


def test_the_filters_of_parted_copies_have_the_order_in_which_mosquitto_finds_them() -> None:
    patterns = "a/b/#", "a/b", "a/+/#", "a/+", "a/#", "+/b", "#"
    for first in range(len(patterns)):
        for second in range(len(patterns)):
            copies = Copies(*patterns)
            assert copies.copy(first, 1) == [first]
            copies.reconnect()
            assert copies.copy(second, 2) == ([second] if second > first else [*range(len(patterns))])


def test_a_message_is_not_taken_for_a_copy_of_another_one_with_an_equal_payload_and_another_id() -> None:
    copies = Copies("a/b", "a/+", "#", is_resumed=True)
    assert copies.copy(0, 1, user=[("message-id", "x")]) == ALL
    assert copies.copy(1, 4, user=[("message-id", "y")]) == ALL
    assert copies.copy(2, 5, user=[("message-id", "x")]) == []
