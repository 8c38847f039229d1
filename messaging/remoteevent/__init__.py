"""Remote events: the Jini distributed events specification on any messaging instance (EV).

A listener registers with a generator, under a lease, and gets numbered events. Third parties store, filter and spread
them on the way. Each party takes any listener, of this process or of another one.

===================  ===============================================================================================
``event``            RemoteEvent, EventRegistration (EV.2.3.2, EV.2.3.5), and an event as one line of JSON
``listener``         RemoteEventListener (EV.2.3.1), and what its failures mean; listeners of this process as targets
``remote``           listeners, generators and third parties of and for other processes
``delivery``         the events for one listener, in order, with retries
``generator``        EventGenerator (EV.2.3.4); ``storage``: its events and registrations; ``transacted``: transactions
``agent``            StoreAndForwardAgent (EV.3.1)
``third_parties``    filters, correlators, demultiplexers (EV.3.2), and multiplexers (EV.3.2.1)
``mailbox``          EventMailbox (EV.3.3)
``sequences``        duplicates and losses, sets of numbers
``event_journal``    events on the disk; ``intake``: each event stored once; ``party``: registrations on the disk
``renewal_set``      leases that are renewed for a client; ``renewals``: for the owners of a party
``transactions``     two-phase commit for registrations and events (EV.2.4)
``bridges``          remote events and typed events, channels and distributed events (EV.4)
===================  ===============================================================================================
"""

from messaging.errors import InvalidIteratorError, ListenerGoneError, UnknownEventError
from messaging.remoteevent.agent import StoreAndForwardAgent
from messaging.remoteevent.delivery import DeliveryCounts, RetryPolicy
from messaging.remoteevent.event import EventRegistration, RemoteEvent
from messaging.remoteevent.generator import EventGenerator
from messaging.remoteevent.listener import BatchListener, EventTarget, RemoteEventListener
from messaging.remoteevent.mailbox import (
    EventMailbox,
    MailboxInfo,
    MailboxRegistration,
    MailboxServer,
    RemoteEventIterator,
    RemoteMailbox,
    RemoteMailboxRegistration,
)
from messaging.remoteevent.remote import EventServer, ListenerReference, ListenerServer, RemoteGenerator, RemoteListener
from messaging.remoteevent.renewal_set import ExpirationWarningEvent, LeaseRenewalSet, RenewalFailureEvent
from messaging.remoteevent.sequences import Arrival, ArrivalKind, IdempotentListener, SequenceTracker
from messaging.remoteevent.third_parties import (
    EventCorrelator,
    NotificationDemultiplexer,
    NotificationFilter,
    NotificationMultiplexer,
)

__all__ = [
    "Arrival",
    "ArrivalKind",
    "BatchListener",
    "DeliveryCounts",
    "EventCorrelator",
    "EventGenerator",
    "EventMailbox",
    "EventRegistration",
    "EventServer",
    "EventTarget",
    "ExpirationWarningEvent",
    "IdempotentListener",
    "InvalidIteratorError",
    "LeaseRenewalSet",
    "ListenerGoneError",
    "ListenerReference",
    "ListenerServer",
    "MailboxInfo",
    "MailboxRegistration",
    "MailboxServer",
    "NotificationDemultiplexer",
    "NotificationFilter",
    "NotificationMultiplexer",
    "RemoteEvent",
    "RemoteEventIterator",
    "RemoteEventListener",
    "RemoteGenerator",
    "RemoteListener",
    "RemoteMailbox",
    "RemoteMailboxRegistration",
    "RenewalFailureEvent",
    "RetryPolicy",
    "SequenceTracker",
    "StoreAndForwardAgent",
    "UnknownEventError",
]
