"""References to listeners that a durable party finds again after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError, JournalError
from messaging.remoteevent.remote_listener import ListenerReference, RemoteListener
from messaging.remoteevent.targets import as_target

if TYPE_CHECKING:
    from messaging.instance import Messaging


class KeptListeners:
    """The listeners that one party knows by name, and the way to those of other processes. Immutable.

    Args:
        messaging: reaches the listeners of other processes; ``None``: there are none.
        named: listeners of this process by name.

    Raises:
        ArgumentError: an argument is not as described.
    """

    def __init__(self, messaging: Messaging | None, named: Mapping[str, Any]) -> None:
        if not isinstance(named, Mapping) or not all(isinstance(each, str) and each for each in named):
            raise ArgumentError("listeners must be a mapping of names to listeners")
        for each in named.values():
            as_target(each)
        self._messaging = messaging
        self._named = dict(named)

    def reference(self, listener: Any) -> list[Any]:
        """Return a listener in portable form.

        Raises:
            ArgumentError: it is neither in another process nor one of the named ones.
        """
        if isinstance(listener, RemoteListener):
            return ["remote", *listener.reference.to_value()]
        for name, each in self._named.items():
            if each is listener or each == listener:
                return ["named", name]
        raise ArgumentError(
            "a listener of a persistent party must be found again after a restart: pass a RemoteListener, or one of "
            f"`listeners`; not {type(listener).__name__}"
        )

    def listener(self, reference: Any, path: str) -> Any:
        """Return the listener of a portable form.

        Raises:
            JournalError: it is not there in this run.
        """
        if isinstance(reference, list) and len(reference) == 3 and reference[0] == "remote":
            if self._messaging is None:
                raise JournalError(path, f"a registration has the listener {reference[1]!r:.100}: pass `messaging`")
            return RemoteListener(self._messaging, ListenerReference.from_value(reference[1:]))
        if isinstance(reference, list) and len(reference) == 2 and reference[1] in self._named:
            return self._named[reference[1]]
        raise JournalError(path, f"a registration has the listener {reference!r:.100}, which `listeners` lacks")
