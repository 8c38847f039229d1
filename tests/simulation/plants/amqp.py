"""Faults of the AMQP adapter."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

AMQP = (
    # --- messages that the broker refuses for now
    Planted(
        "later messages overtake one that the broker has refused for now",
        "Send messages again that an AMQP broker refuses for now",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/publisher.py",
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
                "adapters/messaging_adapters/amqp/publisher.py",
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
                "adapters/messaging_adapters/amqp/publisher.py",
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
                "adapters/messaging_adapters/amqp/publisher.py",
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
                "adapters/messaging_adapters/amqp/publish_channels.py",
                "while self._retired and (self._retired[0].replies is None or len(self._retired) > _MAX_RETIRED):",
                "while self._retired:",
            ),
        ),
        "tests/amqp/test_replies.py"
        "::test_replies_to_earlier_requests_arrive_after_publishing_has_moved_to_another_channel",
    ),
    # --- consumers
    Planted(
        "an acknowledgement includes unsettled messages before its own",
        "AMQP adapter on aiormq",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/consumer.py",
                "        contiguous = [tag for tag in acks if tag <= floor]\n",
                "        contiguous = acks\n",
            ),
            Edit(
                "adapters/messaging_adapters/amqp/consumer.py",
                "max(contiguous), multiple=len(contiguous) > 1))",
                "max(contiguous), multiple=True))",
            ),
            Edit(
                "adapters/messaging_adapters/amqp/consumer.py",
                "        parts += [frames.ack(self._number, tag, multiple=False) for tag in acks if tag > floor]\n",
                "",
            ),
        ),
        "tests/amqp/test_consumer.py::test_the_broker_learns_the_first_verdict_on_each_delivery_and_nothing_else",
    ),
    Planted(
        "a subscription ends when its consumer is cancelled though its queue exists",
        "Fail over between the nodes of a RabbitMQ cluster",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/consumer.py",
                "            if is_known and await topology.exists(self._wire, queue):",
                "            if False and is_known and await topology.exists(self._wire, queue):",
            ),
        ),
        "tests/amqp/test_hosts.py::test_a_consumer_that_is_cancelled_though_its_queue_exists_is_subscribed_again",
    ),
    Planted(
        "a subscription ends when the node of its queue is down",
        "Fail over between the nodes of a RabbitMQ cluster",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/topology.py",
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
                "adapters/messaging_adapters/amqp/consumer.py",
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
                "adapters/messaging_adapters/amqp/delays.py",
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
        "tests/amqp/test_peer.py::test_a_message_that_no_other_consumer_receives_is_not_requeued_and_counts_once",
    ),
    # --- connections
    Planted(
        "a silent connection is never taken for lost",
        "AMQP adapter on aiormq",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/connection.py",
                "        if silence >= limit:\n",
                "        if False:\n",
            ),
        ),
        "tests/amqp/test_peer.py::test_silence_is_a_loss_after_two_heartbeats",
    ),
    Planted(
        "a request to a blocked broker costs the connection",
        "AMQP: a blocked broker may take its time over requests; outages, plugins' exchanges and deleted queues tested",
        "amqp",
        (
            Edit(
                "adapters/messaging_adapters/amqp/connection.py",
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
                "adapters/messaging_adapters/amqp/link.py",
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
                "adapters/messaging_adapters/amqp/link.py",
                "            await wire.close()\n            self._check()\n        self.wires.append(wire)",
                "            self._check()\n        self.wires.append(wire)",
            ),
        ),
        "tests/amqp/test_connection.py::test_a_second_connection_that_comes_too_late_is_closed",
    ),
)
