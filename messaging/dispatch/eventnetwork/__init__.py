"""Event networks: event services of several processes exchange events over any messaging instance.

The distributed event admin (RFC 214) and the connection of a typed event bus stand on this room. It knows topics as a
grammar, and events as their layout. Applications do not import from it.

=======================  ===============================================================================================
``node``                 EventNode: one member of a network
``own_member``           NodeService: the contract of an event service; what the parts of its member share
``other_members``        the other members, and what follows from their changes
``settings``             EventNetwork: the settings of a network
``channels``             the channels of events and announcements
``announcements``        the layout of announcements; ``membership`` acts on them; ``interests`` finds members by topic
``own_interests``        what a member wants: its subscriptions and its announcements in step; ``announcer`` publishes
                         them
``sending``              events that are sent; ``contexts`` has the contexts of their messages
``event_intake``         events that arrive; ``hops`` has the way of an event, and the ids that were seen
``announcement_intake``  announcements that arrive
``signing``              EventSigning: the envelope of signed messages; ``signing_keys`` sign it; ``seals`` refuses
                         replays
``replays``              past events that other members are asked for
``notifications``        promises that resolve when every consumer was notified; ``pings`` that announcements were read
``control``              the thread of announcements and timers
``node_views``           snapshots
=======================  ===============================================================================================
"""

from messaging.dispatch.eventnetwork.announcements import DISTRIBUTED as DISTRIBUTED
from messaging.dispatch.eventnetwork.announcements import TYPED as TYPED
from messaging.dispatch.eventnetwork.announcements import Announcement as Announcement
from messaging.dispatch.eventnetwork.announcements import TopicInterest as TopicInterest
from messaging.dispatch.eventnetwork.channels import PREFIX as PREFIX
from messaging.dispatch.eventnetwork.channels import is_private as is_private
from messaging.dispatch.eventnetwork.channels import new_reply_topic as new_reply_topic
from messaging.dispatch.eventnetwork.hops import ArrivedEvent as ArrivedEvent
from messaging.dispatch.eventnetwork.hops import Hop as Hop
from messaging.dispatch.eventnetwork.hops import SeenEvents as SeenEvents
from messaging.dispatch.eventnetwork.hops import framework_of as framework_of
from messaging.dispatch.eventnetwork.hops import key_of as key_of
from messaging.dispatch.eventnetwork.hops import last_hop as last_hop
from messaging.dispatch.eventnetwork.node import EventNode as EventNode
from messaging.dispatch.eventnetwork.node import framework_uuid as framework_uuid
from messaging.dispatch.eventnetwork.node_views import MemberDTO as MemberDTO
from messaging.dispatch.eventnetwork.node_views import NodeDTO as NodeDTO
from messaging.dispatch.eventnetwork.notifications import DISPATCH as DISPATCH
from messaging.dispatch.eventnetwork.notifications import DeliveryNotification as DeliveryNotification
from messaging.dispatch.eventnetwork.own_member import MemberProfile as MemberProfile
from messaging.dispatch.eventnetwork.own_member import NodeService as NodeService
from messaging.dispatch.eventnetwork.replays import MAX_ANSWER_BYTES as MAX_ANSWER_BYTES
from messaging.dispatch.eventnetwork.replays import MAX_PAST as MAX_PAST
from messaging.dispatch.eventnetwork.replays import PastRequest as PastRequest
from messaging.dispatch.eventnetwork.settings import EventNetwork as EventNetwork
from messaging.dispatch.eventnetwork.signing import EventSigning as EventSigning
from messaging.dispatch.eventnetwork.signing_keys import SigningKey as SigningKey

__all__ = [
    "EventNetwork",
    "EventSigning",
    "MemberDTO",
    "NodeDTO",
    "SigningKey",
]
