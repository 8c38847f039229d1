"""Faults of journals, of the receivers of Spark queries, and of inboxes."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

JOURNAL = (
    # --- identity
    Planted(
        "the positions of another journal pass records for acknowledged",
        "Refuse the cursors of another journal, and move them aside in a repair",
        "journal",
        (
            Edit(
                "messaging/journal/database.py",
                "            if key and self._key and key != self._key:",
                "            if False:",
            ),
        ),
        "tests/journal/test_identity.py::test_a_database_of_another_journal_is_refused_and_moved_aside",
    ),
    Planted(
        "a changed character of the identity makes all records look damaged",
        "Refuse a journal whose identity does not fit its segments",
        "journal",
        (
            Edit(
                "messaging/journal/identity.py",
                "    return CHECK not in values or bool(values[CHECK] == _check_of(values))",
                "    return True",
            ),
            Edit("messaging/journal/identity.py", "    check_key(folder, found.key, folder.partitions())\n", ""),
        ),
        "tests/journal/test_identity.py"
        "::test_each_changed_character_of_an_identity_is_refused_or_harmless_and_restored",
    ),
    Planted(
        "segments of another journal are cut off as damaged",
        "Refuse a journal whose identity does not fit its segments",
        "journal",
        (Edit("messaging/journal/identity.py", "    check_key(folder, found.key, folder.partitions())\n", ""),),
        "tests/journal/test_identity.py::test_segments_of_another_journal_are_refused",
    ),
    # --- damage
    Planted(
        "the records of the last frame of a damaged end are not reported",
        "Count no more lost records than the headers of a damaged end tell",
        "journal",
        (Edit("messaging/journal/segments.py", "        rows += found.rows\n", ""),),
        "tests/journal/test_damage.py::test_a_flip_of_any_byte_loses_only_what_is_reported",
    ),
    # --- cursors
    Planted(
        "acknowledgements out of order are lost when the journal is closed",
        "Store acknowledgements out of order, and refuse meaningless arguments",
        "journal",
        (
            Edit(
                "messaging/journal/cursors.py",
                "passed = {name: self._passed[name].dump(self._positions[name]) for name in names}",
                'passed = dict.fromkeys(names, b"")',
            ),
        ),
        "tests/journal/test_cursors.py::test_acknowledgements_out_of_order_survive",
    ),
    Planted(
        "new records get offsets that were acknowledged out of order and lost",
        "Store acknowledgements out of order, and refuse meaningless arguments",
        "journal",
        (
            Edit(
                "messaging/journal/cursors.py",
                "    return max([*state.cursors().values(), *ends], default=0)",
                "    return max(state.cursors().values(), default=0)",
            ),
        ),
        "tests/journal/test_cursors.py::test_offsets_that_were_acknowledged_and_lost_are_not_used_again",
    ),
    Planted(
        "a cursor that is created again has the acknowledgements of the removed one",
        "Let all holders of a journal's cursor share what was acknowledged",
        "journal",
        (
            Edit(
                "messaging/journal/cursors.py",
                "            del self._positions[name], self._passed[name]\n",
                "            del self._positions[name]\n",
            ),
            Edit(
                "messaging/journal/cursors.py",
                "                self._passed[name] = _Ranges()\n",
                "                self._passed.setdefault(name, _Ranges())\n",
            ),
        ),
        "tests/journal/test_cursors.py::test_a_cursor_that_is_created_again_has_acknowledged_nothing",
    ),
    Planted(
        "an older position replaces a newer one on the disk",
        "Close races and gaps in the journal that a review found",
        "journal",
        (
            Edit(
                "messaging/journal/cursors.py",
                "        with self._storing:\n            self._save()\n",
                "        self._save()\n",
            ),
        ),
        "tests/journal/test_cursors.py::test_an_older_position_never_replaces_a_newer_one",
    ),
    # --- writing and reading
    Planted(
        "a record that is put while its journal closes waits for good",
        "Close races and gaps in the journal that a review found",
        "journal",
        (
            Edit(
                "messaging/journal/commit.py",
                "            if self._is_closed:\n                return False\n            self._put +=",
                "            self._put +=",
            ),
        ),
        "tests/journal/test_append.py::test_an_append_that_finds_the_journal_open_a_moment_before_close_is_refused",
    ),
    Planted(
        "a reader passes over a frame that is appended while it reads",
        "Close races and gaps in the journal that a review found",
        "journal",
        (
            Edit(
                "messaging/journal/reader.py",
                "            self._position = self._position + position if is_last else segment.size\n",
                "            self._position = segment.size\n",
            ),
        ),
        "tests/journal/test_append.py::test_a_frame_that_is_appended_while_a_chunk_is_read_is_not_passed_over",
    ),
    Planted(
        "the last records of a quiet journal expire after twice their age",
        "Drop records within a tenth of the age at which they expire",
        "journal",
        (
            Edit(
                "messaging/journal/retention.py",
                "            began, least = time_of(log, last), self._max_age / _AGE_STEPS\n",
                "            began, least = time_of(log, last), self._max_age\n",
            ),
        ),
        "tests/journal/test_bounds.py::test_a_record_is_dropped_within_a_tenth_of_its_age",
    ),
    Planted(
        "a clock that is set changes the age of records that are stored already",
        "Count ages of records right after the clock was set forward",
        "journal",
        (
            Edit(
                "messaging/journal/ages.py",
                "        return min(most, max(0.0, now - until, clock.wall() - timestamp))",
                "        return max(0.0, clock.wall() - timestamp)",
            ),
        ),
        "tests/journal/test_ages.py::test_a_clock_that_is_set_changes_no_age_of_a_record_of_this_run",
    ),
    Planted(
        "a batch that does not fit on the disk is refused as a whole",
        "Close races and gaps in the journal that a review found",
        "journal",
        (
            Edit(
                "messaging/journal/commit.py",
                "            fitting //= 2  # the disk may have room for fewer",
                "            return self._handle_full(batch, error, self._retention.full_disk, is_disk=True)",
            ),
        ),
        "tests/journal/test_bounds.py::test_a_batch_that_does_not_fit_is_stored_as_far_as_it_does",
    ),
)

SPARK = (
    Planted(
        "a restored journal grows past the checkpoint before it is compared with it",
        "Check the journal of a Spark query before its receivers start",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/read/journaled.py",
                "            lost = self._lost(positions, seen, opened)\n",
                "",
            ),
            Edit(
                "adapters/pyspark_messaging/read/journaled.py",
                "            if lost or (positions and opened.meta.query is None):\n",
                "            if positions and opened.meta.query is None:\n",
            ),
            Edit(
                "adapters/pyspark_messaging/read/journaled.py",
                "                receiver.start()\n        self._journal",
                "                receiver.start()\n"
                "            if self._lost(positions, seen, opened):\n"
                "                opened.continue_query(seen)\n"
                "        self._journal",
            ),
        ),
        "tests/spark/test_restored.py"
        "::test_whatever_spark_asks_first_a_journal_before_its_checkpoint_starts_no_receiver",
    ),
    Planted(
        "new rows of a restored journal get offsets that a checkpoint has seen",
        "Check the journal of a Spark query before its receivers start",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/journal/journal.py",
                "            log.skip_to(ends.get(log.partition, 0))",
                "                pass",
            ),
        ),
        "tests/spark/test_restored.py::test_new_rows_of_a_restored_journal_get_offsets_that_no_checkpoint_has_seen",
    ),
    Planted(
        "rows that were stored and not planned are not missed after a restart",
        "Check the journal of a Spark query before its receivers start",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/journal/journal.py",
                "            if self._is_open and ends != noted:",
                "            if False:",
            ),
        ),
        "tests/spark/test_restored.py"
        "::test_rows_that_were_stored_and_not_planned_are_missed_when_the_journal_was_closed_in_good_order",
    ),
    Planted(
        "a refused journal forgets which rows it has lost",
        "Keep the noted ends of a Spark journal that is refused",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/journal/journal.py",
                "{key: max(log.end, noted.get(key, 0)) for log",
                "{key: log.end for log",
            ),
        ),
        "tests/spark/test_restored.py"
        "::test_rows_that_were_stored_and_not_planned_are_missed_when_the_journal_was_closed_in_good_order",
    ),
    Planted(
        "a journal of rows takes more bytes than its bound",
        "Store as many messages of a Spark query as the disk has room for",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/read/receiver.py",
                "    return max(1, min(SEGMENT_BYTES, options.journal_bytes // options.receivers // 4))",
                "    return SEGMENT_BYTES",
            ),
            Edit(
                "adapters/pyspark_messaging/read/receiver.py",
                "        if backlog and backlog + size > self._journal_bytes:",
                "        if False:",
            ),
        ),
        "tests/spark/test_receiver.py::test_a_journal_takes_its_bytes_and_one_segment",
    ),
    Planted(
        "a disk with less room than one write takes no message at all",
        "Store as many messages of a Spark query as the disk has room for",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/read/receiver.py",
                "                count = len(part) // 2  # there may be room for fewer",
                "                self._changed.wait_for(lambda: self._stopping, pause)\n"
                "                if self._stopping:\n"
                "                    return",
            ),
        ),
        "tests/spark/test_receiver.py::test_a_write_takes_the_room_that_a_disk_has_left",
    ),
    Planted(
        "rows are acknowledged before they are stored",
        "Spark: the data source reads channels through a journal",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/read/receiver.py",
                "        done, stored, count = 0, 0, len(batch)\n",
                "        done, stored, count = 0, 0, len(batch)\n"
                "        for message in batch:\n"
                "            message.acknowledge()\n",
            ),
        ),
        "tests/spark/test_receiver.py::test_nothing_is_acknowledged_before_it_is_stored",
    ),
    Planted(
        "a message whose acknowledgement was lost is stored twice",
        "Spark: the data source reads channels through a journal",
        "spark",
        (
            Edit(
                "adapters/pyspark_messaging/read/receiver.py",
                "                self.dropped += 1\n                continue\n",
                "                self.dropped += 1\n",
            ),
        ),
        "tests/spark/test_receiver.py::test_an_acknowledgement_that_is_lost_stores_nothing_twice",
    ),
)

INBOX = (
    Planted(
        "a duplicate is acknowledged before the id that it was recognised by is stored",
        "Acknowledge duplicates after the ids they were recognised by",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "                tokens.append(incoming.token)\n        self._acknowledge(tokens)\n",
                "                tokens.append(incoming.token)\n        self._send(tokens, [])\n",
            ),
        ),
        "tests/receiving/test_inbox.py::test_a_duplicate_is_settled_after_its_id",
    ),
    Planted(
        "messages are acknowledged before their ids are stored",
        "Recognise deliveries of settled messages (deduplicate, inbox_path)",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "            self._is_storing = True\n"
                "            self._submit(partial(self.settled.store, unstored),"
                " partial(self._stored, tokens, accepted))",
                "            self._is_storing = True\n"
                "            self._send(tokens, accepted)\n"
                "            self._submit(partial(self.settled.store, unstored), partial(self._stored, [], []))",
            ),
        ),
        "tests/receiving/test_inbox.py::test_a_duplicate_is_settled_after_its_id",
    ),
    Planted(
        "ids that a full disk refused are never stored",
        "Recognise deliveries of settled messages (deduplicate, inbox_path)",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "            self._retry_at = clock.monotonic() + _RETRY_SECONDS\n            return\n",
                "            self._retry_at = clock.monotonic() + _RETRY_SECONDS\n"
                "            self._missing.clear()\n"
                "            return\n",
            ),
        ),
        "tests/receiving/test_inbox.py::test_ids_that_a_full_disk_refused_are_stored_later",
    ),
    Planted(
        "a clock that is set right forgets ids early",
        "Forget no id early when the clock is set right while a program runs",
        "inbox",
        (
            Edit(
                "messaging/journal/state.py",
                "        self._seen_base = wall + ahead - clock.boot()\n",
                "        self._seen_base = ahead\n",
            ),
            Edit(
                "messaging/journal/state.py",
                "        return clock.boot() + self._seen_base\n",
                "        return clock.wall() + self._seen_base\n",
            ),
        ),
        "tests/journal/test_ages.py::test_a_clock_that_is_set_right_forgets_no_id_early",
    ),
    Planted(
        "a clock that was back for one run makes a later run handle a message again",
        "Keep the time of inbox ids from going back with the wall clock",
        "inbox",
        (
            Edit(
                "messaging/journal/state.py",
                "        ahead = max(behind, before / 1e6) if behind else 0.0\n",
                "        ahead = 0.0\n"
                "        if behind:\n"
                "            with self.change() as connection:\n"
                '                connection.execute("UPDATE seen SET at=? WHERE at>?", (wall, wall))\n',
            ),
        ),
        "tests/receiving/test_inbox.py"
        "::test_a_clock_that_was_back_for_one_run_makes_no_later_run_handle_a_message_again",
    ),
    Planted(
        "ids that were stored together are forgotten in the order of their texts",
        "Forget inbox ids that were stored together in their order",
        "inbox",
        (
            Edit(
                "messaging/journal/state.py",
                "                now = math.nextafter(now, math.inf)  # ids of one time would be sorted, and forgotten,"
                " by their texts\n",
                "",
            ),
        ),
        "tests/journal/test_state.py::test_ids_that_are_stored_together_keep_their_order",
    ),
    Planted(
        "ids that were stored after the clock was set right are unknown to the next run",
        "Forget no id early when the clock is set right while a program runs",
        "inbox",
        (
            Edit(
                "messaging/journal/state.py",
                "            now = max(self.seen_time(), clock.wall(), math.nextafter(latest or 0.0, math.inf))\n",
                "            now = self.seen_time()\n",
            ),
        ),
        "tests/journal/test_ages.py::test_ids_that_are_stored_after_the_clock_was_set_right_are_known_to_the_next_run",
    ),
    Planted(
        "a delivery that waited for the verdict on another one is never handed out",
        "Recognise deliveries of settled messages (deduplicate, inbox_path)",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "            self._engine.call(self._release_parked, parked)\n",
                "            pass\n",
            ),
        ),
        "messaging/testing/conformance/test_deduplicate.py::test_a_second_delivery_waits_for_the_first_verdict"
        " --backend memory",
    ),
    Planted(
        "a message that an interrupt kept back is a duplicate of itself",
        "Acknowledge duplicates after the ids they were recognised by",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "        if key is None or incoming is self._entered:\n",
                "        if key is None:\n",
            ),
        ),
        "tests/receiving/test_inbox.py::test_a_message_that_an_interrupt_kept_back_is_no_duplicate_of_itself",
    ),
    Planted(
        "a refused subscription that is not closed keeps its inbox locked",
        "Give the inbox of a refused subscription back",
        "inbox",
        (
            Edit(
                "messaging/receiving/subscription.py",
                """\
        if self.handle is None:  # there is nothing to unsubscribe, and a refused stream need not be closed
            self._mark_released()
""",
                "        if self.handle is None:\n            self.settlement.is_released = True\n",
            ),
        ),
        "tests/receiving/test_inbox.py::test_a_refused_subscription_that_is_not_closed_gives_its_inbox_back",
    ),
    Planted(
        "a refused subscription keeps its inbox locked",
        "Acknowledge duplicates after the ids they were recognised by",
        "inbox",
        (
            Edit(
                "messaging/receiving/deduplication.py",
                "            ids.users -= 1\n",
                "            ids.users -= 0\n",
            ),
        ),
        "tests/receiving/test_inbox.py::test_a_refused_subscription_gives_its_inbox_back",
    ),
)
