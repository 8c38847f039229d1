"""Faults of the MQTT adapter."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

MQTT = (
    # --- sessions
    Planted(
        "a session misses messages between an UNSUBSCRIBE and the SUBSCRIBE of a new connection",
        "Leave a session its subscriptions when an attempt fails",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/subscriptions.py",
                """\
        if self._router.orphans or self._abandoned:
            self._timer = clock.call_later(asyncio.get_running_loop(), ORPHAN_TIMEOUT, self.end_orphans)
""",
                "        self.end_orphans()\n",
            ),
            Edit(
                "adapters/messaging_adapters/mqtt/subscriptions.py",
                "on_failure(partial(self._withdraw, stream, is_at_broker=not self._persistent)):",
                "on_failure(partial(self._withdraw, stream, is_at_broker=True)):",
            ),
        ),
        "tests/mqtt/test_session.py::test_an_attempt_to_subscribe_leaves_the_session_what_it_has",
    ),
    Planted(
        "a subscription that ended without a connection stays in the session for good",
        "Leave a session its subscriptions when an attempt fails",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "        self.subscriptions.end_orphans()\n",
                "",
            ),
        ),
        "tests/mqtt/test_session.py::test_an_unsubscription_without_a_connection_is_sent_when_the_session_is_left",
    ),
    Planted(
        "unconfirmed messages are sent again in the wrong order in a resumed session",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/in_flight.py",
                "self.unresumed.extendleft(reversed(self.handshakes.values()))",
                "self.unresumed.extendleft(self.handshakes.values())",
            ),
        ),
        "tests/mqtt/test_session.py::test_a_resumed_session_finishes_every_handshake_in_order_within_the_window",
    ),
    Planted(
        "a released message is never sent again to a broker that has lost the session",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/in_flight.py",
                """\
        if not connack.session_present:
            for handshake in self.unresumed:
                handshake.released = False
""",
                "",
            ),
        ),
        "tests/mqtt/test_session.py::test_if_the_session_is_lost_unfinished_messages_are_sent_as_new_ones",
    ),
    Planted(
        "verdicts on messages of a lost session are taken for given",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/adapter.py",
                "        return token.receipt.session != self.session.inbound.answers.session or token.stream.ended",
                "        return False",
            ),
        ),
        "tests/mqtt/test_session.py::test_tokens_of_a_lost_session_are_stale_and_never_reach_the_next_one",
    ),
    Planted(
        "closing acknowledges the unsettled messages of a session",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/answers.py",
                "            if receipt.is_due:\n                self._answer(receipt)\n        self._due.clear()",
                "            self._answer(receipt)\n        self._due.clear()",
            ),
        ),
        "tests/mqtt/test_session.py::test_closing_leaves_unsettled_messages_to_the_session",
    ),
    Planted(
        "messages of a resumed session that have no stream yet are acknowledged and lost",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "        await_claims = connack.session_present\n",
                "        await_claims = False\n",
            ),
        ),
        "tests/mqtt/test_session.py::test_messages_of_a_resumed_session_wait_for_the_streams_that_subscribe",
    ),
    Planted(
        "messages of a stream that ends are not passed to one that has subscribed meanwhile",
        "Pass messages of an ending stream to one that subscribed meanwhile",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/inbound.py",
                "if token.receipt.number < heir.since or heir.route.is_shared:\n"
                "                    del stream.unsettled[token]\n"
                "                    self._deliver_again(token.receipt, heir)\n"
                "                    break",
                "if False:\n                    break",
            ),
        ),
        "tests/mqtt/test_ended_streams.py"
        "::test_messages_of_an_ending_stream_go_to_a_stream_that_has_subscribed_meanwhile",
    ),
    Planted(
        "the next stream of a filter does not get the messages of the last one's identifiers",
        "Route messages of a session to the next stream of their filter",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/router.py",
                "            self._former[route.filter] = route\n",
                "            pass\n",
            ),
        ),
        "tests/mqtt/test_router.py"
        "::test_the_next_stream_of_a_filter_gets_the_messages_that_a_session_holds_for_the_last_one",
    ),
    Planted(
        "only the first connection of a process keeps messages of a session without a stream",
        "Keep messages of any resumed session for the streams to come",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "        if await_claims:\n            self.inbound",
                "        if of_earlier:\n            self.inbound",
            ),
        ),
        "tests/mqtt/test_ended_streams.py"
        "::test_messages_of_a_resumed_session_wait_for_a_stream_whose_first_attempt_was_lost",
    ),
    Planted(
        "a message that crosses its unsubscription is lost to the next stream of the session",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/subscriptions.py",
                "        if self._persistent:\n            self._inbound.leftovers.departing[stream] = None\n",
                "",
            ),
        ),
        "tests/mqtt/test_ended_streams.py"
        "::test_a_message_that_crosses_the_unsubscription_is_left_to_the_next_stream_of_the_session",
    ),
    Planted(
        "messages that the broker had queued for a closed stream are lost to the next one",
        "Keep queued messages of a closed stream for the session's next one",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/subscriptions.py",
                "unsubscribe(route.filter, *self._ends(stream, stream))",
                "unsubscribe(route.filter, *self._ends(stream))",
            ),
        ),
        "tests/mqtt/test_ended_streams.py"
        "::test_messages_that_the_broker_had_queued_for_a_closed_stream_wait_for_the_next_one",
    ),
    Planted(
        "a copy behind one for a filter with noLocal comes a second time in a resumed session",
        "Drop further copies of messages that came for a filter with noLocal",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/copies.py",
                "if route in served if is_alone else last.is_parted:",
                "if last.is_parted and not is_alone:",
            ),
        ),
        "tests/mqtt/test_router.py::test_a_restored_copy_for_a_filter_with_no_local_is_for_the_others_too",
    ),
    Planted(
        "messages of a kept subscription that was ended hold up other streams for good",
        "Drop messages of a kept subscription that has ended as those of others",
        "mqtt",
        (Edit("adapters/messaging_adapters/mqtt/router.py", "        route.is_kept = False\n", ""),),
        "tests/mqtt/test_ended_streams.py"
        "::test_a_stream_that_ends_a_kept_subscription_holds_up_the_others_for_a_limited_time",
    ),
    # --- answers
    Planted(
        "messages of a resumed 3.1.1 session are answered out of order",
        "MQTT: a resumed session is answered in the broker's order",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/answers.py",
                "        self.window = limit if v5 else min(limit, _MOSQUITTO_WINDOW)",
                "        self.window = limit",
            ),
        ),
        "tests/mqtt/test_delivery_order.py::test_resent_messages_of_a_3_1_1_session_are_answered_within_the_window",
    ),
    Planted(
        "messages that nothing settles hold up the answers to the others of a session",
        "Let no resent message without a stream hold up the answers to others",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/answers.py",
                "        if looks < _LOOKS:",
                "        if self._behind:",
            ),
        ),
        "tests/mqtt/test_delivery_order.py"
        "::test_a_window_of_unsettled_messages_holds_up_the_answers_to_others_for_a_limited_time",
    ),
    Planted(
        "a record that was lost is taken for one that was given",
        "MQTT: a record that was lost is not taken for one that was given",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/answers.py",
                """\
            if receipt.recorded:  # the PUBREC was lost
                receipt.recorded, receipt.publish = False, publish
""",
                "",
            ),
        ),
        "tests/mqtt/test_delivery_order.py"
        "::test_a_message_whose_record_was_lost_is_recorded_again_also_beyond_the_window",
    ),
    Planted(
        "answers after the DISCONNECT of a planned reconnect are lost",
        "Hold answers from the DISCONNECT of a planned reconnect on",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "sends its message again\n        self.inbound.disconnected()\n",
                "sends its message again\n",
            ),
        ),
        "tests/mqtt/test_credentials.py::test_a_message_that_is_settled_during_the_reconnect_is_not_delivered_twice",
    ),
    Planted(
        "messages with QoS 0 are lost at the end of a planned reconnect",
        "Receive messages with QoS 0 up to the end of a planned reconnect",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "            await connection.close(expiry, takes_late=True)",
                "            await connection.close(expiry)",
            ),
        ),
        "tests/mqtt/test_credentials.py::test_messages_with_qos_0_are_received_up_to_the_end_of_the_connection",
    ),
    Planted(
        "one copy of a message in a restored session reaches only one of its filters",
        "Deliver a message of a restored MQTT 5 session for all its filters",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/router.py",
                """\
                    if len(routes) > 1 and publish.qos:
                        return self.copies.once(publish, known[0], routes, last)
""",
                "",
            ),
        ),
        "tests/mqtt/test_joint.py::test_a_resumed_session_may_get_one_copy_for_overlapping_filters_or_one_for_each",
    ),
    Planted(
        "a silent broker is never taken for lost",
        "Fault tests: a half-open MQTT connection is noticed within twice the keepalive, without slack",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/connection.py",
                "self._finished is None and self._keepalive.is_lost():",
                "self._finished is None and self._keepalive.is_lost() is None:",
            ),
        ),
        "tests/mqtt/test_keepalive.py::test_a_silent_broker_is_lost_within_twice_the_keepalive",
    ),
    Planted(
        "no stream with retainAsPublished follows one whose subscription is kept",
        "Let a stream follow one whose subscription with its options is kept",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/router.py",
                "        elif as_published and route.streams and not route.is_shared:\n",
                "        elif as_published and not route.is_shared:\n",
            ),
        ),
        "tests/mqtt/test_subscribe_options.py::test_a_stream_may_follow_one_whose_subscription_is_kept",
    ),
    Planted(
        "no stream with other options follows one whose subscription is kept",
        "Make a kept MQTT subscription again for other options",
        "mqtt",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/router.py",
                "        elif route.options != (no_local, as_published) and route.streams:\n",
                "        elif route.options != (no_local, as_published):\n",
            ),
        ),
        "tests/mqtt/test_subscribe_options.py::test_the_next_stream_of_a_kept_subscription_may_have_other_options",
    ),
)
