"""Remote events: the Jini distributed events specification on any messaging instance (EV)."""

from messaging.errors import ListenerGoneError as ListenerGoneError
from messaging.errors import UnknownEventError as UnknownEventError
from messaging.remoteevent.agent import StoreAndForwardAgent as StoreAndForwardAgent
from messaging.remoteevent.correlator import EventCorrelator as EventCorrelator
from messaging.remoteevent.delivery import DeliveryCounts as DeliveryCounts
from messaging.remoteevent.delivery import RetryPolicy as RetryPolicy
from messaging.remoteevent.demultiplexer import NotificationDemultiplexer as NotificationDemultiplexer
from messaging.remoteevent.event import EventRegistration as EventRegistration
from messaging.remoteevent.event import RemoteEvent as RemoteEvent
from messaging.remoteevent.filter import NotificationFilter as NotificationFilter
from messaging.remoteevent.generator import EventGenerator as EventGenerator
from messaging.remoteevent.listener import RemoteEventListener as RemoteEventListener
from messaging.remoteevent.mailbox import EventMailbox as EventMailbox
from messaging.remoteevent.mailbox import MailboxRegistration as MailboxRegistration
from messaging.remoteevent.mailbox import MailboxServer as MailboxServer
from messaging.remoteevent.mailbox import RemoteEventIterator as RemoteEventIterator
from messaging.remoteevent.mailbox import RemoteMailbox as RemoteMailbox
from messaging.remoteevent.mailbox import RemoteMailboxRegistration as RemoteMailboxRegistration
from messaging.remoteevent.multiplexer import NotificationMultiplexer as NotificationMultiplexer
from messaging.remoteevent.remote_listener import ListenerReference as ListenerReference
from messaging.remoteevent.remote_listener import ListenerServer as ListenerServer
from messaging.remoteevent.remote_listener import RemoteListener as RemoteListener
from messaging.remoteevent.serving import EventServer as EventServer
from messaging.remoteevent.serving import RemoteGenerator as RemoteGenerator
