"""Faults of remote events: generators, agents, mailboxes, multiplexers and listeners."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

REMOTE = (
    # --- a closing party says "later"
    Planted(
        "a mailbox that closes tells senders that a registration is gone",
        'Answer "closed", not "gone", while a party of remote events closes',
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/registration.py",
                """\
            if not isinstance(error, ClosedError):
                error = ListenerGoneError(f"{registration.title}: the registration {registration.id} has ended")
            return settled([error])""",
                """\
            return settled([ListenerGoneError(f"the registration {registration.id} has ended")])""",
            ),
            Edit(
                "messaging/remoteevent/mailbox/mailbox.py",
                """\
            self._refuse_closed()
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")
        found.refuse_ended()
""",
                """\
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")
        if found.lease.is_ended:
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")
""",
            ),
        ),
        "tests/remoteevent/test_mailbox_restart.py"
        "::test_senders_are_not_told_that_a_registration_is_gone_when_its_landlord_closes",
    ),
    Planted(
        "a closed mailbox tells owners that their registration has ended",
        'Answer "closed", not "gone", while a party of remote events closes',
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/registration.py",
                """\
            if self.lease.end is LeaseEnd.CLOSED:
                return ClosedError(f"{self.title}: closed")
            return UnknownLeaseError(f"{self.title}: the registration {self.id} has ended")
        return self._end""",
                """\
            return UnknownLeaseError(f"{self.title}: the registration {self.id} has ended")
        if isinstance(self._end, ClosedError):
            return UnknownLeaseError(f"{self.title}: the registration {self.id} has ended")
        return self._end""",
            ),
        ),
        "tests/remoteevent/test_closing.py::test_a_closed_mailbox_tells_no_owner_that_its_registration_has_ended",
    ),
    Planted(
        "a multiplexer that closes ends registrations at generators",
        'Answer "closed", not "gone", while a party of remote events closes',
        "remote events",
        (
            Edit(
                "messaging/remoteevent/third_parties.py",
                """\
        if self.landlord.is_closed:
            return ClosedError(f"multiplexer '{self.name}': closed")
""",
                "",
            ),
        ),
        "tests/remoteevent/test_closing.py::test_a_multiplexer_that_closes_ends_no_registration_at_a_generator",
    ),
    Planted(
        "a listener server that has just started says that listeners are gone",
        "Say later for a listener that a server has not been given yet",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/remote.py",
                "-math.inf if channel is None else clock.monotonic() + STARTING",
                "-math.inf",
            ),
        ),
        "tests/remoteevent/test_closing.py"
        "::test_a_listener_server_that_has_just_started_says_that_a_listener_is_not_there_yet",
    ),
    # --- batches stop with their reason
    Planted(
        "events of a batch are handed on after the lease has ended",
        "Look between two events whether the rest of a batch is still wanted",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/listener.py",
                """\
            if not is_wanted():
                if not count:
                    self.note(WithdrawnError("the events are no longer wanted"))
                return
            if not self._refused""",
                """\
            if not count and not is_wanted():
                self.note(WithdrawnError("the events are no longer wanted"))
                return
            if not self._refused""",
            ),
        ),
        "tests/remoteevent/test_withdrawn.py::test_nothing_follows_the_end_of_a_lease_within_a_batch",
    ),
    Planted(
        "a full box that closes leaves the sender of an event without an answer",
        "Answer the senders of events that a full box stores while it closes",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/box.py",
                'if self._full == "drop_oldest" and offset >= 0 and not self._is_closed:',
                'if self._full == "drop_oldest" and offset >= 0:',
            ),
            Edit(
                "messaging/remoteevent/mailbox/box.py",
                """\
        if self._is_closed:
            return
        while self._offsets:
""",
                """\
        while self._offsets:
""",
            ),
        ),
        "tests/remoteevent/test_box.py::test_an_event_that_a_full_box_stores_while_it_closes_is_answered",
    ),
    Planted(
        "a batch goes on to a target that another took the place of",
        "Look between two events whether the rest of a batch is still wanted",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/delivery.py",
                "return self._is_enabled and self._target is target and not self._has_ended",
                "return self._is_enabled and not self._has_ended",
            ),
        ),
        "tests/remoteevent/test_withdrawn.py"
        "::test_a_target_gets_nothing_more_of_its_batch_after_another_took_its_place",
    ),
    Planted(
        "a batch goes on to a remote listener that was removed",
        "Look between two events whether the rest of a batch is still wanted",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/remote.py",
                "target.deliver(WantedEvents(events, lambda: self._has(notification.name, target)))",
                "target.deliver(events)",
            ),
        ),
        "tests/remoteevent/test_withdrawn.py::test_nothing_follows_the_removal_of_a_listener_within_a_batch",
    ),
    Planted(
        "a killed sender passes a whole batch again",
        "Look between two events whether the rest of a batch is still wanted",
        "remote events",
        (Edit("messaging/remoteevent/listener.py", "_MOST: Final = 32", "_MOST: Final = 100_000"),),
        "tests/remoteevent/test_withdrawn.py::test_a_sender_that_is_killed_passes_at_most_32_events_again",
    ),
    Planted(
        "a cancelled notification counts as withdrawn and is tried at once forever",
        "Count a cancelled notification as failed, not as withdrawn",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/listener.py",
                'DeadlineError("the notification was cancelled")',
                'WithdrawnError("the notification was cancelled")',
            ),
        ),
        "tests/remoteevent/test_withdrawn.py::test_a_call_that_is_cancelled_counts_as_failed_rather_than_withdrawn",
    ),
    # --- deliveries, mailboxes, agents
    Planted(
        "a failure of the earlier target stops the delivery to the new one",
        "Deliver to a new target what the old one failed, and never stop trying",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/delivery.py",
                "elif is_replaced or isinstance(outcome, WithdrawnError):",
                "elif isinstance(outcome, WithdrawnError):",
            ),
        ),
        "tests/remoteevent/test_delivery.py::test_a_late_failure_of_a_replaced_target_concerns_the_new_one_in_no_way",
    ),
    Planted(
        "an event is delivered that another reader took while delivery was off",
        "Deliver no event that another reader took while delivery was off",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/delivery.py",
                "            if not self._is_enabled or self._enabled != enabled:  # another reader may "
                "have taken them",
                "            if not self._is_enabled:",
            ),
        ),
        "tests/remoteevent/test_delivery.py::test_events_that_another_reader_took_meanwhile_are_not_delivered",
    ),
    Planted(
        "notifications follow an expired lease until its landlord notices",
        "Deliver nothing after a lease has expired, and test transacted events",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/delivery.py",
                "return self._lease is not None and self._lease.is_ended",
                "return False",
            ),
        ),
        "tests/remoteevent/test_mailbox_modes.py::test_an_expired_lease_stops_delivery_before_the_landlord_has_noticed",
    ),
    Planted(
        "upstream leases of an agent are not renewed after a restart",
        "Renew upstream leases of an agent after a restart, and forget ended ones",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/renewals.py",
                "        self._manager.renew_now(lease)\n",
                "",
            ),
        ),
        "tests/remoteevent/test_kept_renewals.py::test_a_lease_is_renewed_at_once_after_a_restart",
    ),
    Planted(
        "a notice of an earlier failure removes the record of a lease that is renewed again",
        "Keep the record of a lease that is renewed again when the party closes",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/renewals.py",
                "if key not in self._leases and key not in self._left:",
                "if key not in self._leases:",
            ),
        ),
        "tests/remoteevent/test_kept_renewals.py"
        "::test_a_lease_that_is_renewed_again_stays_for_the_next_run_when_its_owner_is_told_of_a_failure_late",
    ),
    Planted(
        "the record of a failed lease stays when its owner is gone",
        "Remove the record of a failed lease when its owner is gone",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/failure_notices.py",
                "            waiting.abandon()\n",
                "            waiting.delivery.close()\n",
            ),
        ),
        "tests/remoteevent/test_renewal_failures.py"
        "::test_nothing_is_kept_of_a_lease_that_failed_when_its_owner_is_gone",
    ),
    Planted(
        "a closed mailbox says that there is no registration",
        'Answer "closed", not "gone", while a party of remote events closes',
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/mailbox.py",
                """\
        if found is None:
            self._refuse_closed()
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")""",
                """\
        if found is None:
            raise UnknownLeaseError(f"mailbox '{self.name}': no registration {registration_id!r:.80}")""",
            ),
        ),
        "tests/remoteevent/test_closing.py::test_a_closed_mailbox_tells_no_owner_that_its_registration_has_ended",
    ),
    Planted(
        "an event without a disk is given up before a restarted broker has its clients back",
        "Try events without a disk again for 40 s",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/delivery.py",
                "SHORT: Final = RetryPolicy(attempts=10, max_age=60.0)",
                "SHORT: Final = RetryPolicy(attempts=5, max_age=60.0)",
            ),
        ),
        "tests/remoteevent/test_delivery.py"
        "::test_a_listener_that_is_back_40_s_after_a_restart_of_the_broker_misses_nothing",
    ),
    Planted(
        "events for the target of an earlier run are dropped when an agent is opened without it",
        "Keep the events of an agent that is opened without its target",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/agent.py",
                """\
        else:
            self._events.forget(_TARGET)  # it would keep all further events
""",
                """\
        self._events.forget(_TARGET)
""",
            ),
        ),
        "tests/remoteevent/test_agent.py::test_events_for_the_target_of_an_earlier_run_wait_until_there_is_one",
    ),
    Planted(
        "an iterator hands out what it has read ahead after another reader took its place",
        "End an iterator at once when another reader takes its place",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/iterator.py",
                "        if self._is_over or self._ready or (self._acknowledge is not None and "
                "self._handed is not None):",
                "        if self._acknowledge is not None and self._handed is not None:",
            ),
        ),
        "tests/remoteevent/test_mailbox_remote.py"
        "::test_an_iterator_that_was_taken_over_hands_out_nothing_that_it_has_read_ahead",
    ),
    Planted(
        "an iterator is stuck after a switch to another reader that failed",
        "Lose and double no event when a mailbox changes its mode",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/iterator.py",
                """\
        with self._lock:
            self._is_over = False

    # --- iterating""",
                """\
        return

    # --- iterating""",
            ),
        ),
        "tests/remoteevent/test_mailbox_remote.py::test_an_iterator_goes_on_after_a_switch_that_failed",
    ),
    Planted(
        "a registration that was cancelled just before its mailbox closed is back in the next run",
        "Renew upstream leases of an agent after a restart, and forget ended ones",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/party.py",
                """\
                    if lease.is_over:
                        self._table.forget(REGISTRATION + lease.id)
                    elif lease.expires != stored_end:
""",
                """\
                    if lease.expires != stored_end:
""",
            ),
        ),
        "tests/remoteevent/test_mailbox_restart.py"
        "::test_a_registration_that_was_cancelled_before_the_mailbox_closed_is_not_there_again",
    ),
    Planted(
        "a registration that was renewed just before its party closed has the older end in the next run",
        "Store changes of leases whose callbacks come after the close",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/party.py",
                """\
                    elif lease.expires != stored_end:
                        self._put_end(lease)
""",
                "",
            ),
        ),
        "tests/remoteevent/test_kept_leases.py"
        "::test_a_change_of_a_lease_whose_callback_comes_after_the_end_of_its_party_is_stored",
    ),
    Planted(
        "a notice is stored by a mailbox that cannot be opened",
        "Let notices of a mailbox wait until it is open, one for each lease",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/mailbox/failure_notices.py",
                "        self._is_started = False",
                "        self._is_started = True",
            ),
        ),
        "tests/remoteevent/test_renewal_failures.py::test_a_mailbox_that_cannot_be_opened_stores_no_notice",
    ),
    # --- a disk that fails
    Planted(
        "a party closes without a word although its disk refuses the renewal of a lease",
        "Fail close of a journal table if its last changes are not stored",
        "remote events",
        (
            Edit(
                "messaging/journal/table.py",
                "                failed, self._failed = self._failed, {}\n        if failed:",
                "                failed, self._failed = {}, {}\n        if failed:",
            ),
        ),
        "tests/remoteevent/test_failing_disks.py::test_a_party_that_cannot_store_a_renewal_when_it_closes_says_so",
    ),
    Planted(
        "a mailbox acknowledges an event that its disk has refused",
        "Keep events in the journal while they wait, and no longer",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/intake.py",
                "                            outcomes.append(error)\n",
                "                            is_told = isinstance(error, (JournalFullError, ClosedError))\n"
                "                            outcomes.append(error if is_told else None)\n",
            ),
        ),
        "tests/remoteevent/test_failing_disks.py"
        "::test_an_event_that_a_mailbox_cannot_store_is_refused_and_stored_when_it_comes_again",
    ),
    Planted(
        "a generator promises an event that its disk has refused",
        "Add leases, event generators, agents, filters and their stubs",
        "remote events",
        (
            Edit(
                "messaging/remoteevent/storage.py",
                "        self._promise.reject(error)\n",
                "        if isinstance(error, ClosedError):\n"
                "            self._promise.reject(error)\n"
                "        else:\n"
                "            self._promise.resolve(self._number)\n",
            ),
        ),
        "tests/remoteevent/test_failing_disks.py"
        "::test_an_event_that_a_generator_cannot_store_fails_and_the_next_one_is_notified_of",
    ),
)
