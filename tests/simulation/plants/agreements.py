"""Faults of leases and transactions."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

TRANSACTIONS = (
    Planted(
        "a transaction manager that closed says that transactions are unknown",
        'Answer "closed", not "gone", while a party of remote events closes',
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transactions/manager.py",
                """\
        if found is None:
            self._refuse_closed()
            raise UnknownTransactionError(""",
                """\
        if found is None:
            raise UnknownTransactionError(""",
            ),
        ),
        "tests/remoteevent/test_closing.py"
        "::test_a_transaction_manager_that_closed_tells_no_participant_that_a_transaction_is_unknown",
    ),
    Planted(
        "a commit succeeds although the generator of its events has closed",
        "Refuse to prepare events of a generator that has closed",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                """\
            if events and self._is_closed:
                raise ClosedError(f"generator {self._source!r}: closed")
""",
                "",
            ),
        ),
        "tests/remoteevent/test_transacted_events.py"
        "::test_a_transaction_with_events_of_a_generator_that_has_closed_is_not_committed",
    ),
    Planted(
        "registrations of a transaction stay when its manager is gone",
        "End the registrations of a transaction whose manager is gone",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                """\
            if left is not None:
                self._watch(scope, left)
        return scope""",
                "        return scope",
            ),
        ),
        "tests/remoteevent/test_transacted_events.py::test_a_transaction_whose_manager_is_gone_ends_with_its_lease",
    ),
    Planted(
        "a transaction of an application that does not answer occupies worker after worker",
        "Ask each transaction of an application for its time on its own",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                "            due = [each for each in due if not each.is_asked]\n",
                "",
            ),
        ),
        "tests/remoteevent/test_transacted_events.py"
        "::test_transactions_of_applications_do_not_wait_for_one_that_does_not_answer",
    ),
    Planted(
        "a lost transaction of a generator is committed without its events",
        "Abort a transaction whose generator has lost its events",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                """\
            if scope is None:
                raise UnknownTransactionError(
                    f"generator {self._source!r}: the events of transaction {transaction_id} are not known; "
                    "they were lost with an earlier run"
                )
""",
                """\
            if scope is None:
                return Vote.NOTCHANGED
""",
            ),
        ),
        "tests/remoteevent/test_transactions_joining.py"
        "::test_a_generator_that_lost_the_events_of_a_transaction_aborts_it",
    ),
    Planted(
        "a foreign transaction that fails to say when it ends stays for good",
        "Ask a transaction for its time outside of lock and event loop",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                """\
                )  # fmt: skip
                left = 0.0
            if left > 0:""",
                """\
                )  # fmt: skip
                return
            if left > 0:""",
            ),
        ),
        "tests/remoteevent/test_transacted_events.py"
        "::test_a_transaction_of_an_application_that_fails_to_say_when_it_ends_is_asked_for_its_state",
    ),
    Planted(
        "an event is lost that is generated while its transaction commits",
        "Abort a transaction whose generator has lost its events",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                """\
            if scope is None:
                raise UnknownTransactionError(
                    f"generator {self._source!r}: the events of transaction {transaction_id} are not known; "
                    "they were lost with an earlier run"
                )
            events = [*scope.events]""",
                """\
            if scope is None or not scope.events:
                return Vote.NOTCHANGED
            events = [*scope.events]""",
            ),
        ),
        "tests/remoteevent/test_transactions_joining.py"
        "::test_an_event_is_refused_if_the_transaction_commits_while_its_generator_joins",
    ),
    Planted(
        "servers of participants without a name stay",
        "Close the servers of participants without a name",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transactions/remote_participant.py",
                "        self.is_told = True\n        self._note()\n",
                "        return\n",
            ),
        ),
        "tests/remoteevent/test_transactions_joining.py"
        "::test_participants_without_a_name_are_reachable_as_long_as_their_transaction",
    ),
    Planted(
        "a commit is confirmed although the disk of a generator has refused its events",
        "Add leases, event generators, agents, filters and their stubs",
        "transactions",
        (
            Edit(
                "messaging/remoteevent/transacted.py",
                "        if failure is not None:\n",
                "        if isinstance(failure, ClosedError):\n",
            ),
        ),
        "tests/remoteevent/test_failing_disks.py::test_a_commit_whose_events_cannot_be_stored_is_not_confirmed",
    ),
)

LEASES = (
    Planted(
        "a closed landlord says that leases are unknown",
        "Answer for leases of a closed landlord with a failure that passes",
        "leases",
        (
            Edit(
                "messaging/leases/landlord.py",
                "        if self.is_closed or self._suspended.get(lease_id, -math.inf) > lease_time():",
                "        if self._suspended.get(lease_id, -math.inf) > lease_time():",
            ),
        ),
        "tests/leases/test_lease.py::test_a_closed_landlord_is_no_definite_answer",
    ),
    Planted(
        "a lease counts as ended before its reason is known",
        'Answer "closed", not "gone", while a party of remote events closes',
        "leases",
        (
            Edit(
                "messaging/leases/landlord.py",
                """\
        lease.end = end  # before it counts as ended: threads without the lock look at the reason then
        if end is not LeaseEnd.EXPIRED:
            lease.note_cancelled()
""",
                """\
        if end is not LeaseEnd.EXPIRED:
            lease.note_cancelled()
        lease.end = end
""",
            ),
        ),
        "tests/remoteevent/test_closing.py::test_a_lease_has_the_reason_of_its_end_before_it_counts_as_ended",
    ),
    Planted(
        "a renewal set whose landlord closes says that its lease has ended",
        'Answer "closed", not "gone", while a party of remote events closes',
        "leases",
        (
            Edit(
                "messaging/remoteevent/renewal_set.py",
                """\
        if LeaseEnd.CLOSED in (self._end, self.lease.end):
            raise ClosedError(f"lease renewal set {self.source!r}: closed")
        if self._end is not None or self.lease.is_ended:""",
                """\
        if self._end is not None or self.lease.is_ended:""",
            ),
        ),
        "tests/remoteevent/test_closing.py::test_a_renewal_set_whose_landlord_closes_says_so",
    ),
    Planted(
        "a grantor that blocks delays the renewals of others",
        "Let a grantor that blocks delay no other one",
        "leases",
        (
            Edit(
                "messaging/leases/renewal.py",
                "                returned.wait(_PATIENCE)\n",
                "                returned.wait()\n",
            ),
        ),
        "tests/leases/test_batch.py::test_a_grantor_that_blocks_delays_no_other_one_of_a_renewal_manager",
    ),
    Planted(
        "a lease whose renewal is not answered is not asked for again",
        "Ask again for a lease whose renewal is not answered",
        "leases",
        (
            Edit(
                "messaging/leases/renewed.py",
                "is_waiting = bool(entry.attempt) and now < entry.answer_until",
                "is_waiting = bool(entry.attempt)",
            ),
        ),
        "tests/leases/test_renewal.py::test_a_request_without_an_answer_is_made_again_before_the_lease_expires",
    ),
    Planted(
        "a lost answer leaves a lease longer than its grantor has it",
        "Never take a lease of another process for longer than its grantor does",
        "leases",
        (
            Edit(
                "messaging/leases/remote.py",
                "        renewals = [lease.note_asked(duration, asked_at) for lease, duration in requests]\n",
                "        renewals = [lease.note_asked(lease.FOREVER, asked_at) for lease, duration in requests]\n",
            ),
        ),
        "tests/leases/test_remote.py::test_a_lost_answer_to_a_shortening_renewal_shortens_the_lease",
    ),
    Planted(
        "a renewal counts that was answered before a shorter one was asked for",
        "Count no renewal that was answered before another one was asked for",
        "leases",
        (
            Edit(
                "messaging/leases/lease.py",
                "found = tuple(each for each in self._renewals if each not in renewal.earlier)",
                "found = self._renewals",
            ),
            Edit(
                "messaging/leases/lease.py",
                "self._known_expires = begin + min(each.shortest for each in found)",
                "self._known_expires = max("
                "begin + min(each.shortest for each in found), self._known_expires * (len(found) > 2))",
            ),
        ),
        "tests/leases/test_remote.py"
        "::test_a_renewal_that_was_answered_before_a_shorter_one_was_asked_for_does_not_count",
    ),
    Planted(
        "a renewal that shortens a lease counts only when it is answered",
        "Count a renewal that shortens a lease from its request on",
        "leases",
        (
            Edit(
                "messaging/leases/lease.py",
                "            self._expires = min(self._expires, renewal.expires)\n",
                "",
            ),
        ),
        "tests/leases/test_remote.py::test_a_shortening_renewal_counts_before_its_answer",
    ),
)
