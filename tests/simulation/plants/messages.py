"""Faults of consumers: verdicts, redelivery, dead letters, handlers and the ends of streams."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

RECEIVING = (
    # --- dead letters that nothing receives
    Planted(
        "a dead letter that the broker can route nowhere is lost with its message",
        "Keep a message whose dead letter nothing receives",
        "receiving",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                """\
    if Features.EXTENSION_MANDATORY in capabilities.features:
        extensions[Features.EXTENSION_MANDATORY] = True
""",
                "",
            ),
        ),
        "messaging/testing/conformance/test_redelivery.py"
        "::test_a_message_whose_dead_letter_channel_nothing_receives_is_kept --backend memory",
    ),
    Planted(
        "messages that the broker redelivers are dead letters of a stream that ends before a loss is told",
        "Leave messages to the broker when a loss is not told yet",
        "receiving",
        (
            Edit(
                "messaging/receiving/buffer.py",
                "        self.is_redelivered = self._outlives_connection()\n",
                "        self.is_redelivered = False\n",
            ),
        ),
        "tests/receiving/test_redelivery.py"
        "::test_messages_of_a_loss_that_is_not_told_yet_are_no_dead_letters_of_a_stream_that_ends",
    ),
    Planted(
        "a message whose dead letter was returned is acknowledged",
        "Keep a message whose dead letter nothing receives",
        "receiving",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                """\
            error = promise.exception()
            if error is not None and getattr(promise, "is_stored", False):""",
                """\
            error = promise.exception()
            if isinstance(error, UnroutableError):
                return None
            if error is not None and getattr(promise, "is_stored", False):""",
            ),
        ),
        "tests/receiving/test_redelivery.py::test_an_unrouted_dead_letter_is_handed_back_with_growing_delays",
    ),
    Planted(
        "unrouted dead letters are not counted",
        "Keep a message whose dead letter nothing receives",
        "receiving",
        (Edit("messaging/receiving/redelivery.py", "        self._counters.unrouted += 1\n", ""),),
        "tests/receiving/test_redelivery.py::test_an_unrouted_dead_letter_is_handed_back_with_growing_delays",
    ),
    # --- iterators
    Planted(
        "an iterator gets a message that its closed stream has released",
        "Release a message that an iterator takes while its stream is closed",
        "receiving",
        (
            Edit(
                "messaging/receiving/consumers.py",
                "        self._is_stopped = True\n",
                "        self._is_stopped = False\n",
            ),
        ),
        "tests/receiving/test_stream.py"
        "::test_a_message_that_is_taken_while_its_stream_is_closed_is_handed_out_by_the_next_stream_alone",
    ),
    # --- poison messages
    Planted(
        "a malformed message ends a typed stream",
        "Let no malformed message end a typed stream",
        "receiving",
        (
            Edit(
                "messaging/receiving/service.py",
                'on_invalid = "reject" if spec.options.dead_letter_channel is None else "dead_letter"',
                'on_invalid = "raise"',
            ),
        ),
        "messaging/testing/conformance/test_content.py::test_invalid_content_ends_no_stream_by_default"
        " --backend memory",
    ),
    Planted(
        "a malformed message is rejected although there is a dead-letter channel",
        "Let no malformed message end a typed stream",
        "receiving",
        (
            Edit(
                "messaging/receiving/service.py",
                'on_invalid = "reject" if spec.options.dead_letter_channel is None else "dead_letter"',
                'on_invalid = "reject"',
            ),
        ),
        "messaging/testing/conformance/test_content.py"
        "::test_a_message_that_cannot_be_read_is_dead_lettered_before_it_ends_another_consumer --backend memory",
    ),
    Planted(
        "an invalid message is counted twice",
        "Count each message once on every way out of a subscription",
        "receiving",
        (
            Edit(
                "messaging/receiving/handout.py",
                """\
            if self._on_invalid == "raise":
                self._settlement.stop_accepting()
            else:""",
                """\
            if self._on_invalid == "raise":
                self._counters.invalid += 1
                self._settlement.stop_accepting()
            else:""",
            ),
        ),
        "tests/receiving/test_redelivery.py::test_an_invalid_message_is_counted_once_and_its_dead_letter_says_so",
    ),
    Planted(
        "the dead letter of an invalid message without acknowledgement says that it was rejected",
        "Count each message once on every way out of a subscription",
        "receiving",
        (
            Edit(
                "messaging/receiving/settlement.py",
                "self._connection.engine.call(self._redelivery.dead_letter, incoming, INVALID)",
                "self._connection.engine.call(self._redelivery.dead_letter, incoming, REJECTED)",
            ),
        ),
        "tests/receiving/test_redelivery.py::test_an_invalid_message_is_counted_once_and_its_dead_letter_says_so",
    ),
    Planted(
        "messages without acknowledgement that were buffered when their stream ended are lost uncounted",
        "Count each message once on every way out of a subscription",
        "receiving",
        (
            Edit(
                "messaging/receiving/buffer.py",
                """\
                        unsettled.append(incoming)
                    else:
                        self._counters.dropped += 1
        return unsettled""",
                """\
                        unsettled.append(incoming)
        return unsettled""",
            ),
        ),
        "tests/receiving/test_redelivery.py"
        "::test_messages_that_no_consumer_gets_are_counted_unless_the_broker_keeps_them",
    ),
    Planted(
        "a dead letter that waits for its next attempt is lost at the end of its stream",
        "Count each message once on every way out of a subscription",
        "receiving",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                """\
            timer.cancel()
            retry()  # the last attempt: the end of the subscription waits for it
""",
                "            timer.cancel()\n",
            ),
        ),
        "tests/receiving/test_redelivery.py"
        "::test_a_dead_letter_that_waits_for_its_next_attempt_is_tried_once_more_at_the_end_of_its_stream",
    ),
    # --- connections that are lost
    Planted(
        "a message that was rejected right before a loss counts as lost with its stream",
        "Keep a message rejected before a loss out of the lost ones",
        "receiving",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                """\
        if not is_requeued and self._adapter.redelivers(self._owner.spec):
            # rejected right before its connection was lost: the broker delivers it again, without this subscription
            is_requeued = self._adapter.is_stale(incoming.token)
""",
                "",
            ),
        ),
        "tests/receiving/test_redelivery.py"
        "::test_a_message_that_was_rejected_right_before_a_loss_is_not_lost_with_its_stream",
    ),
    Planted(
        "a message that is rejected after its connection was lost is in neither place",
        "Dead-letter messages rejected after their connection was lost",
        "receiving",
        (
            Edit(
                "messaging/receiving/settlement.py",
                "        return not self._buffer.is_redelivered",
                "        return False",
            ),
        ),
        "tests/receiving/test_handling.py"
        "::test_a_message_rejected_after_its_connection_was_lost_is_dead_lettered_unless_it_comes_again",
    ),
    Planted(
        "a lost connection keeps the credit of the messages in the hands of the consumer",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "receiving",
        (
            Edit(
                "messaging/receiving/subscription.py",
                "        self.credit.return_stale(self.buffer.is_stale)\n",
                "",
            ),
        ),
        "tests/receiving/test_delivery.py::test_a_lost_connection_returns_the_credit_it_took",
    ),
    Planted(
        "buffered messages that a resumed session delivers again are handled twice",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "receiving",
        (
            Edit(
                "messaging/receiving/buffer.py",
                "        incoming.token = None\n        return self.is_redelivered\n",
                "        incoming.token = None\n        return False\n",
            ),
        ),
        "tests/receiving/test_delivery.py::test_messages_redelivered_by_a_resumed_session_are_not_kept_twice",
    ),
    # --- the end of a stream or a handler
    Planted(
        "messages that arrive while their stream closes are released uncounted",
        "Count messages that arrive while their stream closes as unsettled",
        "receiving",
        (
            Edit(
                "messaging/receiving/subscription.py",
                """\
            if not settlement.is_released:  # unsubscribing: to be released with the buffered messages
                self._untaken += [incoming for incoming in batch if incoming.token is not None]
            return""",
                "            return",
            ),
        ),
        "tests/receiving/test_delivery.py::test_messages_that_arrive_while_closing_are_counted_as_dropped",
    ),
    Planted(
        "a stream that is retried keeps each subscription that was replaced",
        "Forget the subscriptions that a retry has replaced",
        "receiving",
        (
            Edit(
                "messaging/connection/endings.py",
                "        subscription.heir = None  # which may have one as well, and so on\n",
                "",
            ),
        ),
        "tests/receiving/test_stream.py::test_subscriptions_replaced_by_retry_are_released",
    ),
    Planted(
        "a message whose dead letter has no route is never redelivered",
        "Keep a message whose dead letter nothing receives",
        "receiving",
        (
            Edit(
                "messaging/receiving/redelivery.py",
                "        self._delay(delay, incoming, deliveries, self._owner.proceed)\n",
                "        del delay\n",
            ),
        ),
        "tests/receiving/test_redelivery.py::test_an_unrouted_dead_letter_is_handed_back_with_growing_delays",
    ),
    # --- handlers and manual acknowledgement
    Planted(
        "a verdict on a message of a lost connection is taken for given",
        "Reconnecting: retried subscriptions, credit given back, order kept",
        "receiving",
        (
            Edit(
                "messaging/receiving/settlement.py",
                "        if self.is_released or self._adapter.is_stale(incoming.token):\n            state =",
                "        if self.is_released:\n            state =",
            ),
        ),
        "messaging/testing/conformance/test_reconnect.py"
        "::test_a_verdict_on_a_message_of_a_lost_connection_is_refused --backend memory",
    ),
    Planted(
        "closing the instance in the coroutine that a handler returned waits for itself",
        "Know handlers that return a coroutine, and forget tasks left behind",
        "receiving",
        (
            Edit(
                "messaging/receiving/calling.py",
                "        return _await_inside(found) if type(found) is CoroutineType else found",
                "        return found",
            ),
        ),
        "messaging/testing/conformance/test_on.py::test_a_handler_may_close_the_instance --backend memory",
    ),
    Planted(
        "a registration outlives the event loop of its handler and loses messages",
        "Know handlers that return a coroutine, and forget tasks left behind",
        "receiving",
        (
            Edit(
                "messaging/receiving/handler.py",
                "            handling.release()\n        if not self.is_stopping:\n",
                "            del handling\n        if not self.is_stopping and several is None:\n",
            ),
        ),
        "messaging/testing/conformance/test_on.py"
        "::test_a_registration_ends_with_the_loop_of_its_handler --backend memory",
    ),
)
