"""Event mailboxes: they store the events of owners that are away (EV.3.3).

=================  =================================================================================================
``mailbox``        EventMailbox: the registrations and their leases, on the disk
``registration``   one registration: its listener, its target or its iterator
``iterator``       RemoteEventIterator: pulling events
``box``            the stored events of one registration; ``open_boxes``: the bounded number of those that are open
``serving``        mailboxes of other processes
=================  =================================================================================================
"""

from messaging.remoteevent.mailbox.iterator import RemoteEventIterator as RemoteEventIterator
from messaging.remoteevent.mailbox.mailbox import EventMailbox as EventMailbox
from messaging.remoteevent.mailbox.registration import MailboxListener as MailboxListener
from messaging.remoteevent.mailbox.registration import MailboxRegistration as MailboxRegistration
from messaging.remoteevent.mailbox.serving import MailboxInfo as MailboxInfo
from messaging.remoteevent.mailbox.serving import MailboxServer as MailboxServer
from messaging.remoteevent.mailbox.serving import RemoteMailbox as RemoteMailbox
from messaging.remoteevent.mailbox.serving import RemoteMailboxRegistration as RemoteMailboxRegistration
