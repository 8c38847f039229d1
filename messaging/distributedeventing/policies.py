"""What may come in from a network, and what may go out to it, by principal and topic.

**Inbound.** An event whose principal may not publish here is refused: no consumer receives it, and the log of refused
messages names it. Without ``EventNetwork.signing`` the principal is claimed by the sender, and not proven.

**Outbound.** An event whose principal may not publish to the network reaches the consumers of this process only. Its
publisher has published it, so a plain call raises nothing; a notification fails with ``PermissionDeniedError``, since
consumers elsewhere are not notified. It is logged once for each principal and topic, and counted.

**Private topics** are exempt from both (RFC 214 5.1.3): their names are random, so that no permission can name them in
advance, and no wildcard matches them. Only programs that were given the name can publish to it.

**Interests** are announced whatever the policies say: other members may send events that are refused on arrival.
"""

from __future__ import annotations

import threading
from typing import Final

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import DISTRIBUTED_EVENTS, Principal, TopicPermission, TopicPolicy, is_private_topic
from messaging.errors import ArgumentError, PermissionDeniedError
from messaging.errors.checks import check_instance
from messaging.errors.text import SafeLog

logger = SafeLog(__name__)

#: principals and topics whose first refusal was logged
_MAX_LOGGED: Final = 10_000


class NetworkPolicy:
    """A policy for one direction. Thread safe.

    Args:
        title: of the admin, for the log and for errors.
        direction: ``inbound`` or ``outbound``, the name of the argument.
        policy: grants the right to publish; without it all principals may.

    Raises:
        ArgumentError: ``policy`` is no policy of the topics of RFC 214.
    """

    def __init__(self, title: str, direction: str, policy: TopicPolicy | None) -> None:
        if policy is not None:
            check_instance(direction, policy, TopicPolicy)
            if policy.grammar is not DISTRIBUTED_EVENTS:  # it would refuse everything
                raise ArgumentError(
                    f"{title}: {direction} needs a TopicPolicy of the grammar {DISTRIBUTED_EVENTS}, not of "
                    f"{policy.grammar}"
                )
        self._title = title
        self._direction = direction
        self._policy = policy
        self._lock = threading.Lock()  # guards the following
        self._logged: BoundedCache[tuple[Principal, str], None] = BoundedCache(_MAX_LOGGED)
        #: number of events that :meth:`withhold` counted
        self.withheld = 0

    def check(self, principal: Principal, topic: str) -> None:
        """Refuse an event that may not pass.

        Raises:
            PermissionDeniedError: ``principal`` may not publish to ``topic``.
        """
        policy = self._policy
        if policy is None or is_private_topic(topic):
            return
        if not policy.permits(principal, TopicPermission(topic, TopicPermission.PUBLISH, DISTRIBUTED_EVENTS)):
            subject = "a sender without a principal" if principal is None else f"the principal {principal!r:.200}"
            raise PermissionDeniedError(f"{self._title}: {self._direction}: {subject} may not publish {topic!r:.200}")

    def withhold(self, principal: Principal, topic: str, error: PermissionDeniedError) -> None:
        """Count an event that is not sent, and log the first one of its principal and topic."""
        with self._lock:
            self.withheld += 1
            is_logged = (principal, topic) in self._logged
            if not is_logged:
                self._logged[principal, topic] = None
        if not is_logged:
            logger.warning("%s; the event is for this process only; further ones like it are counted", error)
