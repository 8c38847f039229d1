"""Remote events: the Jini distributed events specification on any messaging instance (EV)."""

from messaging.remoteevent.event import EventRegistration as EventRegistration
from messaging.remoteevent.event import RemoteEvent as RemoteEvent
