"""Topic permissions and policies: 157.8, 157.9.2; RFC 97, 5.4.1 and 6.7."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.dispatch.permission import TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.errors import ArgumentError, InvalidTopicError, NullEventError, PermissionDeniedError
from messaging.testing.tables import table
from tests.dispatch.helpers import NEITHER
from tests.threads import in_background, in_threads

BOTH = "publish,subscribe"
NAMES = ["*", "x", "x/y", "x/y/z", "x/*", "x/y/*", "x/+", "+/y/*", "a"]
PERMISSIONS = st.builds(TopicPermission, st.sampled_from(NAMES), st.sampled_from(["publish", "subscribe", BOTH]))


def actions_of(permission: TopicPermission) -> list[TopicPermission]:
    """The same, one action at a time."""
    return [TopicPermission(permission.name, action) for action in permission.actions.split(",")]


# --- one permission


@table(
    ("text", "expected"),
    [
        ("publish", "publish"),
        ("subscribe", "subscribe"),
        ("publish,subscribe", BOTH),
        ("subscribe,publish", BOTH),
        ("PUBLISH,Subscribe", BOTH),
        ("  pUbLiSh ,\tSUBSCRIBE\n", BOTH),
        ("publish,publish", "publish"),
        ("subscribe, publish, subscribe", BOTH),
        (TopicPermission.PUBLISH, "publish"),
        (TopicPermission.SUBSCRIBE, "subscribe"),
    ],
)
def test_actions_are_normalised(text: str, expected: str) -> None:
    """Scenario 86; 157.9.2.5; RFC 97 6.7.3, 6.7.5."""
    assert TopicPermission("a/b", text).actions == expected


@table(
    "text",
    [
        *("", " ", ",", ",publish", "publish,", "publish,,subscribe", "publish, ,subscribe", "publish subscribe"),
        *("publish;subscribe", "pub lish", "register", "publish,get", "*", "publishsubscribe", "publish,subscribe,"),
        *(None, 5, b"publish", ["publish"]),
    ],
)
def test_actions_are_refused_otherwise(text: Any) -> None:
    """Scenario 86."""
    with pytest.raises(ArgumentError, match="actions must be"):
        TopicPermission("a/b", text)


@table("name", [*NEITHER, 5, b"a"], ids=ascii)
def test_names_are_topics_or_filters(name: Any) -> None:
    """Scenario 86."""
    with pytest.raises(InvalidTopicError):
        TopicPermission(name, "publish")


def test_a_permission_needs_a_name() -> None:
    with pytest.raises(NullEventError):
        TopicPermission(None, "publish")  # type: ignore[arg-type]


@table(
    ("mine", "theirs", "is_narrower"),
    [
        *((mine, theirs, True) for mine, theirs in [("x/y/*", "x/y/z"), ("*", "x/y"), ("a/b/*", "a/b/c/d")]),
        *((mine, theirs, True) for mine, theirs in [("a/b/*", "a/b/c/*"), ("com/+/*", "com/foo/x"), ("*", "*")]),
        *((mine, theirs, False) for mine, theirs in [("x/y", "x/y/z"), ("x/y", "x/Y"), ("a/b/*", "a/bc")]),
        *((mine, theirs, False) for mine, theirs in [("a/b/*", "a/*"), ("x/y/*", "x/y"), ("a/b/*", "x/y/z")]),
        *((mine, theirs, False) for mine, theirs in [("com/+/service3", "com/+/+"), ("x/*", "*")]),
    ],
)
def test_a_permission_implies_narrower_topics_and_its_own_actions(mine: str, theirs: str, is_narrower: bool) -> None:
    """Scenarios 85 and 87, 50 of Event Admin; 157.9.2.7, RFC 97 5.4.1, 6.7.4."""
    for my_actions, their_actions in itertools.product(("publish", "subscribe", BOTH), repeat=2):
        permission, other = TopicPermission(mine, my_actions), TopicPermission(theirs, their_actions)
        expected = is_narrower and my_actions in (their_actions, BOTH)
        assert permission.implies(other) is expected
        assert permission.implies(permission)
        assert TopicPermissionCollection([permission]).implies(other) is expected
        assert TopicPolicy({"p": [permission]}).permits("p", other) is expected


@table("other", [None, "x/y", 5, object(), TopicPermissionCollection()])
def test_nothing_but_permissions_is_implied(other: Any) -> None:
    everything = TopicPermission("*", BOTH)
    assert not everything.implies(other)
    assert not TopicPermissionCollection([everything]).implies(other)


def test_permissions_are_equal_if_name_and_actions_are() -> None:
    """157.9.2.4, 157.9.2.6; RFC 97 6.7.7, 6.7.8."""
    permission = TopicPermission("a/*", "subscribe, PUBLISH")
    assert permission == TopicPermission("a/*", BOTH)
    assert hash(permission) == hash(TopicPermission("a/*", BOTH))
    assert permission != TopicPermission("a/*", "publish")
    assert permission != TopicPermission("a/+", BOTH)
    assert permission != "a/*"
    assert repr(permission) == "TopicPermission('a/*', 'publish,subscribe')"


def test_permissions_are_immutable_and_can_be_copied() -> None:
    permission = TopicPermission("a/*", "subscribe")
    for name in ("name", "actions", "other"):
        with pytest.raises(AttributeError):
            setattr(permission, name, "*")
    for same in (copy.copy(permission), copy.deepcopy(permission), pickle.loads(pickle.dumps(permission))):
        assert same == permission


# --- collections


@given(st.lists(PERMISSIONS, max_size=5), PERMISSIONS)
def test_a_collection_combines_its_permissions_action_by_action(
    permissions: list[TopicPermission], other: TopicPermission
) -> None:
    """Scenario 50 of Event Admin; RFC 97 6.7.6: the actions may come from several permissions."""
    expected = all(any(each.implies(one) for each in permissions) for one in actions_of(other))
    assert TopicPermissionCollection(permissions).implies(other) is expected


def test_a_permission_makes_an_empty_collection_for_its_kind() -> None:
    """157.9.2.8."""
    permission = TopicPermission("a", "publish")
    collection = permission.new_permission_collection()
    assert [*collection] == []
    assert not collection.implies(permission)
    for _ in range(2):
        collection.add(permission)
    assert [*collection] == [permission]


@table("odd", [None, "a", object(), TopicPermissionCollection()])
def test_a_collection_takes_nothing_but_permissions(odd: Any) -> None:
    collection = TopicPermissionCollection()
    with pytest.raises(ArgumentError, match="permission must be a TopicPermission"):
        collection.add(odd)
    with pytest.raises(ArgumentError):
        TopicPermissionCollection([TopicPermission("a", "publish"), odd])
    assert len(collection) == 0


def test_a_collection_may_grow_while_others_look_through_it() -> None:
    collection = TopicPermissionCollection()

    def add(number: int) -> None:
        for each in range(100):
            collection.add(TopicPermission(f"t/{number}/{each}", "publish"))
            assert collection.implies(TopicPermission(f"t/{number}/{each}", "publish"))
            assert len([*collection]) <= 400

    in_threads(4, add)
    assert len(collection) == 400


# --- policies


def test_a_policy_permits_only_granted_permissions() -> None:
    policy = TopicPolicy({"meter": [TopicPermission("meters/*", "publish")], None: [TopicPermission("*", "subscribe")]})
    publish = TopicPermission("meters/1", "publish")
    subscribe = TopicPermission("meters/1", "subscribe")
    assert policy.permits("meter", publish)
    assert policy.permits(None, subscribe)
    for principal, permission in (("meter", subscribe), (None, publish), ("other", publish), ("Meter", publish)):
        assert not policy.permits(principal, permission)


def test_the_error_of_a_denied_permission_names_the_principal() -> None:
    policy = TopicPolicy()
    with pytest.raises(PermissionDeniedError, match=r"^the principal 'meter' may not publish 'meters/1'$"):
        policy.check("meter", TopicPermission("meters/1", "publish"))
    with pytest.raises(PermissionDeniedError, match=r"^a caller without a principal may not subscribe 'a/\*'$"):
        policy.check(None, TopicPermission("a/*", "subscribe"))
    policy.grant(None, TopicPermission("a/*", "subscribe"))
    policy.check(None, TopicPermission("a/*", "subscribe"))


def test_grants_add_up_until_they_are_revoked() -> None:
    policy = TopicPolicy({"p": [TopicPermission("a", "publish")]})
    policy.grant("p", TopicPermission("a", "subscribe"), TopicPermission("b", "publish"))
    policy.grant("q", TopicPermission("a", "publish"))
    policy.grant("p")
    for name, actions in (("a", BOTH), ("b", "publish")):
        policy.check("p", TopicPermission(name, actions))
    policy.revoke("p")
    policy.revoke("p")
    policy.revoke("unknown")
    for name, action in itertools.product("ab", ("publish", "subscribe")):
        assert not policy.permits("p", TopicPermission(name, action))
    assert policy.permits("q", TopicPermission("a", "publish"))


def test_a_grant_that_is_refused_grants_nothing() -> None:
    policy = TopicPolicy()
    told: list[int] = []
    policy.on_change(lambda: told.append(1))
    with pytest.raises(ArgumentError):
        policy.grant("p", TopicPermission("a", "publish"), "b")  # type: ignore[arg-type]
    assert not policy.permits("p", TopicPermission("a", "publish"))
    assert told == []


def test_listeners_are_told_of_changes_until_they_are_removed() -> None:
    policy = TopicPolicy()
    told: list[str] = []
    permission = TopicPermission("a", "publish")

    def listen() -> None:
        told.append("granted" if policy.permits("p", permission) else "revoked")

    remove_first = policy.on_change(listen)
    remove_second = policy.on_change(listen)  # once more, and told once more
    policy.grant("p", permission)
    assert told == ["granted", "granted"]
    for _ in range(2):
        remove_first()
    policy.revoke("p")
    assert told == ["granted", "granted", "revoked"]
    remove_second()
    policy.grant("p", permission)
    assert len(told) == 3


def test_listeners_are_called_without_the_lock() -> None:
    """From a listener, and from a thread that it waits for, the policy may be used and changed."""
    policy = TopicPolicy()
    permission = TopicPermission("a", "publish")
    rounds: list[bool] = []

    def change() -> None:
        policy.grant("q", permission)
        policy.on_change(lambda: None)()

    def listen() -> None:
        if not rounds:
            rounds.append(True)
            in_background(change)()
            rounds.append(policy.permits("q", permission))

    policy.on_change(listen)
    policy.grant("p", permission)
    assert rounds == [True, True]


def test_a_listener_may_remove_itself_and_others() -> None:
    policy = TopicPolicy()
    told: list[str] = []

    def listen() -> None:
        told.append("first")
        remove_first()
        remove_second()

    remove_first = policy.on_change(listen)
    remove_second = policy.on_change(lambda: told.append("second"))
    policy.on_change(lambda: told.append("third"))
    for _ in range(2):
        policy.revoke("p")
    assert told == ["first", "third", "third"]


def test_a_listener_that_fails_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    policy = TopicPolicy()
    told: list[str] = []
    policy.on_change(lambda: 1 / 0)
    policy.on_change(lambda: told.append("second"))
    with caplog.at_level(logging.ERROR):
        policy.grant("p", TopicPermission("a", "publish"))
    assert told == ["second"]
    assert policy.permits("p", TopicPermission("a", "publish"))
    assert "topic policy: a listener failed" in caplog.text


def test_a_listener_must_be_callable() -> None:
    with pytest.raises(ArgumentError, match="callable"):
        TopicPolicy().on_change(None)  # type: ignore[arg-type]


def test_threads_change_a_policy_without_losing_grants() -> None:
    policy = TopicPolicy()
    count: list[int] = []
    policy.on_change(lambda: count.append(1))

    def grant(number: int) -> None:
        for each in range(50):
            policy.grant(f"p{each % 3}", TopicPermission(f"t/{number}/{each}", "publish"))
            policy.on_change(lambda: None)()
            policy.revoke(f"none{number}")

    in_threads(8, grant)
    assert all(
        policy.permits(f"p{each % 3}", TopicPermission(f"t/{number}/{each}", "publish"))
        for number in range(8)
        for each in range(50)
    )
    assert len(count) == 800


@table("principal", [5, [], ("p",), b"meter"])
def test_a_principal_that_is_no_name_is_refused_everywhere(principal: Any) -> None:
    policy = TopicPolicy()
    for call in (
        lambda: policy.grant(principal),
        lambda: policy.revoke(principal),
        lambda: policy.permits(principal, TopicPermission("a", "publish")),
        lambda: policy.check(principal, TopicPermission("a", "publish")),
    ):
        with pytest.raises(ArgumentError, match="principal must be a str or None"):
            call()
