"""Two admins over ``memory://``: signed and unsigned networks, and what principals may send and receive across them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import messaging
from messaging import Messaging
from messaging.dispatch import DISTRIBUTED_EVENTS, TopicPermission, TopicPolicy
from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork.announcements import Announcement, dump_announcement
from messaging.distributedeventing import DistributedEventAdmin, EventNetwork, EventSigning, PushEvent, SigningKey
from messaging.errors import ArgumentError, PermissionDeniedError
from messaging.services import ServiceRegistry
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from tests.doubles.memory import drop

SHARED: Final = SigningKey.hmac("plant", "a secret of 32 characters, or so")
INTRUDER: Final = EventSigning(SigningKey.hmac("plant", "another secret of 32 characters!"))
PRIVATE: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
#: seconds; members are settled after a sixth of it
HEARTBEAT: Final = 3.0


def policy(**grants: str) -> TopicPolicy:
    """``alice="orders/**"``; the name ``nameless`` stands for callers without a principal."""
    return TopicPolicy(
        {
            None if name == "nameless" else name: [TopicPermission(each, "publish", DISTRIBUTED_EVENTS)]
            for name, each in grants.items()
        },
        DISTRIBUTED_EVENTS,
    )


class Plant:
    """A broker in this process, and admins that are closed with it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._name = f"memory://{uuid4().hex}"

    def connect(self) -> Messaging:
        return self._stack.enter_context(messaging.connect(self._name, services=ServiceRegistry()))

    def admin(self, signing: EventSigning | None = None, instance: Messaging | None = None, **options: Any) -> Any:
        network = EventNetwork(signing=signing, heartbeat=HEARTBEAT, **options.pop("network", {}))
        admin = DistributedEventAdmin(
            ServiceRegistry(), instance or self.connect(), network=network, notification_timeout=PATIENCE, **options
        )
        self._stack.enter_context(admin)
        admin.ready.result(PATIENCE)
        return admin

    def consumer(self, topic: str = "**", signing: EventSigning | None = None, **options: Any) -> tuple[Any, list[Any]]:
        """Return an admin, and the payloads and ends that its consumer received."""
        admin = self.admin(signing, **options)
        return admin, self.listen(admin, topic)

    @staticmethod
    def listen(admin: Any, topic: str = "**") -> list[Any]:
        got: Recorder[Any] = Recorder()

        def take(event: PushEvent[Any]) -> None:
            got.append(event.value if event.kind == "data" else event.kind)

        admin.on(topic, handler=take, is_session_aware=True)
        admin.node.refresh().result(PATIENCE)
        return got


@pytest.fixture
def plant() -> Iterator[Plant]:
    with contextlib.ExitStack() as stack:
        yield Plant(stack)


def meet(*admins: Any) -> None:
    """Wait until the admins know each other and their consumers."""
    eventually(lambda: all(each.get_dto().node.is_settled for each in admins), "settled")
    for each in admins:
        each.announced(PATIENCE).result(PATIENCE)


def refused(admin: Any) -> int:
    found: int = admin.node.get_dto().refused
    return found


def logged(caplog: pytest.LogCaptureFixture, *parts: str, level: int = logging.WARNING) -> list[str]:
    texts = [each.getMessage() for each in [*caplog.records] if each.levelno >= level]
    return [text for text in texts if all(part in text for part in parts)]


SIGNED: Final[dict[str, Callable[[], tuple[EventSigning | None, EventSigning | None]]]] = {
    "unsigned": lambda: (None, None),
    "one secret for all": lambda: (EventSigning(SHARED), EventSigning(SHARED)),
    "a key for each": lambda: (
        EventSigning(SigningKey.ed25519("a", PRIVATE), [SHARED]),
        EventSigning(SHARED, [SigningKey.ed25519_public("a", PRIVATE.public_key())]),
    ),
}


@pytest.mark.parametrize("as_cbor", [False, True])
@pytest.mark.parametrize("pair", [*SIGNED])
def test_events_sessions_and_notifications_work_with_and_without_signatures(
    plant: Plant, pair: str, as_cbor: bool
) -> None:
    first, second = SIGNED[pair]()
    sender = plant.admin(first, network={"as_cbor": as_cbor})
    receiver, got = plant.consumer("orders/**", second, network={"as_cbor": as_cbor})
    meet(sender, receiver)
    sender.publish_event_with_notification("orders/placed", {"id": 1}).result(PATIENCE)
    assert got == [{"id": 1}]
    with sender.create_session("orders/paid") as session:
        session.publish_event({"id": 2})
        session.close_with_notification().result(PATIENCE)
    assert got == [{"id": 1}, {"id": 2}, "close"]
    assert [each.name for each in receiver.members()] == [sender.name]
    assert refused(sender) == refused(receiver) == 0


# --- strangers


def test_strangers_are_refused_and_members_are_served(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    receiver, got = plant.consumer("orders/**", EventSigning(SHARED))
    sender = plant.admin(EventSigning(SHARED))
    meet(sender, receiver)
    for signing in (None, INTRUDER):
        stranger = plant.admin(signing, network={"send_always": "**"})
        before = refused(receiver)
        stranger.publish_event("orders/placed", "forged")
        eventually(lambda before=before: refused(receiver) > before, "refused")
        sender.publish_event_with_notification("orders/placed", "real").result(PATIENCE)
    assert got == ["real", "real"]
    assert {each.id for each in receiver.members()} == {sender.node.member}
    assert logged(caplog, "is refused: SignatureError")
    assert not [text for text in caplog.messages if "a secret of" in text or "another secret" in text]


def test_an_unsigned_member_does_not_read_signed_messages(plant: Plant) -> None:
    receiver, got = plant.consumer("orders/**")
    sender = plant.admin(EventSigning(SHARED), network={"send_always": "**"})
    sender.publish_event("orders/placed", "signed")
    eventually(lambda: refused(receiver) >= 2, "announcement and event refused")
    assert got == []


def test_a_replay_a_moved_event_and_a_forged_origin_are_refused(plant: Plant) -> None:
    thief = EventSigning(SigningKey.hmac("thief", "the secret of a thief, with a key"))
    signing = EventSigning(SHARED, [thief.own])
    receiver, got = plant.consumer("**", signing)
    sender = plant.admin(signing)
    raw = plant.connect()
    captured = subscribed(raw, "topics/orders/placed")
    meet(sender, receiver)
    sender.publish_event_with_notification("orders/placed", 1).result(PATIENCE)
    envelope = captured.wait_for(1)[0].payload

    for _ in range(3):
        raw.publish("topics/orders/placed", envelope).result(PATIENCE)
    eventually(lambda: receiver.node.get_dto().replayed == 3, "replayed")
    assert refused(receiver) == 0  # a broker may deliver copies: they are no attack

    raw.publish("topics/orders/paid", envelope).result(PATIENCE)
    eventually(lambda: refused(receiver) == 1, "moved")

    forged = encode(WireEvent("orders/paid", 666, sender=sender.node.member, id="x"))
    raw.publish("topics/orders/paid", thief.seal(forged, "topics/orders/paid")).result(PATIENCE)
    eventually(lambda: refused(receiver) == 2, "forged origin")

    members = "topics-members/all"
    leave = dump_announcement(Announcement(kind="leave", member=sender.node.member))
    for payload in (leave, thief.seal(leave, members), INTRUDER.seal(leave, members)):
        before = refused(receiver)
        raw.publish(members, payload).result(PATIENCE)
        eventually(lambda before=before: refused(receiver) > before, "forged announcement")
    assert [each.id for each in receiver.members()] == [sender.node.member]
    sender.publish_event_with_notification("orders/placed", 2).result(PATIENCE)
    assert got == [1, 2]


def test_a_plain_program_takes_part_with_a_key(plant: Plant) -> None:
    receiver, got = plant.consumer("orders/**", EventSigning(SHARED))
    raw = plant.connect()
    envelope = EventSigning(SHARED).seal(b'{"event":1,"data":{"id":3}}', "topics/orders/placed")
    raw.publish("topics/orders/placed", envelope).result(PATIENCE)
    eventually(lambda: got, "received")
    assert got == [{"id": 3}]
    assert refused(receiver) == 0


def test_a_last_will_tells_the_loss_of_a_signing_member(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    unreliable = plant.connect()
    receiver, _ = plant.consumer("orders/**", EventSigning(SHARED))
    sender = plant.admin(EventSigning(SHARED), unreliable)
    meet(sender, receiver)

    def losses() -> int:
        return len(logged(caplog, "event network: member", sender.node.member, "is lost", level=logging.INFO))

    captured = subscribed(plant.connect(), "topics-members/all")
    drop(unreliable)
    eventually(lambda: losses() == 1, "lost")
    eventually(lambda: not receiver.members()[0].is_lost, "back")

    # the copy of an eavesdropper makes no member lost
    will = eventually(lambda: [each for each in captured.payloads if b'"will":true' in each], "the will")[0]
    plant.connect().publish("topics-members/all", will).result(PATIENCE)
    eventually(lambda: receiver.node.get_dto().replayed == 1, "replayed")
    assert losses() == 1
    assert refused(receiver) == 0


# --- principals


def test_inbound_decides_by_the_principal_of_the_key(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    alice = SigningKey.hmac("key-of-alice", "the secret of alice, 32 characters", principals=["alice"])
    guest = SigningKey.ed25519("key-of-guest", PRIVATE, principals=["guest"])
    own = EventSigning(SHARED, [alice, guest])
    receiver, got = plant.consumer("**", own, inbound=policy(alice="orders/**", guest="news/*"))
    by_alice = plant.admin(EventSigning(alice, [SHARED, guest]))
    by_guest = plant.admin(EventSigning(guest, [SHARED, alice]))
    meet(by_alice, by_guest, receiver)

    by_alice.publish_event_with_notification("orders/placed", "named", principal="alice").result(PATIENCE)
    by_alice.publish_event_with_notification("orders/placed", "supplied").result(PATIENCE)
    by_guest.publish_event("orders/placed", "denied")
    by_guest.publish_event_with_notification("news/local", "news").result(PATIENCE)
    assert got == ["named", "supplied", "news"]
    assert refused(receiver) == 1
    assert logged(caplog, "PermissionDeniedError", "inbound", "'guest'", "'orders/placed'")

    claimed = encode(WireEvent("orders/placed", "claimed", principal="alice"))
    sealed = EventSigning(guest).seal(claimed, "topics/orders/placed")
    plant.connect().publish("topics/orders/placed", sealed).result(PATIENCE)
    eventually(lambda: refused(receiver) == 2, "refused")
    assert got == ["named", "supplied", "news"]


def test_without_signatures_inbound_takes_the_principal_that_is_claimed(plant: Plant) -> None:
    receiver, got = plant.consumer("**", inbound=policy(alice="orders/**", nameless="news/*"))
    sender = plant.admin()
    meet(sender, receiver)
    sender.publish_event("orders/placed", "denied")
    sender.publish_event("news/local", "denied", principal="alice")
    sender.publish_event("news/local", "nameless")
    sender.publish_event_with_notification("orders/placed", "claimed", principal="alice").result(PATIENCE)
    assert got == ["nameless", "claimed"]
    assert refused(receiver) == 2


def test_a_denied_event_does_not_displace_a_permitted_one_with_its_id(plant: Plant) -> None:
    receiver, got = plant.consumer("**", inbound=policy(alice="**"))
    raw = plant.connect()
    for principal, value in ((None, "denied"), ("alice", "permitted"), ("alice", "copy"), ("alice", "last")):
        event = WireEvent("a/b", value, id=value if value == "last" else "same", principal=principal)
        raw.publish("topics/a/b", encode(event)).result(PATIENCE)
    eventually(lambda: "last" in got, "the last one")
    assert got == ["permitted", "last"]
    assert refused(receiver) == 1


def test_outbound_keeps_events_in_the_process(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    outbound = policy(alice="orders/**")
    sender = plant.admin(outbound=outbound)
    here = plant.listen(sender)
    receiver, there = plant.consumer()
    meet(sender, receiver)
    for number in range(3):
        sender.publish_event("orders/placed", number, principal="mallory")
    sender.publish_event("orders/placed", "nameless")
    with pytest.raises(PermissionDeniedError, match="outbound: the principal 'mallory'"):
        sender.publish_event_with_notification("orders/placed", 3, principal="mallory").result(PATIENCE)
    sender.publish_event_with_notification("orders/placed", "sent", principal="alice").result(PATIENCE)
    eventually(lambda: len(here) == 6, "all here")
    assert here == [0, 1, 2, "nameless", 3, "sent"]
    assert there == ["sent"]
    assert sender.get_dto().withheld == 5
    assert sender.get_dto().node.sent == 1
    assert len(logged(caplog, "'mallory'", "'orders/placed'", "this process only")) == 1
    assert len(logged(caplog, "without a principal", "'orders/placed'", "this process only")) == 1

    outbound.grant("mallory", TopicPermission("orders/*", "publish", DISTRIBUTED_EVENTS))
    sender.publish_event_with_notification("orders/placed", "granted", principal="mallory").result(PATIENCE)
    outbound.revoke("mallory")
    sender.publish_event("orders/placed", "revoked", principal="mallory")
    sender.publish_event_with_notification("orders/placed", "last", principal="alice").result(PATIENCE)
    assert there == ["sent", "granted", "last"]


def test_an_event_of_a_principal_of_another_key_is_not_sent(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    key = SigningKey.hmac("key-of-alice", "the secret of alice, 32 characters", principals=["alice"])
    sender = plant.admin(EventSigning(key))
    here = plant.listen(sender)
    receiver, there = plant.consumer("**", EventSigning(key))
    meet(sender, receiver)
    sender.publish_event("orders/placed", 1, principal="mallory")
    sender.publish_event_with_notification("orders/placed", 2, principal="alice").result(PATIENCE)
    assert (here, there) == ([1, 2], [2])
    assert sender.get_dto().withheld == 1
    assert refused(receiver) == 0
    assert len(logged(caplog, "'key-of-alice' may not speak for", "'mallory'")) == 1


def test_a_session_has_one_principal_from_its_first_event_to_its_end(plant: Plant) -> None:
    sender = plant.admin(outbound=policy(alice="orders/**"), permissions=None)
    here = plant.listen(sender, "orders/*")
    receiver, got = plant.consumer("orders/*", inbound=policy(alice="orders/**"))
    meet(sender, receiver)
    for principal, there in (("alice", ["data", "close"]), ("mallory", []), (None, [])):
        with sender.create_session("orders/placed", principal=principal) as session:
            session.publish_event("data")
        eventually(lambda: here == ["data", "close"], "all here")
        sender.publish_event_with_notification("orders/placed", "last", principal="alice").result(PATIENCE)
        assert got == [*there, "last"]
        here.clear()
        got.clear()


def test_the_events_of_a_session_are_checked_with_its_principal(plant: Plant) -> None:
    admin = plant.admin(permissions=policy(alice="orders/**"))
    with admin.create_session("orders/placed", principal="alice") as session:
        session.publish_event("data")
        session.publish_event_with_notification("data").result(PATIENCE)
    with pytest.raises(PermissionDeniedError):
        admin.create_session("orders/placed", principal="mallory")


def test_replies_pass_whatever_the_policies_say(plant: Plant) -> None:
    """The name of a private topic is random: knowing it is the permission (RFC 214 5.1.3)."""
    sender = plant.admin(inbound=policy(), outbound=policy(alice="orders/**"))
    receiver = plant.admin(inbound=policy(alice="orders/**"), outbound=policy())
    receiver.on("orders/*", is_whole=True, handler=lambda each: receiver.publish_event(each.value.reply_to, "reply"))
    receiver.node.refresh().result(PATIENCE)
    meet(sender, receiver)
    replies: Recorder[Any] = Recorder()
    with sender.create_session("orders/placed", None, lambda each: replies.append(each.value), principal="alice") as s:
        meet(sender, receiver)
        s.publish_event("request")
        eventually(lambda: replies == ["reply"], "the reply")


@table("name", ["inbound", "outbound"])
def test_a_policy_of_another_grammar_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: TopicPolicy()}
    with pytest.raises(ArgumentError, match=f"{name} needs a TopicPolicy of the grammar"):
        DistributedEventAdmin(ServiceRegistry(), **options)
    options = {name: {}}
    with pytest.raises(ArgumentError, match=f"{name} must be a TopicPolicy"):
        DistributedEventAdmin(ServiceRegistry(), **options)
