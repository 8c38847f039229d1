r"""Signed messages: an envelope that proves which key sent an event or announcement, to which channel, and when.

With ``EventNetwork(signing=...)`` a member signs everything it sends, and refuses messages without a signature of a key
that it knows. All members of a network either sign or do not. The payload is signed, and not encrypted.

**Envelope.** A signed message is a JSON object in UTF-8::

    {"signed": 1, "key": "press-4", "algorithm": "HMAC-SHA256", "channel": "topics/orders/placed",
     "time": 1760000000000000, "nonce": "9f86d081884c7d659a2feaa0c55ad015",
     "payload": "{\"event\":1,\"data\":{\"id\":3}}", "value": "kZ0o…="}

==============  ======================================================================================================
field           meaning
==============  ======================================================================================================
``signed``      1, the version of the envelope
``key``         name of the key: 1 to 64 letters, digits and ``. _ : @ -``
``algorithm``   ``HMAC-SHA256`` or ``Ed25519``; it must be that of the key
``channel``     the channel that the message is published to
``time``        integer: when it was signed, in microseconds since 1970, UTC
``nonce``       16 to 64 characters of ASCII, random, different in every message: a message is accepted once
``payload``     the event or announcement as text, or in base64
``encoding``    ``"base64"`` if the payload is in base64, as one in CBOR must be; missing otherwise
``will``        ``true`` if the message is a last will; missing otherwise
``value``       the signature in base64
==============  ======================================================================================================

Other fields are refused. Base64 is that of RFC 4648 section 4, with padding.

**Signature.** The signed bytes are eight parts, each after its length in bytes as an unsigned integer of 32 bits, most
significant byte first: the text ``rx-messaging event network 1``, ``algorithm``, ``key``, ``channel``, ``time`` as
decimal digits, ``nonce``, the text ``will`` or nothing, and the payload (from base64, if it is in base64). Texts are in
UTF-8. A program without this library signs so::

    parts = [b"rx-messaging event network 1", b"HMAC-SHA256", key, channel, b"%d" % time, nonce, b"", payload]
    signed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    value = base64.b64encode(hmac.digest(secret, signed, "sha256"))

**Time.** A message is refused if it is older than ``window`` seconds, or from the future, by more than ``clock_skew``
seconds each. Members keep their clocks synchronized. A queue that keeps the events of an absent member (``queue``)
needs a window as long as the absence: events that waited longer are refused.

**Replay.** A message that arrived before is refused: see :mod:`messaging.dispatch.eventnetwork.seals`. Copies that a
broker delivers twice look the same: they are counted in ``NodeDTO.replayed`` and logged at level ``DEBUG``. After a
restart a member does not know the messages it has seen: within the window a replay of them is accepted once. The same
holds on another broker: use other keys, or another prefix, for each network.

**Last will.** It is signed when it is given to the broker, and published long after, and again for each loss of the
connection. It has the field ``will``, and no age. A receiver takes it as the announcement that a member is lost, and as
nothing else, and once for each member: when the same member is lost again, its missing heartbeats show it.

**Keys.** Each message has the name of its key, so that several keys are valid at a time. To replace a key: tell all
members the new one, start the senders with it, remove the old one.

**Principals.** A key may be limited to some principals; see
:class:`~messaging.dispatch.eventnetwork.signing_keys.SigningKey`. An event with another principal is refused. If the
key has exactly one, an event without a principal has this one. With a key for any principal, and without signing, a
principal is merely claimed: then the access control of the broker is the only one.

**Members.** The first message of a member binds its id to the key: messages for this member with another key are
refused. Without signing every program that may publish to the channels can speak for every member.
"""

from __future__ import annotations

import binascii
import math
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

from pydantic_core import from_json, to_json

from messaging.dispatch.eventdata.values import is_unicode
from messaging.dispatch.eventnetwork.signing_keys import SigningKey
from messaging.errors import ArgumentError, SignatureError
from messaging.errors.checks import check_instance
from messaging.errors.text import tolerant
from messaging.execution import clock

#: version of the envelope
VERSION: Final = 1
#: default of ``window`` and ``clock_skew``, seconds
WINDOW: Final = 300.0
CLOCK_SKEW: Final = 30.0
#: default of ``max_nonces``
MAX_NONCES: Final = 1_000_000
#: bounds of ``window`` and ``clock_skew``, seconds
_MAX_WINDOW: Final = 366 * 86_400.0
#: characters of a nonce
_NONCE: Final = range(16, 65)
_NONCE_BYTES: Final = 16
_MICROSECONDS: Final = 1_000_000
_LAST: Final = 2**63 - 1
_DOMAIN: Final = b"rx-messaging event network 1"
_WILL: Final = b"will"
_BASE64: Final = "base64"
_TEXTS: Final = ("key", "algorithm", "channel", "nonce", "payload", "value")
_FIELDS: Final = frozenset({"signed", "time", "encoding", "will", *_TEXTS})


class Opened(NamedTuple):
    """A message whose signature is right.

    Attributes:
        payload: the event or announcement.
        key: the key that signed it.
        time: when it was signed, microseconds since 1970.
        nonce: different in every message.
        is_will: whether it is a last will, which has no age.
    """

    payload: bytes
    key: SigningKey
    time: int
    nonce: str
    is_will: bool


class EventSigning:
    """The key of a member, and those of the others. Immutable; thread safe.

    It holds secrets: its ``repr`` has the names of the keys only, and it cannot be pickled.

    Args:
        own: the key that signs. Messages of others that are signed with it are accepted, too: with HMAC-SHA256 all
            members may share one key.
        others: keys of others, and earlier keys that are still valid.
        window: seconds for which a message is valid after it was signed.
        clock_skew: seconds by which clocks may differ.
        max_nonces: number of messages of one key that are remembered while they are valid; each takes about 140 bytes.
            Further messages of this key are refused, since they might be replays. It must be more than the messages
            per second of a key times ``window`` plus ``clock_skew``, and a tenth more.

    Raises:
        ArgumentError: an argument is invalid, or two keys have the same name.

    Example::

        signing = EventSigning(
            SigningKey.hmac("press-4", secret, principals=["press-4"]),
            [SigningKey.ed25519_public("hall-2", public_key, principals=["hall-2"])],
        )
        admin = DistributedEventAdmin(instance=m, network=EventNetwork(signing=signing))
    """

    __slots__ = ("_keys", "_latest", "_oldest", "clock_skew", "max_nonces", "own", "window")

    own: SigningKey
    window: float
    clock_skew: float
    max_nonces: int
    _keys: dict[str, SigningKey]
    _oldest: int
    _latest: int

    def __init__(
        self,
        own: SigningKey,
        others: Iterable[SigningKey] = (),
        *,
        window: float = WINDOW,
        clock_skew: float = CLOCK_SKEW,
        max_nonces: int = MAX_NONCES,
    ) -> None:
        check_instance("own", own, SigningKey)
        if not own.can_sign:
            raise ArgumentError(f"own key {own.id!r} only verifies: give the private key")
        if not isinstance(others, Iterable):
            raise ArgumentError(f"others must be keys, not {type(others).__name__}")
        keys = {own.id: own}
        for each in others:
            check_instance("a key of others", each, SigningKey)
            if each.id in keys:
                raise ArgumentError(f"two keys have the name {each.id!r}: a key that is replaced needs a new name")
            keys[each.id] = each
        if type(max_nonces) is not int or max_nonces < 1:
            raise ArgumentError(f"max_nonces must be an int of at least 1, not {type(max_nonces).__name__}")
        put = object.__setattr__
        put(self, "own", own)
        put(self, "window", _seconds("window", window, 1.0))
        put(self, "clock_skew", _seconds("clock_skew", clock_skew, 0.0))
        put(self, "max_nonces", max_nonces)
        put(self, "_keys", keys)
        put(self, "_oldest", int((window + clock_skew) * _MICROSECONDS))
        put(self, "_latest", int(clock_skew * _MICROSECONDS))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all keys that are accepted, the own one first."""
        return tuple(self._keys)

    def seal(self, payload: bytes, channel: str, *, now: float | None = None, is_will: bool = False) -> bytes:
        """Return ``payload`` in a signed envelope.

        Args:
            payload: an event or announcement.
            channel: the channel that it is published to.
            now: seconds since 1970; by default the time of the system.
            is_will: whether it is a last will, which has no age.

        Raises:
            ArgumentError: an argument is invalid.
        """
        own = self.own
        _check(payload, channel)
        at = clock.wall_ns() // 1_000 if now is None else _microseconds(now)
        nonce = secrets.token_hex(_NONCE_BYTES)
        found: dict[str, Any] = {
            "signed": VERSION,
            "key": own.id,
            "algorithm": own.algorithm,
            "channel": channel,
            "time": at,
            "nonce": nonce,
        }
        if is_will:
            found["will"] = True
        try:
            found["payload"] = payload.decode()
        except UnicodeDecodeError:
            found["payload"] = b64encode(payload).decode()
            found["encoding"] = _BASE64
        value = own.sign(signed_bytes(own.algorithm, own.id, channel, at, nonce, payload, is_will=is_will))
        found["value"] = b64encode(value).decode()
        return to_json(found)

    def open(self, payload: bytes, channel: str, now: float | None = None) -> Opened:
        """Return the payload of an envelope after its channel, key, signature and time were checked.

        It does not know the messages that arrived before: ``Seals`` refuses replays.

        Args:
            payload: the message that arrived.
            channel: the channel that it arrived on.
            now: seconds since 1970; by default the time of the system.

        Raises:
            SignatureError: the message is unsigned, or has an invalid signature.
            ArgumentError: an argument is invalid.
        """
        _check(payload, channel)
        found = _fields(payload, channel)
        key_id, algorithm, at, nonce = found["key"], found["algorithm"], found["time"], found["nonce"]
        key = self._keys.get(key_id)
        if key is None:
            raise SignatureError("unknown_key", f"it is signed with an unknown key, {key_id!r:.80}", channel)
        if algorithm != key.algorithm:
            raise _wrong(channel, key_id, f"key {key_id!r} is for {key.algorithm}, not for {algorithm!r:.40}")
        if found["channel"] != channel:
            raise SignatureError(
                "wrong_channel", f"it is signed for the channel {found['channel']!r:.200}", channel, key_id
            )
        is_will = found.get("will") is True
        content = _content(found, channel, key_id)
        value = _unbase64(found["value"])
        if value is None or not key.verify(
            signed_bytes(algorithm, key_id, channel, at, nonce, content, is_will=is_will), value
        ):
            raise _wrong(channel, key_id, f"its signature is not that of key {key_id!r}")
        age = (clock.wall_ns() // 1_000 if now is None else _microseconds(now)) - at
        if age > self._oldest and not is_will:
            raise SignatureError(
                "expired",
                f"it was signed {age / _MICROSECONDS:.1f} s ago; at most {self.window:g} s and {self.clock_skew:g} s "
                f"of clock skew are allowed",
                channel,
                key_id,
            )
        if -age > self._latest:
            raise SignatureError(
                "premature",
                f"it was signed {-age / _MICROSECONDS:.1f} s in the future; {self.clock_skew:g} s of clock skew are "
                "allowed: synchronize the clocks",
                channel,
                key_id,
            )
        return Opened(content, key, at, nonce, is_will)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"EventSigning cannot be changed: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"EventSigning cannot be changed: {name}")

    @tolerant
    def __repr__(self) -> str:
        return f"EventSigning({self.own.id!r}, others={[*self.keys[1:]]!r}, window={self.window:g})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("EventSigning cannot be pickled: it holds secrets")


def signed_bytes(
    algorithm: str, key_id: str, channel: str, at: int, nonce: str, payload: bytes, *, is_will: bool = False
) -> bytes:
    """Return the bytes that a signature covers; see the module. ``at`` is in microseconds since 1970."""
    found = bytearray()
    for each in (
        _DOMAIN, algorithm.encode(), key_id.encode(), channel.encode(), b"%d" % at, nonce.encode(),
        _WILL if is_will else b"", payload,
    ):  # fmt: skip
        found += len(each).to_bytes(4, "big")
        found += each
    return bytes(found)


def _check(payload: Any, channel: Any) -> None:
    if not isinstance(payload, bytes):
        raise ArgumentError(f"payload must be bytes, not {type(payload).__name__}")
    if not isinstance(channel, str) or not is_unicode(channel):
        raise ArgumentError(f"channel must be text without lone surrogates, not {type(channel).__name__}")


def _microseconds(now: Any) -> int:
    """Return a time in microseconds since 1970; it is given in seconds."""
    is_number = isinstance(now, (int, float)) and not isinstance(now, bool)
    if not is_number or not 0 <= now < _LAST // _MICROSECONDS:
        raise ArgumentError(f"now must be seconds since 1970, or None for the time of the system, not {now!r:.80}")
    return int(now * _MICROSECONDS)


def _seconds(name: str, value: Any, least: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= _MAX_WINDOW or not math.isfinite(value):
        raise ArgumentError(f"{name} must be seconds, from {least:g} to {_MAX_WINDOW:g}, not {value!r:.80}")
    return float(value)


def _fields(payload: bytes, channel: str) -> dict[str, Any]:
    """Return the fields of an envelope, of the right types; all texts but channel and payload are ASCII."""
    try:
        found = from_json(payload, allow_inf_nan=False)
    except ValueError:
        found = None
    if type(found) is not dict or "signed" not in found:
        raise SignatureError("unsigned", "it is not signed: every member of this network must sign", channel)
    if type(found["signed"]) is not int or found["signed"] != VERSION:
        raise _malformed("signed", f"must be {VERSION}", channel)
    if not found.keys() <= _FIELDS:
        raise _malformed(min(map(str, found.keys() - _FIELDS)), "is unknown", channel)
    for each in _TEXTS:
        text = found.get(each)
        if type(text) is not str or not (text.isascii() or each in ("channel", "payload")):
            raise _malformed(each, "must be text", channel)
    if type(found.get("time")) is not int or not 0 <= found["time"] <= _LAST:
        raise _malformed("time", "must be an integer: microseconds since 1970", channel)
    if len(found["nonce"]) not in _NONCE:
        raise _malformed("nonce", "must have 16 to 64 characters of ASCII", channel)
    if "encoding" in found and found["encoding"] != _BASE64:
        raise _malformed("encoding", "must be 'base64' or missing", channel)
    if "will" in found and found["will"] is not True:
        raise _malformed("will", "must be true or missing", channel)
    return found


def _content(found: dict[str, Any], channel: str, key_id: str) -> bytes:
    text: str = found["payload"]
    if "encoding" not in found:
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise _malformed("payload", "has no form in UTF-8", channel) from None
    content = _unbase64(text)
    if content is None:
        raise SignatureError("malformed", "its 'payload' is no base64", channel, key_id)
    return content


def _unbase64(text: str) -> bytes | None:
    """Return the bytes of a base64 text; ``None`` if it is not the one text that stands for them."""
    try:
        found = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return found if b64encode(found) == text.encode() else None


def _malformed(field: str, problem: str, channel: str) -> SignatureError:
    return SignatureError("malformed", f"its field {field!r:.80} {problem}", channel)


def _wrong(channel: str, key_id: str, text: str) -> SignatureError:
    return SignatureError("wrong_signature", text, channel, key_id)
