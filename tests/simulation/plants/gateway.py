"""Faults of gateways: the buffer of a route, recognition of messages, publishing."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

GATEWAY = (
    # --- ids of messages without ids
    Planted(
        "a message without an id gets another one when its source delivers it again",
        "Recognise messages without ids that a gateway's source delivers again",
        "gateway",
        (
            Edit(
                "messaging/gateway/recognition.py",
                "            if found is not None and found[0] == digest:",
                "            if False and found is not None:",
            ),
        ),
        "tests/gateway/test_recognition.py"
        "::test_a_message_without_an_id_has_the_same_one_when_it_comes_again_after_a_restart",
    ),
    Planted(
        "equal messages without ids are merged",
        "Recognise messages without ids that a gateway's source delivers again",
        "gateway",
        (
            Edit(
                "messaging/gateway/recognition.py",
                """\
            found = self._identified.get(packet) if is_redelivered else None
            if found is not None and found[0] == digest:
""",
                """\
            found = next((each for each in self._identified.values() if is_redelivered and each[0] == digest), None)
            if found is not None:
""",
            ),
        ),
        "tests/gateway/test_recognition.py::test_equal_messages_are_never_merged",
    ),
    Planted(
        "ids of messages without ids are not found again after a kill",
        "Recognise messages without ids that a gateway's source delivers again",
        "gateway",
        (
            Edit(
                "messaging/gateway/recognition.py",
                "                    self._read_earlier()\n",
                "                    pass\n",
            ),
        ),
        "tests/gateway/test_recognition.py::test_messages_whose_acknowledgements_were_lost_are_not_stored_again",
    ),
    Planted(
        "packet identifiers of an earlier session stand for messages of a new one",
        "Recognise messages without ids that a gateway's source delivers again",
        "gateway",
        (Edit("messaging/gateway/recognition.py", "            known.clear()\n", "            pass\n"),),
        "tests/gateway/test_recognition.py::test_a_new_session_has_numbers_of_its_own",
    ),
    Planted(
        "a packet identifier that starts again with 1 begins a new session",
        "Recognise messages without ids that a gateway's source delivers again",
        "gateway",
        (Edit("messaging/gateway/recognition.py", "_WRAP: Final = 32_768", "_WRAP: Final = 70_000"),),
        "tests/gateway/test_recognition.py::test_numbers_go_on_from_the_beginning_after_the_last_one",
    ),
    Planted(
        "messages are stored twice whose records the journal has deleted",
        "Recognise messages whose records the journal has deleted",
        "gateway",
        (Edit("messaging/gateway/recognition.py", "        journal.retention.listen(self._write)\n", ""),),
        "tests/gateway/test_recognition.py::test_messages_are_recognised_after_the_journal_has_deleted_them",
    ),
    Planted(
        "a message is taken for stored though the disk lost its record",
        "Keep ids of deleted records only, and evict them in constant time",
        "gateway",
        (
            Edit(
                "messaging/gateway/recognition.py",
                "for key, offset in self._keys.items() if offset < before)",
                "for key in self._keys)",
            ),
        ),
        "tests/gateway/test_recognition.py::test_a_message_is_stored_again_if_the_disk_lost_its_record",
    ),
    Planted(
        "stored messages that a source delivers again after a crash are stored twice",
        "Recognise messages that a source delivers again after a crash",
        "gateway",
        (
            Edit(
                "messaging/gateway/intake.py",
                "            if not self._recognition.is_stored(key):\n                return False\n",
                "            if key:\n                return False\n",
            ),
        ),
        "tests/gateway/test_recognition.py::test_messages_whose_acknowledgements_were_lost_are_not_stored_again",
    ),
    Planted(
        "a message that comes again on its way to the disk is stored twice",
        "Recognise redelivered messages that are on their way to the disk",
        "gateway",
        (
            Edit(
                "messaging/gateway/recognition.py",
                "            if first is None:\n",
                "            if first is None or key:\n",
            ),
        ),
        "tests/gateway/test_redelivered.py::test_a_message_that_comes_again_on_its_way_to_the_disk_is_stored_once",
    ),
    Planted(
        "a message that comes again while its batch is open is in the batch twice",
        "Recognise redelivered messages whose first copies are held",
        "gateway",
        (Edit("messaging/gateway/pipeline/batches.py", "        if known is None:\n", "        if known or key:\n"),),
        "tests/gateway/pipeline/test_repeated.py::test_a_message_that_comes_again_while_its_batch_is_open_is_in_it_once",
    ),
    Planted(
        "a message that comes again is filtered, and acknowledged before its first copy is stored",
        "Recognise redelivered messages whose first copies are held",
        "gateway",
        (
            Edit(
                "messaging/gateway/pipeline/thinning.py",
                "        return is_last and draft.is_redelivered\n",
                "        return is_last and not draft.sources\n",
            ),
        ),
        "tests/gateway/pipeline/test_repeated.py::test_a_message_that_comes_again_passes_as_its_first_copy_did",
    ),
    # --- the buffer
    Planted(
        "a source is acknowledged before its message is on the disk",
        "Run store-and-forward routes between instances",
        "gateway",
        (
            Edit(
                "messaging/gateway/buffer.py",
                "        stored.on_outcome = self._note_outcome\n",
                "        stored.on_outcome = self._note_outcome\n"
                "        [source.settle(True) for source in stored.sources]\n",
            ),
        ),
        "tests/gateway/test_routes.py::test_a_source_is_acknowledged_only_when_the_message_is_on_the_disk",
    ),
    Planted(
        "a reload gives back the messages that it stores",
        "Acknowledge stored messages before a route ends its subscription",
        "gateway",
        (
            Edit(
                "messaging/gateway/route.py",
                "        self.intake.pause()\n        self.close()",
                "        self.intake.pause()\n        self.intake.unsubscribe()\n        self.close()",
            ),
        ),
        "tests/gateway/test_routes.py::test_a_reload_that_ends_a_route_gives_back_no_message_that_it_stores",
    ),
    Planted(
        "messages that the journal has dropped are published and counted twice",
        "Hold the source back at a full disk, and count dropped messages once",
        "gateway",
        (
            Edit(
                "messaging/gateway/buffer.py",
                "            elif stored.offset < journal.begin or (",
                "            elif stored.offset < 0 or (",
            ),
        ),
        "tests/gateway/test_ranges.py::test_dropped_messages_are_counted_once_and_not_published",
    ),
    Planted(
        "a full disk drops messages instead of holding the source back",
        "Hold the source back at a full disk, and count dropped messages once",
        "gateway",
        (Edit("messaging/gateway/buffer.py", '            full_disk="block",\n', ""),),
        "tests/gateway/test_ranges.py::test_a_full_disk_holds_the_source_back_with_each_policy",
    ),
    Planted(
        "a clock that is set forward lets stored messages of a route expire",
        "Count ages of records right after the clock was set forward",
        "gateway",
        (
            Edit(
                "messaging/gateway/buffer.py",
                "journal.ages.age_of(stored.offset, stored.timestamp) > self._max_age\n",
                "clock.wall() - stored.timestamp > self._max_age\n",
            ),
        ),
        "tests/gateway/test_times.py::test_a_clock_that_is_set_forward_drops_no_stored_message",
    ),
    Planted(
        "positions of later ranges are lost with a restart",
        "Let new messages overtake the backlog of an outage",
        "gateway",
        (
            Edit(
                "messaging/journal/queue.py",
                "ranges.append(_Range(cursor, max(start, cursor.position)))",
                "ranges.append(_Range(cursor, start))",
            ),
        ),
        "tests/gateway/test_ranges.py::test_positions_of_ranges_survive_a_restart",
    ),
    Planted(
        "messages that were put back go to the range that is published now",
        "Let new messages overtake the backlog of an outage",
        "gateway",
        (
            Edit(
                "messaging/journal/queue.py",
                "reversed([item for item in items if positions.range_of(item.offset) is each])",
                "reversed(items if each is positions.ranges[-1] else [])",
            ),
        ),
        "tests/gateway/test_ranges.py::test_messages_that_are_put_back_return_to_their_ranges",
    ),
    # --- subscribing
    Planted(
        "messages with the retained flag are lost when a gateway ends before it has made a changed subscription",
        "Give retained messages of a session to streams that know packet ids",
        "gateway",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/inbound.py",
                "passes_flags = stream.route.passes_flags or (stream.tells_id and self._v5)",
                "passes_flags = stream.route.passes_flags",
            ),
        ),
        "tests/mqtt/test_session.py"
        "::test_a_retained_flag_of_a_resumed_session_tells_a_replay_only_without_retain_as_published",
    ),
    # --- publishing
    Planted(
        "a route of messages that are limited in rate stops when a timer fires early",
        "Round the tokens of a rate, so that each wait moves the clock",
        "gateway",
        (Edit("messaging/gateway/drain.py", "_ROUNDING: Final = 0.001", "_ROUNDING: Final = 0.0"),),
        "tests/gateway/test_times.py::test_a_wait_for_a_token_is_long_enough_whatever_the_clock_shows",
    ),
)
