"""Event networks: event services of several processes exchange events over any messaging instance.

The distributed event admin (RFC 214) and the connection of a typed event bus stand on this room. It knows topics as a
grammar, and events as their layout. Applications do not import from it.

=====================  =================================================================================================
``node``               EventNode: one member of a network
``own_member``         this member: its settings (EventNetwork), its event service (NodeService), what its parts share
``other_members``      the other members: what each announced, and which of them want an event
``membership``         who lives: acts on announcements and on silence, and passes the changes on
``announcements``      the layout of announcements
``own_announcements``  what this member announces, in step with its subscriptions, and published in order
``channels``           the channels of events and announcements, and the contexts of their messages
``sending``            events that are sent
``intake``             events and announcements that arrive
``hops``               the way of an event through networks, and the ids that were seen
``asking``             asks other members for past events, and whether they have read announcements
``notifications``      promises that resolve when every consumer was notified
``signing``            EventSigning: the envelope of signed messages
``signing_keys``       the keys that sign it
``seals``              refuses replays, and members and principals of other keys
=====================  =================================================================================================
"""

from messaging.dispatch.eventnetwork.announcements import DISTRIBUTED as DISTRIBUTED
from messaging.dispatch.eventnetwork.announcements import TYPED as TYPED
from messaging.dispatch.eventnetwork.announcements import Announcement as Announcement
from messaging.dispatch.eventnetwork.announcements import TopicInterest as TopicInterest
from messaging.dispatch.eventnetwork.asking import MAX_ANSWER_BYTES as MAX_ANSWER_BYTES
from messaging.dispatch.eventnetwork.asking import MAX_PAST as MAX_PAST
from messaging.dispatch.eventnetwork.asking import PastRequest as PastRequest
from messaging.dispatch.eventnetwork.channels import PREFIX as PREFIX
from messaging.dispatch.eventnetwork.channels import new_reply_topic as new_reply_topic
from messaging.dispatch.eventnetwork.hops import ArrivedEvent as ArrivedEvent
from messaging.dispatch.eventnetwork.hops import Hop as Hop
from messaging.dispatch.eventnetwork.hops import SeenEvents as SeenEvents
from messaging.dispatch.eventnetwork.hops import framework_of as framework_of
from messaging.dispatch.eventnetwork.hops import key_of as key_of
from messaging.dispatch.eventnetwork.hops import last_hop as last_hop
from messaging.dispatch.eventnetwork.node import EventNode as EventNode
from messaging.dispatch.eventnetwork.node import NodeDTO
from messaging.dispatch.eventnetwork.node import framework_uuid as framework_uuid
from messaging.dispatch.eventnetwork.notifications import DISPATCH as DISPATCH
from messaging.dispatch.eventnetwork.notifications import DeliveryNotification as DeliveryNotification
from messaging.dispatch.eventnetwork.other_members import MemberDTO
from messaging.dispatch.eventnetwork.own_member import EventNetwork
from messaging.dispatch.eventnetwork.own_member import NodeService as NodeService
from messaging.dispatch.eventnetwork.signing import EventSigning
from messaging.dispatch.eventnetwork.signing_keys import SigningKey

__all__ = [
    "EventNetwork",
    "EventSigning",
    "MemberDTO",
    "NodeDTO",
    "SigningKey",
]
