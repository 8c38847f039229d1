"""Publishing: the publisher service (RFC 5.5) and the outbox, which holds messages until they are confirmed.

May import: ``connection``, ``adapter`` (the contract), ``model``, ``execution``. Independent of ``receiving``.
"""

from messaging.publishing.outbox import Outbox as Outbox
from messaging.publishing.outbox import Publication as Publication
from messaging.publishing.outbox import step_of as step_of
from messaging.publishing.publisher import MessagePublisher as MessagePublisher
