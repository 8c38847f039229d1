"""Event mailboxes: they store the events of owners that are away (EV.3.3).

===================  ===============================================================================================
``mailbox``          EventMailbox: the registrations and their leases; its folder
``registration``     one registration: its listener, its target or its iterator
``iterator``         RemoteEventIterator: pulling events
``box``              the stored events of one registration: all, or the newest of each kind
``failure_notices``  the events that tell an owner which leases are not renewed any more
``open_boxes``       the bounded number of boxes that are open
``remote``           mailboxes for other processes
===================  ===============================================================================================
"""

from messaging.remoteevent.mailbox.iterator import RemoteEventIterator as RemoteEventIterator
from messaging.remoteevent.mailbox.mailbox import EventMailbox as EventMailbox
from messaging.remoteevent.mailbox.registration import MailboxListener as MailboxListener
from messaging.remoteevent.mailbox.registration import MailboxRegistration as MailboxRegistration
from messaging.remoteevent.mailbox.remote import MailboxInfo as MailboxInfo
from messaging.remoteevent.mailbox.remote import MailboxServer as MailboxServer
from messaging.remoteevent.mailbox.remote import RemoteMailbox as RemoteMailbox
from messaging.remoteevent.mailbox.remote import RemoteMailboxRegistration as RemoteMailboxRegistration
