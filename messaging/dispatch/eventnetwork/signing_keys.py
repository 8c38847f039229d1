"""The keys that sign the messages of an event network: HMAC-SHA256 and Ed25519.

==================  ================================================================================================
``HMAC-SHA256``     one secret signs and verifies (RFC 2104): every program that verifies with it can also sign with it
``Ed25519``         a private key signs, its public key verifies (RFC 8032). Needs the extra ``crypto``
==================  ================================================================================================

A key never shows its secret: not in its ``repr``, not in an error, not in the variables of a traceback. It cannot be
pickled. Keys are immutable and thread safe.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import SecretBytes, SecretStr

from messaging.errors import ArgumentError, MissingExtraError
from messaging.errors.text import exact, tolerant

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HMAC: Final = "HMAC-SHA256"
ED25519: Final = "Ed25519"
#: bytes of the secret of an HMAC key
MIN_SECRET: Final = 16
#: bytes of a raw Ed25519 key, private or public
_RAW_KEY: Final = 32
#: principals of a key
_MAX_PRINCIPALS: Final = 1_000
_KEY_ID: Final = re.compile(r"[A-Za-z0-9._:@-]{1,64}")


class SigningKey:
    """A key that signs, or one that only verifies. Immutable; thread safe.

    The functions :meth:`hmac`, :meth:`ed25519` and :meth:`ed25519_public` make keys.

    Attributes:
        id: name of the key, which every signed message has: 1 to 64 letters, digits and ``. _ : @ -``.
        algorithm: ``HMAC-SHA256`` or ``Ed25519``.
        principals: the principals that its owner may speak for; ``None`` for any.
        can_sign: whether it signs; the public half of an Ed25519 key only verifies.
        verify: ``verify(data, value)`` returns whether ``value`` is the signature of ``data``; the time it takes does
            not depend on ``value``.
    """

    __slots__ = ("_sign", "algorithm", "can_sign", "id", "principals", "verify")

    id: str
    algorithm: str
    principals: frozenset[str] | None
    can_sign: bool
    _sign: Callable[[bytes], bytes] | None
    verify: Callable[[bytes, bytes], bool]

    def __init__(
        self,
        key_id: str,
        algorithm: str,
        principals: Iterable[str] | None,
        sign: Callable[[bytes], bytes] | None,
        verify: Callable[[bytes, bytes], bool],
    ) -> None:
        put = object.__setattr__
        put(self, "id", check_key_id(key_id))
        put(self, "algorithm", algorithm)
        put(self, "principals", _principals(key_id, principals))
        put(self, "can_sign", sign is not None)
        put(self, "_sign", sign)
        put(self, "verify", verify)

    @classmethod
    def hmac(
        cls,
        key_id: str,
        secret: str | bytes | SecretStr | SecretBytes,
        *,
        principals: Iterable[str] | None = None,
    ) -> Self:
        """Return a key that signs and verifies with HMAC-SHA256.

        Args:
            key_id: name of the key.
            secret: at least 16 bytes, better 32 random ones; text counts as its bytes in UTF-8.
            principals: the principals that the owners of the secret may speak for; ``None`` for any.

        Raises:
            ArgumentError: an argument is invalid. The text never repeats the secret.
        """
        wrapped = _wrapped(secret)
        del secret  # from here on no variable of this frame shows it
        check_key_id(key_id)
        if wrapped is None:
            raise ArgumentError(f"the secret of key {key_id!r} must be str, bytes, SecretStr or SecretBytes")
        size = len(wrapped.get_secret_value())
        if size < MIN_SECRET:
            raise ArgumentError(
                f"the secret of key {key_id!r} has {size} bytes: at least {MIN_SECRET} are required, such as those of "
                "secrets.token_bytes(32)"
            )
        # copies of this object sign: it is never updated itself, so threads share it
        state = hmac.new(wrapped.get_secret_value(), digestmod="sha256")

        def sign(data: bytes) -> bytes:
            mac = state.copy()
            mac.update(data)
            return mac.digest()

        return cls(key_id, HMAC, principals, sign, lambda data, value: hmac.compare_digest(sign(data), value))

    @classmethod
    def ed25519(
        cls,
        key_id: str,
        private_key: Ed25519PrivateKey | str | bytes | SecretStr | SecretBytes,
        *,
        principals: Iterable[str] | None = None,
    ) -> Self:
        """Return a key that signs and verifies with Ed25519.

        Args:
            key_id: name of the key.
            private_key: an object of ``cryptography``, an unencrypted PEM text (PKCS #8), or the 32 raw bytes.
            principals: the principals that its owner may speak for; ``None`` for any.

        Raises:
            MissingExtraError: the extra ``crypto`` is not installed.
            ArgumentError: an argument is invalid. The text never repeats the key.
        """
        wrapped = _wrapped(private_key)
        given = private_key if wrapped is None else None
        del private_key  # from here on no variable of this frame shows it
        check_key_id(key_id)
        ed25519, serialization = _library()
        if isinstance(given, ed25519.Ed25519PrivateKey):
            found = given
        else:
            found = _loaded(
                wrapped, ed25519.Ed25519PrivateKey.from_private_bytes,
                lambda pem: serialization.load_pem_private_key(pem, password=None),
            )  # fmt: skip
        if not isinstance(found, ed25519.Ed25519PrivateKey):
            raise ArgumentError(
                f"the private key of {key_id!r} must be an Ed25519PrivateKey, an unencrypted PEM text of one, or its "
                f"{_RAW_KEY} raw bytes"
            )
        return cls(key_id, ED25519, principals, found.sign, _verifier(found.public_key()))

    @classmethod
    def ed25519_public(
        cls,
        key_id: str,
        public_key: Ed25519PublicKey | str | bytes,
        *,
        principals: Iterable[str] | None = None,
    ) -> Self:
        """Return a key that verifies with Ed25519, and cannot sign.

        Args:
            key_id: name of the key.
            public_key: an object of ``cryptography``, a PEM text (SubjectPublicKeyInfo), or the 32 raw bytes.
            principals: the principals that its owner may speak for; ``None`` for any.

        Raises:
            MissingExtraError: the extra ``crypto`` is not installed.
            ArgumentError: an argument is invalid.
        """
        check_key_id(key_id)
        wrapped = _wrapped(public_key)  # it may be a private key by mistake
        given = public_key if wrapped is None else None
        del public_key
        ed25519, serialization = _library()
        if isinstance(given, ed25519.Ed25519PublicKey):
            found = given
        else:
            found = _loaded(wrapped, ed25519.Ed25519PublicKey.from_public_bytes, serialization.load_pem_public_key)
        if not isinstance(found, ed25519.Ed25519PublicKey):
            raise ArgumentError(
                f"the public key of {key_id!r} must be an Ed25519PublicKey, a PEM text of one, or its {_RAW_KEY} raw "
                "bytes"
            )
        return cls(key_id, ED25519, principals, None, _verifier(found))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``: 32 bytes for HMAC-SHA256, 64 for Ed25519.

        Raises:
            ArgumentError: the key only verifies.
        """
        if self._sign is None:
            raise ArgumentError(f"key {self.id!r} only verifies: it is a public key")
        return self._sign(data)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a SigningKey cannot be changed: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a SigningKey cannot be changed: {name}")

    @tolerant
    def __repr__(self) -> str:
        return f"<SigningKey {self.id!r}, {self.algorithm}{'' if self.can_sign else ', verifies only'}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a SigningKey cannot be pickled: it holds a secret")


def check_key_id(value: object) -> str:
    """Return the name of a key.

    Raises:
        ArgumentError: it is no name of a key. The text never repeats it: it may be a secret in the wrong place.
    """
    if not isinstance(value, str) or not _KEY_ID.fullmatch(value):
        raise ArgumentError("the name of a key must have 1 to 64 letters, digits and . _ : @ - of ASCII")
    return exact(value)


def _principals(key_id: str, value: Any) -> frozenset[str] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ArgumentError(f"the principals of key {key_id!r} must be several str, or None for any")
    found: list[str] = []
    for each in value:
        if not isinstance(each, str) or len(found) >= _MAX_PRINCIPALS:
            raise ArgumentError(f"the principals of key {key_id!r} must be at most {_MAX_PRINCIPALS} str")
        found.append(exact(each))
    return frozenset(found)


def _wrapped(value: Any) -> SecretBytes | None:
    """Return a secret in a wrapper that does not show it; ``None`` if it is neither text nor bytes."""
    if isinstance(value, SecretBytes):
        return value
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        value = exact(value).encode("utf-8", "surrogatepass")
    return SecretBytes(bytes(value)) if isinstance(value, (bytes, bytearray)) else None


def _library() -> tuple[Any, Any]:
    """Return the modules of ``cryptography`` that are used here."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError("crypto", "a key with algorithm Ed25519") from error
    return ed25519, serialization


def _loaded(secret: SecretBytes | None, raw: Callable[[bytes], Any], pem: Callable[[bytes], Any]) -> Any:
    """Return a key of the library; ``None`` if there is none. The errors of the library may show the key."""
    if secret is None:
        return None
    try:
        load = raw if len(secret.get_secret_value()) == _RAW_KEY else pem
        return load(secret.get_secret_value())
    except Exception:  # noqa: BLE001  # the library raises ValueError, TypeError and errors of its own
        return None


def _verifier(key: Ed25519PublicKey) -> Callable[[bytes, bytes], bool]:
    from cryptography.exceptions import InvalidSignature

    def verify(data: bytes, value: bytes) -> bool:
        try:
            key.verify(value, data)
        except InvalidSignature:
            return False
        return True

    return verify
