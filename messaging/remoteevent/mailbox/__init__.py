"""Event mailboxes: they store the events of owners that are away (EV.3.3).

===================  ===============================================================================================
``mailbox``          EventMailbox: the registrations and their leases, on the disk; ``records``: what is stored of them
``registration``     one registration: its listener, its target or its iterator; ``box_queue``: the events for a target
``iterator``         RemoteEventIterator: pulling events
``box``              the stored events of one registration; ``latest_box``: the newest event of each kind
``failure_notices``  the events that tell an owner which leases are not renewed any more
``open_boxes``       the bounded number of boxes that are open
``serving``          makes a mailbox available to other processes; ``remote``: the way to it
===================  ===============================================================================================
"""

from messaging.remoteevent.mailbox.iterator import RemoteEventIterator as RemoteEventIterator
from messaging.remoteevent.mailbox.mailbox import EventMailbox as EventMailbox
from messaging.remoteevent.mailbox.registration import MailboxListener as MailboxListener
from messaging.remoteevent.mailbox.registration import MailboxRegistration as MailboxRegistration
from messaging.remoteevent.mailbox.remote import MailboxInfo as MailboxInfo
from messaging.remoteevent.mailbox.remote import RemoteMailbox as RemoteMailbox
from messaging.remoteevent.mailbox.remote import RemoteMailboxRegistration as RemoteMailboxRegistration
from messaging.remoteevent.mailbox.serving import MailboxServer as MailboxServer
