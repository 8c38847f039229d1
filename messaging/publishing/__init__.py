"""Publishing: the publisher service (RFC 5.5) and the outbox, which holds messages until they are settled.

``publishing.durable`` is imported by its own name, because it loads the journal.
"""

from messaging.publishing.outbox import Outbox as Outbox
from messaging.publishing.publication import Publication as Publication
from messaging.publishing.publisher import MessagePublisher as MessagePublisher
