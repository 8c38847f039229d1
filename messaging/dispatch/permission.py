"""Permissions to publish to topics and to subscribe to them (157.8, 157.9.2; RFC 97 5.4, 6.7).

OSGi checks the code on the stack. Here publishers and handler registrations carry the name of a *principal*, and a
:class:`TopicPolicy` grants permissions to principals. Without a policy all principals may do everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from messaging.dispatch.topics import TYPED_EVENTS, AbstractTopicFilter, TopicGrammar
from messaging.errors import ArgumentError, PermissionDeniedError
from messaging.errors.checks import check_instance, check_mapping, plain_function
from messaging.errors.text import SafeLog, exact, tolerant

logger = SafeLog(__name__)

#: name of a publisher or subscriber; ``None`` for callers that give no name
Principal: TypeAlias = str | None

_ACTIONS: Final = ("publish", "subscribe")


class TopicPermission:
    """The authority to publish to topics, to subscribe to them, or both; neither implies the other. Immutable.

    Args:
        name: a topic, or a topic filter; ``a/b/*`` stands for ``a/b/c``, but not for ``a/b``.
        actions: ``publish``, ``subscribe`` or both with a comma; case, order and surrounding blanks are ignored.
        grammar: of ``name``; permissions of different grammars never imply each other.

    Raises:
        InvalidTopicError, NullEventError: ``name`` is no topic filter.
        ArgumentError: ``actions`` names any other action, or ``grammar`` is no grammar.
    """

    PUBLISH: Final = "publish"
    SUBSCRIBE: Final = "subscribe"

    __slots__ = ("_actions", "_filter", "_grammar")

    def __init__(self, name: str, actions: str, grammar: TopicGrammar[Any] = TYPED_EVENTS) -> None:
        if grammar is not TYPED_EVENTS:  # a permission is made for every check of a policy
            check_instance("grammar", grammar, TopicGrammar)
        self._filter: AbstractTopicFilter = grammar.parse(name)
        self._actions = _parse_actions(actions)
        self._grammar = grammar

    @property
    def name(self) -> str:
        """The topic, or topic filter."""
        return self._filter.text

    @property
    def actions(self) -> str:
        """The actions as ``publish``, ``subscribe`` or ``publish,subscribe`` (157.9.2.5)."""
        return ",".join(action for action in _ACTIONS if action in self._actions)

    @property
    def grammar(self) -> TopicGrammar[Any]:
        """The grammar of its name."""
        return self._grammar

    def implies(self, other: object) -> bool:
        """Return whether this permission includes the ``other`` one (157.9.2.7)."""
        return isinstance(other, TopicPermission) and self._actions >= other._actions and self._covers(other)

    def _covers(self, other: TopicPermission) -> bool:
        """Return whether this permission includes all topics of the ``other`` one."""
        return self._grammar is other._grammar and self._filter.implies(other._filter)

    def new_permission_collection(self) -> TopicPermissionCollection:
        """Return an empty collection for permissions like this one (157.9.2.8)."""
        return TopicPermissionCollection()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TopicPermission)
            and self._grammar is other._grammar
            and self._filter == other._filter
            and self._actions == other._actions
        )

    def __hash__(self) -> int:
        return hash((self._filter, self._actions))

    @tolerant
    def __repr__(self) -> str:
        grammar = "" if self._grammar is TYPED_EVENTS else f", grammar={self._grammar}"
        return f"TopicPermission({self.name!r}, {self.actions!r}{grammar})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TopicPermission, (self.name, self.actions, self._grammar)


def _parse_actions(text: Any) -> frozenset[str]:
    if not isinstance(text, str):
        raise ArgumentError(f"actions must be a str, not {type(text).__name__}")
    found = [each.strip().lower() for each in text.split(",")]
    for each in found:
        if each not in _ACTIONS:
            raise ArgumentError(f"actions must be 'publish', 'subscribe' or 'publish,subscribe', not {text!r:.80}")
    return frozenset(found)


class TopicPermissionCollection:
    """Several permissions, which may imply another one together. Thread safe."""

    def __init__(self, permissions: Iterable[TopicPermission] = ()) -> None:
        self._permissions: dict[TopicPermission, None] = {}  # only grows, and is copied before it is iterated
        for permission in permissions:
            self.add(permission)

    def add(self, permission: TopicPermission) -> None:
        """Add a permission; adding it again does nothing.

        Raises:
            ArgumentError: ``permission`` is no TopicPermission.
        """
        check_instance("permission", permission, TopicPermission)
        self._permissions[permission] = None

    def implies(self, permission: object) -> bool:
        """Return whether these permissions imply ``permission``; its actions may come from several of them."""
        if not isinstance(permission, TopicPermission):
            return False
        missing = set(permission._actions)
        for each in self:
            if each._actions & missing and each._covers(permission):
                missing -= each._actions
                if not missing:
                    return True
        return False

    def __iter__(self) -> Iterator[TopicPermission]:
        return iter([*self._permissions])

    def __len__(self) -> int:
        return len(self._permissions)


def check_principal(principal: Any, name: str = "principal") -> Principal:
    """Return the name of a principal as an exact ``str``, or ``None``. Raise ``ArgumentError`` for any other type."""
    if principal is not None and not isinstance(principal, str):
        raise ArgumentError(f"{name} must be a str or None, not {type(principal).__name__}")
    return None if principal is None else exact(principal)


def denied(principal: Principal, actions: str, topic: str, *, by: str = "") -> PermissionDeniedError:
    """Return the error for a principal without the permission; ``by`` is the service that refuses."""
    subject = "a caller without a principal" if principal is None else f"the principal {principal!r}"
    return PermissionDeniedError(f"{by}{': ' if by else ''}{subject} may not {actions} {topic!r}")


class TopicPolicy:
    """The permissions of principals: a principal may do only what it was granted. Thread safe.

    Args:
        grants: permissions by principal; those of ``None`` are for callers that give no name.
        grammar: of all permissions. An event service accepts a policy of its own grammar only.

    Raises:
        ArgumentError: ``grants`` are no permissions by principal, ``grammar`` is no grammar, or a permission has
            another grammar.

    Example:
        ``TopicPolicy({"meter": [TopicPermission("meters/*", "publish")]})``
    """

    def __init__(
        self,
        grants: Mapping[Principal, Iterable[TopicPermission]] | None = None,
        grammar: TopicGrammar[Any] = TYPED_EVENTS,
    ) -> None:
        check_instance("grammar", grammar, TopicGrammar)
        self.grammar = grammar
        self._lock = threading.Lock()  # guards changes of the following two, which are replaced as a whole
        self._grants: dict[Principal, TopicPermissionCollection] = {}
        #: by an object for each call of on_change: a function may be added twice
        self._listeners: dict[object, Callable[[], object]] = {}
        for principal, permissions in check_mapping("grants", {} if grants is None else grants).items():
            self.grant(principal, *permissions)

    def grant(self, principal: Principal, *permissions: TopicPermission) -> None:
        """Grant further permissions to ``principal``.

        Raises:
            ArgumentError: one is no TopicPermission or has another grammar, or the principal is no str; nothing is
                granted.
        """
        principal = check_principal(principal)
        added = TopicPermissionCollection(permissions)
        for each in added:
            if each.grammar is not self.grammar:
                raise ArgumentError(f"a policy of the grammar {self.grammar} cannot grant {each!r:.200}")
        with self._lock:
            granted = self._grants.get(principal)
            if granted is None:
                self._grants = {**self._grants, principal: added}
            else:
                for permission in added:
                    granted.add(permission)
        self._notify()

    def revoke(self, principal: Principal) -> None:
        """Revoke all permissions of ``principal``.

        Raises:
            ArgumentError: the principal is no str.
        """
        principal = check_principal(principal)
        with self._lock:
            self._grants = {each: granted for each, granted in self._grants.items() if each != principal}
        self._notify()

    def permits(self, principal: Principal, permission: TopicPermission) -> bool:
        """Return whether ``principal`` has ``permission``.

        Raises:
            ArgumentError: the principal is no str.
        """
        principal = check_principal(principal)
        granted = self._grants.get(principal)
        return granted is not None and granted.implies(permission)

    def check(self, principal: Principal, permission: TopicPermission) -> None:
        """Refuse a principal without the permission.

        Raises:
            PermissionDeniedError: ``principal`` has no such permission.
            ArgumentError: ``permission`` is no permission.
        """
        check_instance("permission", permission, TopicPermission)
        if not self.permits(principal, permission):
            raise denied(principal, permission.actions, permission.name)

    def on_change(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call ``listener`` after each grant and revocation, on the thread that made it. Its exceptions are logged.

        Returns:
            A function that removes the listener; idempotent.

        Raises:
            ArgumentError: ``listener`` cannot be called.
        """
        listener = plain_function(listener, "a permission listener")
        key = object()

        def remove() -> None:
            with self._lock:
                self._listeners = {each: call for each, call in self._listeners.items() if each is not key}

        with self._lock:
            self._listeners = {**self._listeners, key: listener}
        return remove

    def _notify(self) -> None:
        for key, call in self._listeners.items():
            if key in self._listeners:  # an earlier listener may have removed it
                try:
                    call()
                except Exception:
                    logger.exception("topic policy: a listener failed; the other listeners are called")
