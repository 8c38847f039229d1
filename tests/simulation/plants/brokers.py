"""Faults of the adapters: MQTT, AMQP and memory."""

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
                "adapters/mqtt/subscriptions.py",
                """\
        if self._router.orphans:
            self._timer = clock.call_later(asyncio.get_running_loop(), ORPHAN_TIMEOUT, self.end_orphans)
""",
                "        self.end_orphans()\n",
            ),
            Edit(
                "adapters/mqtt/subscriptions.py",
                "            self._withdraw(stream, is_at_broker=not self._persistent)",
                "            self._withdraw(stream, is_at_broker=True)",
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
                "adapters/mqtt/adapter.py",
                "        self._subscriptions.end_orphans()\n",
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
                "adapters/mqtt/outbound.py",
                "self._unresumed.extendleft(reversed(self._handshakes.values()))",
                "self._unresumed.extendleft(self._handshakes.values())",
            ),
        ),
        "tests/mqtt/test_session.py"
        "::test_a_resumed_session_finishes_every_handshake_in_order_within_the_window",
    ),
    Planted(
        "a released message is never sent again to a broker that has lost the session",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/outbound.py",
                """\
        if not connack.session_present:
            for handshake in self._unresumed:
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
                "adapters/mqtt/inbound.py",
                "        return token.receipt.session != self.answers.session or token.stream.ended",
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
                "adapters/mqtt/answers.py",
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
                "adapters/mqtt/adapter.py",
                "        await_claims = connack.session_present and (is_old or not self._opened_before)\n",
                "        await_claims = False\n",
            ),
        ),
        "tests/mqtt/test_session.py"
        "::test_messages_of_a_resumed_session_wait_for_the_streams_that_subscribe",
    ),
    Planted(
        "a message that crosses its unsubscription is lost to the next stream of the session",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/subscriptions.py",
                "with leftovers.departing(stream) if self._persistent else contextlib.nullcontext():",
                "with contextlib.nullcontext():",
            ),
            Edit(
                "adapters/mqtt/subscriptions.py",
                "            leftovers = self._inbound.leftovers\n            with",
                "            with",
            ),
        ),
        "tests/mqtt/test_ended_streams.py"
        "::test_a_message_that_crosses_the_unsubscription_is_left_to_the_next_stream_of_the_session",
    ),
    # --- answers
    Planted(
        "messages of a resumed 3.1.1 session are answered out of order",
        "MQTT: a resumed session is answered in the broker's order",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/answers.py",
                "        self._resent = None if v5 else _ResentOrder(self._open, self._answer_in_turn)",
                "        self._resent: _ResentOrder | None = None",
            ),
        ),
        "tests/mqtt/test_delivery_order.py",
    ),
    Planted(
        "a message without a stream holds up the answers to the others of a session",
        "Let no resent message without a stream hold up the answers to others",
        "mqtt",
        (Edit("adapters/mqtt/leftovers.py", "            self._answers.pass_over(receipt)\n", ""),),
        "tests/mqtt/test_delivery_order.py::test_a_resent_message_without_a_stream_holds_up_no_answer",
    ),
    Planted(
        "a record that was lost is taken for one that was given",
        "MQTT: a record that was lost is not taken for one that was given",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/answers.py",
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
                "adapters/mqtt/adapter.py",
                "    # an answer after DISCONNECT would be lost: it is sent when the broker sends its message again\n"
                "    adapter._inbound.disconnected()\n",
                "",
            ),
        ),
        "tests/mqtt/test_credentials.py",
    ),
    Planted(
        "messages with QoS 0 are lost at the end of a planned reconnect",
        "Receive messages with QoS 0 up to the end of a planned reconnect",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/adapter.py",
                "        await link.close(expiry, takes_late=True)",
                "        await link.close(expiry)",
            ),
        ),
        "tests/mqtt/test_credentials.py",
    ),
    Planted(
        "one copy of a message in a restored session reaches only one of its filters",
        "Deliver a message of a restored MQTT 5 session for all its filters",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/router.py",
                """\
                    if len(routes) > 1 and self._is_resumed:
                        return self._once(publish, known[0], routes)
""",
                "",
            ),
        ),
        "tests/mqtt/test_joint.py"
        "::test_a_resumed_session_may_get_one_copy_for_overlapping_filters_or_one_for_each",
    ),
    Planted(
        "a silent broker is never taken for lost",
        "Fault tests: a half-open MQTT connection is noticed within twice the keepalive, without slack",
        "mqtt",
        (
            Edit(
                "adapters/mqtt/link.py",
                "self._finished is None and self._keepalive.is_lost(wire, self.writer):",
                "self._finished is None and self._keepalive.is_lost(wire, self.writer) is None:",
            ),
        ),
        "tests/mqtt/test_keepalive.py::test_a_silent_broker_is_lost_within_twice_the_keepalive",
    ),
)

AMQP = (
    # --- messages that the broker refuses for now
    Planted(
        "later messages overtake one that the broker has refused for now",
        "Send messages again that an AMQP broker refuses for now",
        "amqp",
        (
            Edit(
                "adapters/amqp/publisher.py",
                "                if held and form.confirms and form.goal in held:",
                "                if False:",
            ),
        ),
        "tests/amqp/test_retries.py::test_later_messages_to_the_same_destination_wait_and_others_pass",
    ),
    Planted(
        "messages that were refused for now get no outcome when the connection is lost",
        "Send messages again that an AMQP broker refuses for now",
        "amqp",
        (
            Edit(
                "adapters/amqp/publisher.py",
                "        self._unconfirmed.extend(self._retries.end())\n",
                "        self._retries.end()\n",
            ),
        ),
        "tests/amqp/test_retries.py::test_a_loss_fails_waiting_messages",
    ),
    Planted(
        "refused messages are sent again in the order of their refusals",
        "Send messages again that an AMQP broker refuses for now",
        "amqp",
        (
            Edit(
                "adapters/amqp/retries.py",
                "            bisect.insort(held.refused, (number, message), key=_number)",
                "            held.refused.insert(0, (number, message))",
            ),
        ),
        "tests/amqp/test_retries.py::test_messages_that_are_refused_are_sent_again_in_their_order_one_first",
    ),
    Planted(
        "messages that were unconfirmed when the broker closed their channel are never sent again",
        "AMQP adapter on aiormq",
        "amqp",
        (
            Edit(
                "adapters/amqp/publisher.py",
                "        self._unconfirmed.extendleft(reversed(channel.pending.values()))\n",
                "",
            ),
        ),
        "tests/amqp/test_publisher.py::test_an_exchange_that_vanishes_fails_its_messages_and_the_rest_goes_on",
    ),
    Planted(
        "direct replies are lost when publishing moves to another channel",
        "Keep direct replies when publishing moves to another channel",
        "amqp",
        (
            Edit(
                "adapters/amqp/publish_channels.py",
                "while self._retired and (self._retired[0].replies is None or len(self._retired) > _MAX_RETIRED):",
                "while self._retired:",
            ),
        ),
        "tests/amqp/test_replies.py"
        "::test_replies_to_earlier_requests_arrive_after_publishing_has_moved_to_another_channel",
    ),
    # --- consumers
    Planted(
        "an acknowledgement of several messages includes one that was rejected",
        "Declare and bind through aio-pika on AMQP",
        "amqp",
        (
            Edit(
                "adapters/amqp/consumer.py",
                "        parts = [frames.requeue(self._number, tag) for tag in requeues]\n",
                "        parts: list[bytes] = []\n",
            ),
            Edit(
                "adapters/amqp/consumer.py",
                "        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]\n",
                "        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]\n"
                "        parts += [frames.requeue(self._number, tag) for tag in requeues]\n",
            ),
        ),
        "tests/amqp/test_consumer.py"
        "::test_the_broker_learns_the_first_verdict_on_each_delivery_and_nothing_else",
    ),
    Planted(
        "a subscription ends when its consumer is cancelled though its queue exists",
        "Fail over between the nodes of a RabbitMQ cluster",
        "amqp",
        (
            Edit(
                "adapters/amqp/consumer.py",
                "            if is_known and await absent_queues.exists(self._wire, queue):",
                "            if False and is_known and await absent_queues.exists(self._wire, queue):",
            ),
        ),
        "tests/amqp/test_hosts.py"
        "::test_a_consumer_that_is_cancelled_though_its_queue_exists_is_subscribed_again",
    ),
    Planted(
        "a subscription ends when the node of its queue is down",
        "Fail over between the nodes of a RabbitMQ cluster",
        "amqp",
        (
            Edit(
                "adapters/amqp/absent_queues.py",
                "            if not is_absent(error) or not is_wanted():\n                raise\n",
                "            raise\n",
            ),
        ),
        "tests/amqp/test_hosts.py::test_a_subscription_waits_for_a_queue_whose_node_is_down",
    ),
    Planted(
        "rejected messages that are being moved are delivered twice when their consumer closes",
        "AMQP: streams that read on after a loss; delayed redelivery through queues whose messages expire",
        "amqp",
        (
            Edit(
                "adapters/amqp/consumer.py",
                "            await self._delays.wait(CLOSE_GRACE)\n            self._flush()\n",
                "            pass\n",
            ),
        ),
        "tests/amqp/test_delayed_redelivery.py::test_closing_waits_until_rejected_messages_are_moved",
    ),
    Planted(
        "a message is lost with the queue of its delay that has expired",
        "AMQP: streams that read on after a loss; delayed redelivery through queues whose messages expire",
        "amqp",
        (
            Edit(
                "adapters/amqp/delays.py",
                "            if self._age(name) >= LEASE - LEASE_MARGIN:\n",
                "            if False:\n",
            ),
        ),
        "tests/amqp/test_delayed_redelivery.py::test_a_confirm_after_the_lease_of_the_queue_does_not_count",
    ),
    Planted(
        "a message that is lost with its subscription is rejected and comes to it again",
        "Leave a lost message unsettled when its subscription ends",
        "amqp",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                """\
            # it stays unsettled: rejected, it would come to this subscription again, and be counted twice
            self._counters.dropped += 1
""",
                """\
            if self._adapter.capabilities.can_reject and not self._adapter.is_stale(incoming.token):
                self._adapter.reject([incoming.token])
            self._counters.dropped += 1
""",
            ),
        ),
        "tests/amqp/test_peer.py"
        "::test_a_message_that_no_other_consumer_receives_is_not_requeued_and_counts_once",
    ),
    # --- connections
    Planted(
        "a silent connection is never taken for lost",
        "AMQP adapter on aiormq",
        "amqp",
        (
            Edit(
                "adapters/amqp/connection.py",
                "        if silence >= limit:\n",
                "        if False:\n",
            ),
        ),
        "tests/amqp/test_peer.py::test_silence_is_a_loss_after_two_heartbeats",
    ),
    Planted(
        "a request to a blocked broker costs the connection",
        "AMQP: a blocked broker may take its time over requests; outages, plugins' exchanges and delays",
        "amqp",
        (
            Edit(
                "adapters/amqp/connection.py",
                "                    continue  # a blocked broker answers no requests, either\n",
                "                    pass\n",
            ),
        ),
        "tests/amqp/test_peer.py::test_a_request_to_a_broker_that_takes_no_messages_waits_until_it_does",
    ),
    Planted(
        "messages settle on the one connection after the loss of the other",
        "AMQP adapter on aiormq",
        "amqp",
        (
            Edit(
                "adapters/amqp/link.py",
                "            # tokens of either connection are stale from here on\n            wire.alive = False\n",
                "            pass\n",
            ),
        ),
        "tests/amqp/test_connection.py::test_the_end_of_either_connection_is_the_end_of_both",
    ),
    Planted(
        "a second connection that comes too late stays open",
        "Persistent sessions survive closing; arguments of any type get typed errors",
        "amqp",
        (
            Edit(
                "adapters/amqp/link.py",
                "            await wire.close()\n            self._check()\n        self.wires.append(wire)",
                "            self._check()\n        self.wires.append(wire)",
            ),
        ),
        "tests/amqp/test_connection.py::test_a_second_connection_that_comes_too_late_is_closed",
    ),
)

MEMORY = (
    Planted(
        "a rejected message with a priority that none before it had is lost",
        "memory://: a rejected message with a priority none before it had waited with was lost",
        "memory",
        (
            Edit(
                "adapters/memory/queues.py",
                """\
        self._line(entry).appendleft((payload, plan, correlation_id, retained, deliveries + 1, expires))
""",
                """\
        line = self._ready[plan.options.priority or 0]
        line.appendleft((payload, plan, correlation_id, retained, deliveries + 1, expires))
        self._length += 1
""",
            ),
        ),
        "messaging/testing/conformance/test_redelivery.py::test_a_redelivered_message_is_the_same_message"
        " --backend memory",
    ),
    Planted(
        "a message whose consumer acknowledges at once stops the queue",
        "Review: loop given back between batches, a worker in reserve, no recursion in the memory broker",
        "memory",
        (
            Edit(
                "adapters/memory/queues.py",
                "        if self._dispatching:\n            self._dispatch_again = True\n            return\n",
                "        if self._dispatching:\n            return\n",
            ),
        ),
        "tests/receiving/test_no_loss.py",
    ),
    Planted(
        "delayed messages take no room in a bounded queue",
        "Hold memory:// to the extensions of the real adapters",
        "memory",
        (
            Edit(
                "adapters/memory/queues.py",
                "        return self._length + len(self._delayed) >= self.max_length",
                "        return self._length >= self.max_length",
            ),
        ),
        "tests/memory/test_like.py::test_delayed_messages_take_room_in_a_bounded_queue",
    ),
    Planted(
        "the last will of a dropped client is not published",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "memory",
        (
            Edit(
                "adapters/memory/broker.py",
                "        will, self.will = self.will, None\n        broker = self.broker\n",
                "        will = self.will = None\n        broker = self.broker\n",
            ),
        ),
        "messaging/testing/conformance/test_last_will.py --backend memory",
    ),
)
