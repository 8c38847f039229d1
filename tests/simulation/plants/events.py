"""Faults of the typed event bus, local and connected, and of distributed events."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

TYPED_BUS = (
    # --- local
    Planted(
        "an event is lost between the past events of a handler and its live ones",
        "Typed event bus, history and monitor: tests of the chapter, state machines, and what they brought to light",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/bus.py",
                "                if dispatcher.routes.get(event.topic) is route:\n",
                "                if route is not None:\n",
            ),
        ),
        "tests/typedevent/test_replay.py::test_nothing_is_lost_or_doubled_where_the_past_meets_the_present",
    ),
    Planted(
        "live events come before the past ones that a handler asked for",
        "Typed event bus, history and monitor: tests of the chapter, state machines, and what they brought to light",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/receivers.py",
                "        lane = self.lane = self.new_lane(is_held=True)\n",
                "        lane = self.lane = self.new_lane()\n",
            ),
        ),
        "tests/typedevent/test_replay.py::test_events_published_during_a_replay_come_after_it",
    ),
    Planted(
        "a durable history gives sequences a second time after a restart",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/store.py",
                "            history.sequence = self._sequences.first - 1\n",
                "            history.sequence = 0\n",
            ),
        ),
        "tests/typedevent/test_durable_history.py::test_sequences_go_on",
    ),
    Planted(
        "a busy topic pushes out of the disk what a minimum guarantees",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/store.py",
                "            self._copy_guaranteed()\n",
                "            pass\n",
            ),
        ),
        "tests/typedevent/test_durable_history.py::test_a_busy_topic_does_not_push_out_what_a_minimum_guarantees",
    ),
    Planted(
        "a replay misses the events that are on their way to the disk",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/store.py",
                "        return _in_order(self._pending.copy())\n",
                "        return []\n",
            ),
        ),
        "tests/typedevent/test_durable_history_model.py"
        "::test_replays_beside_publishers_get_each_event_once_and_in_order",
    ),
    # --- connected
    Planted(
        "an event that comes over two connections is published twice",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/bus_connection.py",
                """\
            if (key := hop.key) is not None and not bus.seen.is_new(key):
                if bus.past_only.pop(key, _ABSENT) is _ABSENT:
                    self.duplicates += 1
                    return
                is_copy = True
""",
                "",
            ),
        ),
        "tests/typedevent/test_network.py::test_an_event_comes_once_over_two_connections",
    ),
    Planted(
        "live events of other processes come before their past ones",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/past.py",
                "            if not self._is_holding:\n                return False\n",
                "            if self._is_holding is not None:\n                return False\n",
            ),
        ),
        "tests/typedevent/test_replay_to_others.py"
        "::test_handlers_with_history_receive_past_events_of_others_before_live_ones",
    ),
    Planted(
        "a held event that fails keeps all behind it from the handlers",
        "Answer the senders of remote events that are refused",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/past.py",
                "                except Exception:  # the others must be released all the same\n",
                "                except ZeroDivisionError:\n",
            ),
        ),
        "tests/typedevent/test_network.py::test_a_held_event_that_fails_keeps_no_other_one_from_handlers",
    ),
    Planted(
        "a sender waits for an event that a connection does not publish",
        "Answer the senders of remote events that are refused",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/bus_connection.py",
                """\
            if arrival.notified is not None:
                arrival.notified()  # no handler of the bus wants it
            return
""",
                "            return\n",
            ),
        ),
        "tests/typedevent/test_network.py::test_a_sender_is_answered_for_an_event_that_a_connection_does_not_publish",
    ),
    Planted(
        "events that two durable histories have are emitted twice after a restart",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/past.py",
                'return event.network_id or f"{self._recorder}-{event.sequence}"',
                'return f"{self._recorder}-{event.sequence}"',
            ),
        ),
        "tests/typedevent/test_replay_to_others.py"
        "::test_events_that_two_durable_histories_have_are_emitted_once_after_a_restart",
    ),
    Planted(
        "a late joiner with a durable history takes past events that it has",
        "Keep the history of a bus on a journal, and connect buses over brokers",
        "typed bus",
        (
            Edit(
                "messaging/typedevent/bus_connection.py",
                """\
                for each in bus.past.newest(self._topics, start, MAX_PAST):
                    if bus.seen.is_new(key := bus.past.key_of(each)):  # others may have recorded it, too
                        bus.past_only[key] = None
""",
                "",
            ),
        ),
        "tests/typedevent/test_replay_to_others.py"
        "::test_a_late_joiner_with_a_durable_history_takes_only_events_that_it_lacks",
    ),
)

DISTRIBUTED = (
    # --- interests
    Planted(
        "a consumer whose topics change misses events that it wants before and after",
        "Keep an interest until its successor is subscribed to",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/own_announcements.py",
                "        staying = self._replaced()\n",
                "        staying: frozenset[str] = frozenset()\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_own_interests.py::test_topics_that_change_leave_no_gap",
    ),
    Planted(
        "an interest is announced before the broker has confirmed its subscription",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/own_announcements.py",
                "[*(each for each, pattern in self._interests.items() if pattern in confirmed), *self._ending]",
                "[*(each for each, pattern in self._interests.items() if pattern in self._patterns), *self._ending]",
            ),
        ),
        "tests/dispatch/eventnetwork/test_own_interests.py"
        "::test_an_interest_is_announced_after_the_broker_confirmed_its_subscription",
    ),
    Planted(
        "a subscription that was ended and begun again counts from its first confirmation",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/own_announcements.py",
                """\
        if self._adding.get(pattern) is not added:
            return  # removed meanwhile, and maybe added again: the later promise counts
        del self._adding[pattern]
""",
                "        self._adding.pop(pattern, None)\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_own_interests.py"
        "::test_a_subscription_that_was_ended_and_begun_again_counts_from_its_second_confirmation",
    ),
    Planted(
        "subscriptions that a broker has ended are never made again",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/own_announcements.py",
                "        for each in refused:\n            self._add(each)\n",
                "        del refused\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_own_interests.py"
        "::test_an_interest_whose_subscription_the_broker_ends_is_withdrawn_and_tried_again_after_a_reconnect",
    ),
    Planted(
        "a member whose interests were refused counts as known",
        "Query a member again whose interests were refused",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/membership.py",
                "        member.is_known = not member.is_refused\n",
                "        member.is_known = True\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_partly_wrong.py"
        "::test_a_member_that_was_refused_is_unknown_and_is_queried_again_rarely",
    ),
    # --- notifications
    Planted(
        "a sender waits for a member that has withdrawn its interest",
        "End a notification's wait for a member that withdraws its interest",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/membership.py",
                """\
        if removed:
            for each in self.notifications.all():
                if each.is_missing(member) and not self._is_for(each, member):
                    each.confirmed(member.id)  # it has no consumer left, and may never answer
""",
                "        del removed\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_withdrawn.py::test_a_withdrawn_interest_ends_the_waits_for_its_member",
    ),
    Planted(
        "a withdrawal while an event is published keeps its sender waiting",
        "End a notification's wait for a member that withdraws its interest",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/sending.py",
                "            if each.id not in membership.members or not notification.is_for(each):",
                "            if each.id not in membership.members:",
            ),
        ),
        "tests/dispatch/eventnetwork/test_withdrawn.py::test_a_withdrawal_while_an_event_is_published_ends_its_wait",
    ),
    Planted(
        "notifications wait for their deadlines after the connection was lost",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/node.py",
                "        self._membership.disconnected()\n        for each in self._notifications.all():\n",
                "        self._membership.disconnected()\n        for each in self._notifications.all()[:0]:\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_node.py"
        "::test_a_lost_connection_fails_the_pending_notifications_and_the_members_meet_again",
    ),
    Planted(
        "a lost member that is forgotten counts as notified",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/membership.py",
                "        if not member.is_lost:  # a lost one did not confirm: notifications still name it\n",
                "        if member is not None:\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_waiting.py::test_a_lost_member_that_is_forgotten_did_not_confirm",
    ),
    Planted(
        "the sender of an event that is refused waits for its deadline",
        "Answer the senders of remote events that are refused",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/intake.py",
                "            if not arrived.is_taken:\n                self._answer(arrived)\n",
                "            pass\n",
            ),
        ),
        "tests/dispatch/eventnetwork/test_refused_events.py::test_a_refused_event_is_answered",
    ),
    # --- members
    Planted(
        "a member that receives nothing takes the others for lost",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/membership.py",
                "        elif silent >= _SILENT * member.heartbeat and self._received_until >= since:",
                "        elif silent >= _SILENT * member.heartbeat:",
            ),
        ),
        "tests/dispatch/eventnetwork/test_membership_model.py::test_a_member_that_receives_nothing_takes_no_other_for_lost",
    ),
    Planted(
        "a late announcement brings a member back that has left",
        "Connect the members of an event network over any adapter",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/membership.py",
                "            if now < self._gone.get(announcement.member, now):\n"
                "                return  # overtaken by the end of the member\n",
                "",
            ),
        ),
        "tests/dispatch/eventnetwork/test_membership_model.py::test_what_a_member_sent_before_it_left_does_not_bring_it_back",
    ),
    # --- sessions and events
    Planted(
        "a sender that was lost goes on with a session whose consumers had its end",
        "Deliver nothing of a session after its end",
        "distributed admin",
        (
            Edit(
                "messaging/distributedeventing/admin_network.py",
                "            if session in self._ended:\n                return True\n",
                "            self._ended.pop(session, None)\n",
            ),
        ),
        "tests/distributedeventing/test_sessions.py"
        "::test_a_sender_that_returns_after_it_was_lost_does_not_go_on_with_its_session",
    ),
    Planted(
        "a second end of a session does not wait for the consumers of the first",
        "Have a second end of a session wait for the consumers of the first",
        "distributed admin",
        (
            Edit(
                "messaging/distributedeventing/session.py",
                "            notification.follow(self._gate.ended)\n",
                "            notification.follow(None)\n",
            ),
        ),
        "tests/distributedeventing/test_rfc_probes.py"
        "::test_a_second_end_with_notification_waits_for_the_consumers_of_the_first_one",
    ),
    Planted(
        "an event that is sent again is consumed twice",
        "Add the distributed event admin of RFC 214",
        "distributed admin",
        (
            Edit(
                "messaging/distributedeventing/admin_network.py",
                "        if key is not None and not self._seen.is_new(key):\n"
                "            self._answer_copy(arrival, topic)\n"
                "            return\n",
                "",
            ),
        ),
        "tests/distributedeventing/test_distribution.py::test_53_a_message_that_is_sent_again_is_consumed_once",
    ),
    Planted(
        "the sessions of a member that is gone never end",
        "Add the distributed event admin of RFC 214",
        "distributed admin",
        (
            Edit(
                "messaging/distributedeventing/admin_network.py",
                "        for session, topic in self._sessions.lose(member).items():\n",
                "        for session, topic in {}.items():  # type: ignore[var-annotated]\n",
            ),
        ),
        "tests/distributedeventing/test_sessions.py"
        "::test_a_sender_that_returns_after_it_was_lost_does_not_go_on_with_its_session",
    ),
    Planted(
        "channels of a killed run stay in the session of the next one",
        "Keep the events of a queue until the channels of its next run are added",
        "distributed admin",
        (
            Edit(
                "messaging/dispatch/eventnetwork/node.py",
                "        self._joint.abandon(self.names.is_of_one_run)  # an earlier run may have been killed\n",
                "",
            ),
        ),
        "tests/dispatch/eventnetwork/test_brokers.py"
        "::test_the_channel_of_a_killed_run_delays_its_next_one_by_nothing_and_is_left",
    ),
)
