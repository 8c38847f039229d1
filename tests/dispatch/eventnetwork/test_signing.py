"""Signed messages: envelope, keys, time, replays, and members that are bound to their keys."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import hmac
import json
import logging
import pickle
import secrets
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretBytes, SecretStr

from messaging.dispatch.eventdata import WireEvent, encode
from messaging.dispatch.eventnetwork import EventNetwork, EventSigning, SigningKey
from messaging.dispatch.eventnetwork import seals as seals_module
from messaging.dispatch.eventnetwork.announcements import Announcement, dump_announcement
from messaging.dispatch.eventnetwork.intake import RefusalLog
from messaging.dispatch.eventnetwork.seals import Seals, SeenNonces
from messaging.errors import ArgumentError, DecodeError, MissingExtraError, PermissionDeniedError, SignatureError
from messaging.testing.tables import table

SECRET: Final = "a secret of 32 characters, or so"
PRIVATE: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC: Final = PRIVATE.public_key()
RAW: Final = PRIVATE.private_bytes_raw()
PEM: Final = PRIVATE.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
PUBLIC_PEM: Final = PUBLIC.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
CHANNEL: Final = "topics/orders/placed"
PAYLOAD: Final = '{"event":1,"data":{"id":3,"name":"Straße \\"1\\""}}'.encode()
NOW: Final = 1_800_000_000.0
ME, OTHER = str(uuid4()), str(uuid4())

SIGNINGS: Final = {
    "hmac": EventSigning(SigningKey.hmac("press-4", SECRET)),
    "ed25519": EventSigning(SigningKey.ed25519("press-4", PRIVATE)),
}


#: runs a test with both kinds of keys
each_signing = table("signing", SIGNINGS)


def problem_of(call: Callable[[], object]) -> str:
    with pytest.raises(SignatureError) as caught:
        call()
    return caught.value.problem


def changed(envelope: bytes, **fields: Any) -> bytes:
    found = json.loads(envelope) | fields
    return json.dumps({name: value for name, value in found.items() if value is not None}).encode()


# --- the envelope


@table("payload", [PAYLOAD, b"", b"\xa2\xff\x00", "\u2028 \x00".encode(), b'"\\'])
@each_signing
def test_a_sealed_payload_is_opened_unchanged(signing: EventSigning, payload: bytes) -> None:
    opened = signing.open(signing.seal(payload, CHANNEL, now=NOW), CHANNEL, NOW)
    assert (opened.payload, opened.key.id, opened.key.principals) == (payload, "press-4", None)
    assert (opened.time, opened.is_will) == (NOW * 1_000_000, False)


@given(payload=st.binary(max_size=200), channel=st.text("abc/é", min_size=1, max_size=20))
def test_every_payload_passes_the_envelope(payload: bytes, channel: str) -> None:
    for signing in SIGNINGS.values():
        assert signing.open(signing.seal(payload, channel), channel).payload == payload


def plain_program(payload: bytes, at: int, **fields: Any) -> bytes:
    """Sign as the documentation of the envelope tells a program without this library."""
    key, channel, nonce = "press-4", CHANNEL, secrets.token_hex(8)
    parts = [
        *(b"rx-messaging event network 1", b"HMAC-SHA256", key.encode(), channel.encode(), b"%d" % at),
        *(nonce.encode(), b"", payload),
    ]
    signed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    value = base64.b64encode(hmac.digest(SECRET.encode(), signed, "sha256")).decode()
    found = {
        "value": value, "payload": payload.decode(), "nonce": nonce, "time": at, "channel": channel, "key": key,
        "algorithm": "HMAC-SHA256", "signed": 1,
    }  # fmt: skip
    return json.dumps(found | fields, indent=1).encode()


def test_a_program_without_this_library_signs_messages() -> None:
    assert SIGNINGS["hmac"].open(plain_program(PAYLOAD, int(NOW) * 1_000_000), CHANNEL, NOW).payload == PAYLOAD


@given(data=st.data())
def test_no_changed_byte_changes_the_message(data: st.DataObject) -> None:
    signing = data.draw(st.sampled_from([*SIGNINGS.values()]))
    payload = data.draw(st.sampled_from([PAYLOAD, b"\xa1\x61a\x01"]))
    is_will = data.draw(st.booleans())
    envelope = bytearray(signing.seal(payload, CHANNEL, now=NOW, is_will=is_will))
    place = data.draw(st.integers(0, len(envelope) - 1))
    envelope[place] = data.draw(st.integers(0, 255).filter(lambda each: each != envelope[place]))
    with pytest.raises(SignatureError):
        signing.open(bytes(envelope), CHANNEL, NOW)


@each_signing
def test_every_single_bit_that_is_flipped_is_noticed(signing: EventSigning) -> None:
    envelope = signing.seal(PAYLOAD, CHANNEL, now=NOW)
    for place in range(len(envelope)):
        for bit in (0, 5):
            tampered = bytearray(envelope)
            tampered[place] ^= 1 << bit
            with pytest.raises(SignatureError):
                signing.open(bytes(tampered), CHANNEL, NOW)


@each_signing
def test_a_message_moved_to_another_topic_is_refused(signing: EventSigning) -> None:
    envelope = signing.seal(PAYLOAD, CHANNEL, now=NOW)
    assert problem_of(lambda: signing.open(envelope, "topics/orders/paid", NOW)) == "wrong_channel"
    moved = changed(envelope, channel="topics/orders/paid")
    assert problem_of(lambda: signing.open(moved, "topics/orders/paid", NOW)) == "wrong_signature"


@table(
    "payload",
    [PAYLOAD, b"", b"\xff", b"[]", b"null", b"1", b'"signed"', b"{" * 10_000, b'{"announcement":1}', b"\xa1\x61a\x01"],
)
@each_signing
def test_an_unsigned_message_is_refused(signing: EventSigning, payload: bytes) -> None:
    assert problem_of(lambda: signing.open(payload, CHANNEL)) == "unsigned"


@table(
    "fields, problem",
    [
        ({"signed": 2}, "malformed"),
        ({"signed": True}, "malformed"),
        ({"signed": "1"}, "malformed"),
        ({"more": 1}, "malformed"),
        ({"time": None}, "malformed"),
        ({"time": -1}, "malformed"),
        ({"time": 1.5}, "malformed"),
        ({"time": 2**70}, "malformed"),
        ({"nonce": "short"}, "malformed"),
        ({"nonce": "x" * 65}, "malformed"),
        ({"nonce": "é" * 20}, "malformed"),
        ({"nonce": "y" * 32}, "wrong_signature"),
        ({"payload": 1}, "malformed"),
        ({"payload": "\ud800"}, "unsigned"),
        ({"payload": "{}"}, "wrong_signature"),
        ({"encoding": "hex"}, "malformed"),
        ({"encoding": "base64"}, "malformed"),
        ({"will": False}, "malformed"),
        ({"will": True}, "wrong_signature"),
        ({"value": ""}, "wrong_signature"),
        ({"value": "AAAA"}, "wrong_signature"),
        ({"value": "é"}, "malformed"),
        ({"value": "A"}, "wrong_signature"),
        ({"key": "other"}, "unknown_key"),
        ({"key": "x" * 9_999}, "unknown_key"),
        ({"key": None}, "malformed"),
        ({"algorithm": "none"}, "wrong_signature"),
        ({"algorithm": None}, "malformed"),
        ({"channel": []}, "malformed"),
    ],
)
@each_signing
def test_a_wrong_envelope_is_refused(signing: EventSigning, fields: dict[str, Any], problem: str) -> None:
    envelope = changed(signing.seal(PAYLOAD, CHANNEL, now=NOW), **fields)
    with pytest.raises(SignatureError) as caught:
        signing.open(envelope, CHANNEL, NOW)
    assert caught.value.problem == problem
    assert caught.value.channel == CHANNEL
    assert len(str(caught.value)) < 500


def test_an_envelope_names_the_algorithm_of_its_key_and_no_other() -> None:
    """The public key of an Ed25519 key is no secret of HMAC."""
    public = PUBLIC.public_bytes_raw()
    verifying = EventSigning(SigningKey.hmac("own", SECRET), [SigningKey.ed25519_public("press-4", public)])
    confused = EventSigning(SigningKey.hmac("press-4", public)).seal(PAYLOAD, CHANNEL)
    assert problem_of(lambda: verifying.open(confused, CHANNEL)) == "wrong_signature"
    renamed = changed(confused, algorithm="Ed25519")
    assert problem_of(lambda: verifying.open(renamed, CHANNEL)) == "wrong_signature"


def test_base64_has_one_form() -> None:
    signing = SIGNINGS["hmac"]
    envelope = json.loads(signing.seal(PAYLOAD, CHANNEL))
    value = envelope["value"]
    assert value.endswith("=")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = letters[letters.index(value[-2]) ^ 1]
    assert base64.b64decode(f"{value[:-2]}{other}=") == base64.b64decode(value)
    for text in (f"{value[:-2]}{other}=", value[:-1], f"{value}\n", f" {value}", f"{value}="):
        tampered = json.dumps(envelope | {"value": text}).encode()
        assert problem_of(lambda tampered=tampered: signing.open(tampered, CHANNEL)) == "wrong_signature"


# --- time


@each_signing
def test_a_message_is_valid_within_its_window(signing: EventSigning) -> None:
    envelope = signing.seal(PAYLOAD, CHANNEL, now=NOW)
    for now in (NOW, NOW + 329, NOW - 29):
        assert signing.open(envelope, CHANNEL, now).payload == PAYLOAD
    assert problem_of(lambda: signing.open(envelope, CHANNEL, NOW + 331)) == "expired"
    assert problem_of(lambda: signing.open(envelope, CHANNEL, NOW - 31)) == "premature"


def test_window_and_clock_skew_are_settings() -> None:
    key = SigningKey.hmac("a", SECRET)
    signing = EventSigning(key, window=86_400, clock_skew=0)
    envelope = signing.seal(PAYLOAD, CHANNEL, now=NOW)
    assert signing.open(envelope, CHANNEL, NOW + 86_399)
    assert problem_of(lambda: signing.open(envelope, CHANNEL, NOW + 86_401)) == "expired"
    assert problem_of(lambda: signing.open(envelope, CHANNEL, NOW - 1)) == "premature"


@each_signing
def test_a_last_will_has_no_age(signing: EventSigning) -> None:
    envelope = signing.seal(PAYLOAD, CHANNEL, now=NOW, is_will=True)
    assert signing.open(envelope, CHANNEL, NOW + 10**8).is_will
    assert problem_of(lambda: signing.open(changed(envelope, will=None), CHANNEL, NOW)) == "wrong_signature"


# --- keys


@each_signing
def test_a_message_of_an_unknown_key_is_refused(signing: EventSigning) -> None:
    stranger = EventSigning(SigningKey.hmac("stranger", SECRET)).seal(PAYLOAD, CHANNEL)
    assert problem_of(lambda: signing.open(stranger, CHANNEL)) == "unknown_key"


@each_signing
def test_a_message_of_another_secret_is_refused(signing: EventSigning) -> None:
    for other in (
        SigningKey.hmac("press-4", SECRET[::-1]),
        SigningKey.ed25519("press-4", Ed25519PrivateKey.generate()),
    ):
        forged = EventSigning(other).seal(PAYLOAD, CHANNEL)
        assert problem_of(lambda forged=forged: signing.open(forged, CHANNEL)) == "wrong_signature"


def test_a_key_is_replaced_while_both_are_valid() -> None:
    old, new = SigningKey.hmac("press-4.1", SECRET), SigningKey.ed25519("press-4.2", PRIVATE)
    public = SigningKey.ed25519_public("press-4.2", PUBLIC)
    before, after = EventSigning(old).seal(PAYLOAD, CHANNEL), EventSigning(new).seal(PAYLOAD, CHANNEL)
    own = SigningKey.hmac("hall", SECRET)
    during = EventSigning(own, [old, public])
    assert during.keys == ("hall", "press-4.1", "press-4.2")
    assert [during.open(each, CHANNEL).key.id for each in (before, after)] == ["press-4.1", "press-4.2"]
    at_last = EventSigning(own, [public])
    assert at_last.open(after, CHANNEL).payload == PAYLOAD
    assert problem_of(lambda: at_last.open(before, CHANNEL)) == "unknown_key"


@table("private", [PRIVATE, PEM, PEM.decode(), SecretStr(PEM.decode()), RAW, SecretBytes(RAW)])
@table("public", [PUBLIC, PUBLIC_PEM, PUBLIC_PEM.decode(), PUBLIC.public_bytes_raw()])
def test_every_form_of_an_ed25519_key_is_read(private: Any, public: Any) -> None:
    envelope = EventSigning(SigningKey.ed25519("a", private)).seal(PAYLOAD, CHANNEL)
    verifying = EventSigning(SigningKey.hmac("b", SECRET), [SigningKey.ed25519_public("a", public)])
    assert verifying.open(envelope, CHANNEL).payload == PAYLOAD


def test_signatures_are_those_of_the_standards() -> None:
    assert SigningKey.hmac("a", SECRET).sign(b"x") == hmac.digest(SECRET.encode(), b"x", hashlib.sha256)
    assert SigningKey.ed25519("a", PRIVATE).sign(b"x") == PRIVATE.sign(b"x")
    assert not SigningKey.ed25519("a", PRIVATE).verify(b"x", PRIVATE.sign(b"y"))
    assert not SigningKey.hmac("a", SECRET).verify(b"x", b"")


@table(
    "make",
    [
        lambda: SigningKey.hmac("a", "too short"),
        lambda: SigningKey.hmac("a", None),  # type: ignore[arg-type]
        lambda: SigningKey.hmac("", SECRET),
        lambda: SigningKey.hmac("a b", SECRET),
        lambda: SigningKey.hmac("x" * 65, SECRET),
        lambda: SigningKey.hmac("a", SECRET, principals="alice"),
        lambda: SigningKey.hmac("a", SECRET, principals=[1]),  # type: ignore[list-item]
        lambda: SigningKey.hmac("a", SECRET, principals=map(str, range(1_001))),
        lambda: SigningKey.ed25519("a", b"x" * 31),
        lambda: SigningKey.ed25519("a", PUBLIC_PEM),
        lambda: SigningKey.ed25519("a", PUBLIC),  # type: ignore[arg-type]
        lambda: SigningKey.ed25519("a", generate_private_key(SECP256R1())),  # type: ignore[arg-type]
        lambda: SigningKey.ed25519_public("a", PEM),
        lambda: SigningKey.ed25519_public("a", 7),  # type: ignore[arg-type]
        lambda: EventSigning(SigningKey.ed25519_public("a", PUBLIC_PEM)),
        lambda: EventSigning(SigningKey.hmac("a", SECRET), [SigningKey.hmac("a", SECRET)]),
        lambda: EventSigning(SigningKey.hmac("a", SECRET), SECRET),  # type: ignore[arg-type]
        lambda: EventSigning(SECRET),  # type: ignore[arg-type]
        lambda: EventSigning(SigningKey.hmac("a", SECRET), window=0.5),
        lambda: EventSigning(SigningKey.hmac("a", SECRET), window=float("nan")),
        lambda: EventSigning(SigningKey.hmac("a", SECRET), clock_skew=-1),
        lambda: EventSigning(SigningKey.hmac("a", SECRET), max_nonces=0),
        lambda: EventNetwork(signing=SECRET),  # type: ignore[arg-type]
        lambda: SIGNINGS["hmac"].seal("text", CHANNEL),  # type: ignore[arg-type]
        lambda: SIGNINGS["hmac"].seal(b"", "\ud800"),
        lambda: SIGNINGS["hmac"].seal(b"", CHANNEL, now=float("nan")),
        lambda: SIGNINGS["hmac"].open("text", CHANNEL),  # type: ignore[arg-type]
        lambda: SIGNINGS["hmac"].open(b"", None),  # type: ignore[arg-type]
        lambda: SIGNINGS["hmac"].open(SIGNINGS["hmac"].seal(b"", CHANNEL), CHANNEL, 10**400),
        lambda: SigningKey.ed25519_public("a", PUBLIC_PEM).sign(b"x"),
    ],
)
def test_wrong_keys_and_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert SECRET not in str(caught.value)


def test_ed25519_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    monkeypatch.delattr("cryptography.hazmat.primitives.asymmetric.ed25519")
    for call in (
        lambda: SigningKey.ed25519("a", RAW),
        lambda: SigningKey.ed25519_public("a", PUBLIC_PEM),
    ):
        with pytest.raises(MissingExtraError, match=r"rx-messaging\[crypto\]"):
            call()
    assert SigningKey.hmac("a", SECRET).sign(b"x")


# --- secrets


def forms_of(secret: bytes) -> list[str]:
    return [repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode()]


SECRETS: Final = [*forms_of(SECRET.encode()), *forms_of(RAW), PEM.decode(), PEM.decode().splitlines()[1]]


def shows_secret(text: str) -> list[str]:
    return [each for each in SECRETS if each in text]


def shown_by_reporters(error: BaseException | None) -> str:
    """Return what an error reporter shows: the texts, and the variables of the frames of this project."""
    if error is None:
        return ""
    stack = traceback.TracebackException.from_exception(error, capture_locals=True).stack
    frames = "".join(f"{each.name}: {each.locals}" for each in stack if "/messaging/" in each.filename)
    return f"{error!r}{frames}{shown_by_reporters(error.__cause__)}{shown_by_reporters(error.__context__)}"


def test_no_repr_shows_a_secret() -> None:
    keys = [SigningKey.hmac("press-4", SECRET, principals=["alice"]), SigningKey.ed25519("hall-2", PEM)]
    signing = EventSigning(keys[0], keys[1:])
    seals = Seals(signing, ME)
    settings = EventNetwork(signing=signing)
    opened = signing.open(signing.seal(PAYLOAD, CHANNEL), CHANNEL)
    for each in (*keys, signing, seals, settings, opened, dataclasses.asdict(settings)):
        assert not shows_secret(f"{each!r} {each}")
    assert "press-4" in repr(settings)
    assert "hall-2" in repr(settings)


@table("pick", [lambda: SIGNINGS["hmac"], lambda: SIGNINGS["hmac"].own, lambda: SIGNINGS["ed25519"]])
def test_keys_are_neither_pickled_nor_copied_nor_changed(pick: Callable[[], Any]) -> None:
    found = pick()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(found, protocol)
    assert copy.copy(found) is found
    assert copy.deepcopy(found) is found
    for change in (lambda: setattr(found, "id", "x"), lambda: delattr(found, "id"), lambda: setattr(found, "more", 1)):
        with pytest.raises(AttributeError):
            change()


@table(
    "call",
    [
        lambda: SigningKey.hmac("a b", SECRET),
        lambda: SigningKey.hmac("a", SECRET[:15]),
        lambda: SigningKey.hmac("a", SECRET, principals=[1]),  # type: ignore[list-item]
        lambda: SigningKey.ed25519("a b", PEM),
        lambda: SigningKey.ed25519("a", PEM, principals=7),  # type: ignore[arg-type]
        lambda: SigningKey.ed25519("a", RAW + b"x"),
        lambda: SigningKey.ed25519("a", PEM[:-40]),
        lambda: SigningKey.ed25519_public("a", PEM),
        lambda: SIGNINGS["hmac"].open(b"", CHANNEL),
        lambda: SIGNINGS["ed25519"].open(changed(SIGNINGS["ed25519"].seal(b"", CHANNEL), payload="x"), CHANNEL),
        lambda: SIGNINGS["hmac"].own.sign("text"),  # type: ignore[arg-type]
        lambda: SIGNINGS["ed25519"].own.sign("text"),  # type: ignore[arg-type]
        lambda: pickle.dumps(SIGNINGS["hmac"]),
    ],
)
def test_no_traceback_shows_a_secret(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # looked at here
        text = shown_by_reporters(error)
    assert not shows_secret(text)
    assert SECRET[:15] not in text


def test_a_secret_in_the_place_of_a_name_is_not_repeated() -> None:
    with pytest.raises(ArgumentError) as caught:
        SigningKey.hmac(SECRET, SECRET)
    assert not shows_secret(repr(caught.value))


# --- replays


@each_signing
def test_a_message_is_opened_once(signing: EventSigning) -> None:
    seals = Seals(signing, ME)
    envelope = seals.seal(PAYLOAD, CHANNEL)
    assert seals.open(envelope, CHANNEL).payload == PAYLOAD
    for _ in range(3):
        assert problem_of(lambda: seals.open(envelope, CHANNEL)) == "replayed"
    assert seals.open(seals.seal(PAYLOAD, CHANNEL), CHANNEL).payload == PAYLOAD


@each_signing
def test_a_forged_message_does_not_use_up_a_nonce(signing: EventSigning) -> None:
    seals = Seals(signing, ME)
    envelope = seals.seal(PAYLOAD, CHANNEL)
    assert problem_of(lambda: seals.open(changed(envelope, payload="{}"), CHANNEL)) == "wrong_signature"
    assert seals.open(envelope, CHANNEL).payload == PAYLOAD


def test_nonces_are_kept_for_each_key() -> None:
    first, second = SigningKey.hmac("a", SECRET), SigningKey.hmac("b", SECRET)
    seals = Seals(EventSigning(first, [second], max_nonces=1), ME)
    for key in (first, second):
        sender = EventSigning(key)
        assert seals.open(sender.seal(b"1", CHANNEL), CHANNEL).key is key
        assert problem_of(lambda sender=sender: seals.open(sender.seal(b"2", CHANNEL), CHANNEL)) == "full"


def test_a_full_memory_refuses_until_messages_have_expired() -> None:
    nonces = SeenNonces(16_000, 3)
    assert [nonces.add(str(each), 1_000 * each, 3_000) for each in range(3)] == [None] * 3
    assert nonces.add("3", 3_000, 3_000) == "full"
    assert nonces.add("1", 1_000, 3_000) == "replayed"
    assert nonces.add("3", 3_000, 17_000) is None  # the first one has expired
    assert len(nonces) == 3
    assert nonces.add("0", 0, 3_000) == "expired"  # the clock was set back: it is forgotten, and refused all the same


@given(
    steps=st.lists(st.tuples(st.integers(0, 15), st.integers(-400, 400), st.integers(-200, 1_000)), max_size=200),
    limit=st.integers(1, 12),
)
def test_no_nonce_is_accepted_twice_whatever_the_clock_does(steps: list[tuple[int, int, int]], limit: int) -> None:
    """The time of a message never changes: it is signed. The clock may go forth and back."""
    nonces, lifetime, now = SeenNonces(320, limit), 320, 10_000
    times: dict[int, int] = {}
    accepted: set[int] = set()
    for number, age, passed in steps:
        now = max(0, now + passed)
        at = times.setdefault(number, max(0, now - age))
        if not now - lifetime <= at <= now + 40:
            continue  # the signature's time refuses it
        if nonces.add(str(number), at, now) is None:
            assert number not in accepted
            accepted.add(number)
        assert len(nonces) <= limit


# --- members


def announcement(member: str, kind: str = "heartbeat", **fields: Any) -> bytes:
    return dump_announcement(Announcement(kind=kind, member=member, **fields))


def event(sender: str | None = None, principal: str | None = None) -> bytes:
    return encode(WireEvent("orders/placed", {"id": 3}, sender=sender, principal=principal))


def two(**principals: Any) -> tuple[EventSigning, EventSigning, Seals]:
    """Return the signing of two members, and the seals of a third one that knows both keys."""
    first = SigningKey.hmac("a", SECRET, principals=principals.get("a"))
    second = SigningKey.ed25519("b", PRIVATE, principals=principals.get("b"))
    return (
        EventSigning(first),
        EventSigning(second),
        Seals(EventSigning(SigningKey.hmac("c", SECRET), [first, second]), ME),
    )


def test_a_member_belongs_to_the_key_of_its_first_message() -> None:
    first, second, seals = two()
    assert seals.announcement(first.seal(announcement(OTHER), "all"), "all").member == OTHER
    assert seals.event(first.seal(event(OTHER), CHANNEL), CHANNEL, "orders/placed").sender == OTHER
    assert problem_of(lambda: seals.announcement(second.seal(announcement(OTHER), "all"), "all")) == "forged_member"
    forged = second.seal(event(OTHER), CHANNEL)
    assert problem_of(lambda: seals.event(forged, CHANNEL, "orders/placed")) == "forged_member"
    assert seals.event(second.seal(event(str(uuid4())), CHANNEL), CHANNEL, "orders/placed")
    assert seals.event(second.seal(event(), CHANNEL), CHANNEL, "orders/placed").sender is None


def test_the_own_member_belongs_to_the_own_key() -> None:
    first, _, seals = two()
    forged = first.seal(announcement(ME, "leave"), "all")
    assert problem_of(lambda: seals.announcement(forged, "all")) == "forged_member"
    assert seals.announcement(seals.seal(announcement(ME), "all"), "all").member == ME


def test_one_key_does_not_make_the_members_of_another_one_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals_module, "MAX_MEMBERS", 5)
    first, second, seals = two()
    seals.announcement(first.seal(announcement(OTHER), "all"), "all")
    for _ in range(20):
        seals.announcement(second.seal(announcement(str(uuid4())), "all"), "all")
    forged = second.seal(announcement(OTHER), "all")
    assert problem_of(lambda: seals.announcement(forged, "all")) == "forged_member"


def test_a_last_will_tells_the_loss_of_a_member_once() -> None:
    first, second, seals = two()
    will = first.seal(announcement(OTHER, "leave", is_lost=True), "all", now=NOW - 10**7, is_will=True)
    seals.announcement(first.seal(announcement(OTHER), "all"), "all")
    assert seals.announcement(will, "all").is_lost
    assert problem_of(lambda: seals.announcement(will, "all")) == "replayed"
    forged = second.seal(announcement(OTHER, "leave", is_lost=True), "all", is_will=True)
    assert problem_of(lambda: seals.announcement(forged, "all")) == "forged_member"


def test_a_last_will_is_no_other_message() -> None:
    first, _, seals = two()
    update = first.seal(announcement(OTHER, "update"), "all", is_will=True)
    assert problem_of(lambda: seals.announcement(update, "all")) == "malformed"
    left = first.seal(announcement(OTHER, "leave"), "all", is_will=True)
    assert problem_of(lambda: seals.announcement(left, "all")) == "malformed"
    late = first.seal(event(OTHER), CHANNEL, is_will=True)
    assert problem_of(lambda: seals.event(late, CHANNEL, "orders/placed")) == "malformed"


def test_a_signed_announcement_is_bounded() -> None:
    _, _, seals = two()
    with pytest.raises(DecodeError, match="at most"):
        seals.announcement(b" " * 3_000_000, "all")


# --- principals


@table(
    "allowed, claimed, found",
    [
        (None, None, None),
        (None, "alice", "alice"),
        (["alice"], None, "alice"),
        (["alice"], "alice", "alice"),
        (["alice", "bob"], "bob", "bob"),
        (["alice", "bob"], None, None),
        ([], None, None),
    ],
)
def test_an_event_has_a_principal_of_its_key(allowed: Any, claimed: str | None, found: str | None) -> None:
    first, _, seals = two(a=allowed)
    sealed = first.seal(event(OTHER, claimed), CHANNEL)
    assert seals.event(sealed, CHANNEL, "orders/placed").principal == found


@table("allowed", [[], ["alice"], ["alice", "bob"]])
def test_an_event_with_another_principal_is_refused(allowed: list[str]) -> None:
    first, _, seals = two(a=allowed)
    sealed = first.seal(event(OTHER, "mallory"), CHANNEL)
    assert problem_of(lambda: seals.event(sealed, CHANNEL, "orders/placed")) == "wrong_principal"
    own = Seals(EventSigning(SigningKey.hmac("a", SECRET, principals=allowed)), ME)
    with pytest.raises(PermissionDeniedError, match="mallory"):
        own.check_own("mallory", "orders/placed")
    own.check_own(None, "orders/placed")
    for each in allowed:
        own.check_own(each, "orders/placed")


def test_an_error_says_what_and_where_and_is_pickled() -> None:
    error = SignatureError("unknown_key", "it is signed with an unknown key, 'x'", CHANNEL)
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == "a message on 'topics/orders/placed': it is signed with an unknown key, 'x'"
    assert (found.problem, found.channel, found.key) == ("unknown_key", CHANNEL, None)


def test_refusals_show_no_secret_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = RefusalLog("the admin")
    seals = Seals(SIGNINGS["hmac"], ME)
    envelope = seals.seal(PAYLOAD, CHANNEL)
    seals.open(envelope, CHANNEL)
    for payload in (b"{}", envelope):
        try:
            seals.open(payload, CHANNEL)
        except SignatureError as error:
            log.log("an event", error)
    assert (log.refused, log.replayed) == (1, 1)
    levels = {each.levelno for each in caplog.records if each.name == "messaging.dispatch.eventnetwork.intake"}
    assert levels == {logging.ERROR, logging.DEBUG}
    assert not shows_secret(caplog.text)
