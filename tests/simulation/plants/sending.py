"""Faults of outboxes, in memory and on the disk, and of requests and their replies."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

REQUESTS = (
    Planted(
        "a request whose reply was lost with the connection waits for its deadline",
        "Requests, handlers, and the whiteboard between them (RFC 5.7)",
        "requests",
        (
            Edit(
                "messaging/replyto/requests.py",
                """\
        if not self._adapter.capabilities.keeps_session:
            self._fail_sent()
""",
                "        return\n",
            ),
            Edit(
                "messaging/replyto/requests.py",
                """\
        if not resumed:
            self._fail_sent()
""",
                "        return\n",
            ),
        ),
        "messaging/testing/conformance/test_requests.py::test_a_request_fails_with_its_connection --backend memory",
    ),
    Planted(
        "an inbox that the broker has ended takes all further requests",
        "Requests, handlers, and the whiteboard between them (RFC 5.7)",
        "requests",
        (
            Edit(
                "messaging/replyto/requests.py",
                "        if self.own is inbox:\n            self.own = None\n",
                "",
            ),
        ),
        "tests/replyto/test_requests.py::test_a_broken_inbox_is_replaced",
    ),
    Planted(
        "a stale route sends replies to a channel that just got a handler",
        "Keep stale reply routes out of the cache",
        "requests",
        (
            Edit(
                "messaging/replyto/replies.py",
                "        self._served = tuple(specs)\n"
                "        # not cleared: a thread that has looked at the earlier channels may enter its route only now\n"
                "        self._routes = BoundedCache()\n",
                "        self._served = tuple(specs)\n        self._routes.clear()\n",
            ),
        ),
        "tests/replyto/test_handlers.py::test_no_reply_goes_to_a_channel_that_just_got_a_handler",
    ),
    Planted(
        "a deferred reply that becomes ready while the responder closes is not sent",
        "Answer deferred requests when their instance closes",
        "requests",
        (
            Edit(
                "messaging/replyto/replies.py",
                "            if not self._waiting:\n                return None\n            self._settled",
                "            if self._is_over or True:\n                return None\n            self._settled",
            ),
        ),
        "tests/replyto/test_deferred.py::test_a_deferred_reply_that_becomes_ready_while_the_responder_closes_is_sent",
    ),
    Planted(
        "a deferred request is not answered if no time is left for closing",
        "Answer deferred requests when no time is left for closing",
        "requests",
        (
            Edit(
                "messaging/connection/connection.py",
                "            deadline = max(deadline, now + _ANSWER_SECONDS)\n",
                "",
            ),
        ),
        "tests/replyto/test_deferred.py::test_a_deferred_request_is_answered_if_no_time_is_left_for_closing",
    ),
    Planted(
        "the time to live of a request counts from its sending",
        "Count the time to live of requests from the call",
        "requests",
        (
            Edit(
                "messaging/replyto/requests.py",
                "    on_failed: Callable[[MessagingError], object]\n\n    def reject(",
                "    on_failed: Callable[[MessagingError], object]\n\n"
                "    def prepare(self) -> bool:\n        return True\n\n    def reject(",
            ),
        ),
        "tests/publishing/test_both_outboxes.py::test_the_time_to_live_of_a_request_counts_from_the_call",
    ),
    Planted(
        "requests that were not begun fail instead of going to another responder",
        "Handlers: a place is taken until a request is over, whatever was returned; stops that "
        "come early, loops that are just closed, subscriptions that were replaced",
        "requests",
        (
            Edit(
                "messaging/replyto/request_channel.py",
                "        if token is not None and self._replies.adapter.redelivers(self.subscription.spec):",
                "        if False and token is not None:",
            ),
        ),
        "tests/replyto/test_handlers.py::test_requests_that_were_not_begun_are_requeued",
    ),
    Planted(
        "a redelivered request that waits for its handler is handled twice",
        "Handlers: a place is taken until a request is over, whatever was returned; stops that "
        "come early, loops that are just closed, subscriptions that were replaced",
        "requests",
        (
            Edit(
                "messaging/receiving/handler.py",
                "        return self.subscription.buffer.is_void(message)",
                "        return False",
            ),
        ),
        "tests/replyto/test_handlers.py::test_a_redelivered_request_that_waits_is_handled_once",
    ),
    Planted(
        "one of many replies that is not confirmed is logged as a failure of its handler",
        "Log replies of a stream that are not taken as such",
        "requests",
        (
            Edit(
                "messaging/replyto/streaming.py",
                "                request.not_taken(error)\n",
                "                raise error\n",
            ),
        ),
        "tests/replyto/test_stream_outcomes.py"
        "::test_replies_that_are_unconfirmed_when_the_instance_closes_are_no_failure_of_their_handler",
    ),
    Planted(
        "requests that wait when a queue is made are left to the queue, which has none of them",
        "Requests, handlers, and the whiteboard between them (RFC 5.7)",
        "requests",
        (
            Edit(
                "messaging/replyto/request_channel.py",
                "        self._behind.add(rival)\n",
                "",
            ),
        ),
        "messaging/testing/conformance/test_overlapping_handlers.py"
        "::test_requests_that_wait_when_a_queue_is_made_are_not_left_to_it --backend memory",
    ),
    Planted(
        "a call that reaches no server waits for its whole timeout",
        "Fail a call at once that reaches no server",
        "requests",
        (
            Edit(
                "messaging/dispatch/calls.py",
                '        found["qos"] = 1\n',
                '        found["qos"] = 0\n',
            ),
        ),
        "tests/remoteevent/test_remote_parties.py"
        "::test_a_call_that_arrives_before_its_server_has_subscribed_fails_at_once",
    ),
)

OUTBOX = (
    # --- in memory
    Planted(
        "messages that a lost connection left behind are sent in the order of their failures",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "outbox",
        (
            Edit(
                "messaging/publishing/sending.py",
                "        returned.sort(key=lambda entry: entry.sequence)\n",
                "",
            ),
        ),
        "tests/publishing/test_outbox.py::test_messages_that_an_adapter_fails_late_are_sent_again_in_their_order",
    ),
    # --- on the disk
    Planted(
        "the time that a message spent on the disk does not count to its time to live",
        "Store messages on disk before they are sent (outbox_path)",
        "outbox",
        (
            Edit(
                "messaging/publishing/stored.py",
                "publication.expires -= max(0.0, self._ages.age_of(record.offset, record.timestamp))\n",
                "pass\n",
            ),
        ),
        "messaging/testing/conformance/test_durable_outbox.py"
        "::test_a_message_whose_time_to_live_ended_in_the_outbox_is_not_sent --backend memory",
    ),
    Planted(
        "the position passes messages that are not confirmed yet",
        "Store messages on disk before they are sent (outbox_path)",
        "outbox",
        (
            Edit(
                "messaging/journal/queue.py",
                "                source.settle_later(offset)\n",
                "                source.first = offset + 1\n",
            ),
        ),
        "tests/publishing/test_durable.py::test_a_stored_message_that_is_too_large_is_a_dead_letter",
    ),
    Planted(
        "promises of messages that the full outbox dropped never get an outcome",
        "Merge the durable outbox into the journal",
        "outbox",
        (
            Edit(
                "messaging/publishing/durable.py",
                """\
        for publication in self._spilled.pop_before(before):
            publication.settled = True
            publication.reject(_dropped(publication))
""",
                "",
            ),
        ),
        "tests/publishing/test_full_disk.py::test_the_oldest_messages_on_disk_make_room",
    ),
    Planted(
        "promises of messages that are left on the disk hang when the instance closes",
        "Store messages on disk before they are sent (outbox_path)",
        "outbox",
        (
            Edit(
                "messaging/publishing/durable.py",
                "        for each in (*self._queue.ready, *self._spilled.pop_before(self._queue.end)):",
                "        for each in self._queue.ready:",
            ),
        ),
        "tests/publishing/test_durable.py::test_dropped_messages_are_reported_as_dropped_on_close",
    ),
    Planted(
        "a dead letter that a full disk refused is forgotten",
        "Test the durable outbox on a full disk",
        "outbox",
        (
            Edit(
                "messaging/publishing/dead_letters.py",
                "        if failure is None:\n            self._waiting.popleft()",
                "        if failure is None or isinstance(failure, JournalFullError):\n"
                "            self._waiting.popleft()",
            ),
        ),
        "tests/publishing/test_durable.py::test_a_dead_letter_is_kept_when_a_full_disk_has_room_again",
    ),
    Planted(
        "a dead letter that is kept while its instance closes is sent by the next one",
        "Settle the dead letters that a closing outbox keeps",
        "outbox",
        (
            Edit(
                "messaging/publishing/dead_letters.py",
                "(failure is None or has_later_attempt)",
                "not self._is_finishing and (failure is None or has_later_attempt)",
            ),
        ),
        "tests/publishing/test_durable.py"
        "::test_dead_letters_that_are_kept_while_an_instance_closes_are_not_sent_by_the_next_one",
    ),
    Planted(
        "a stored message and a request share an id",
        "Store messages on disk before they are sent (outbox_path)",
        "outbox",
        (
            Edit(
                "messaging/publishing/stored.py",
                "        self._id = secrets.token_hex(8)\n",
                "        self._id = outbox.id\n",
            ),
        ),
        "tests/publishing/test_durable.py::test_stored_messages_and_requests_have_different_ids",
    ),
    Planted(
        "promises of stored messages miss their deadlines without a connection",
        "Store messages on disk before they are sent (outbox_path)",
        "outbox",
        (
            Edit(
                "messaging/publishing/durable.py",
                "        if not self.deadlines.is_watching and queue.end > queue.first:\n"
                "            self.deadlines.start()\n",
                "",
            ),
        ),
        "tests/publishing/test_durable.py::test_promises_fail_at_their_deadlines_without_a_link",
    ),
)
