"""Cases that have failed, and what they found. ``test_simulation`` runs each, so that none of it comes back."""

from __future__ import annotations

from typing import Final

KEPT: Final = {
    "messages/mqtt5/80": "a stream that subscribes while another one of its filter ends does not get its messages",
    "messages/mqtt311/60": "the same, on MQTT 3.1.1",
    "durable/amqp/108": "a subscription that was refused, and never closed, kept the files of its inbox open",
    "sharing/memory/100072": "messages that the broker redelivers were dead letters: a loss was not told yet",
    "requests/mqtt311/1082": "messages that a session resumed twice held for no stream filled the window for ever",
    "requests/mqtt311/900130/steps=20,27/faults=": "unanswered requests kept from a handler the replies it waited for",
    "requests/amqp/2800081": "a reply whose channel the broker closed, and closed again, was a failure",
    "requests/amqp/2800086": "replies that were unconfirmed when their instance closed were failures of their handler",
    "streams/mqtt5/700017/steps=/faults=2,3": "a session kept a subscription whose UNSUBSCRIBE a lost connection took",
    "streams/mqtt5/1700025/steps=20,21,35,38,39,40/faults=1": "a restored copy for a filter with noLocal was its alone",
    "streams/mqtt5/720060/steps=23/faults=1": "a loss between the copies of a message gave it to streams twice",
    "eventadmin/memory/1036": "an event met the topics of a registration and the filter of its update",
    "gateway/mqtt5/700040": "no stream with retainAsPublished followed one whose subscription was kept",
    "gateway/mqtt5/910008": "a route with another value of retain was never subscribed again",
    "journal/memory/1800035": "a loss of power took back what a repair of a journal had moved aside",
    "leases/memory/900005": "a renewal counted that was answered before a shorter one was asked for",
    "transactions/mqtt311/100014": "a manager told a participant for ever that was closed",
    "transactions/mqtt311/1410001": "a participant was closed before the end of its transaction was on the disk",
    "distributed/mqtt311/900146": "a session of a sender that was lost before its events arrived did not end",
    "typedevents/memory/400066": "a replay left out live events below the sequence that it was asked for",
    "sharing/amqp/900116": "an AMQP broker that closes a connection requeues before the connection has ended",
    "gateway/mqtt311/900090": "a loss of power took the records by which a gateway recognises equal messages",
    "typedevents/mqtt311/2740007": "a history with an event of an earlier run twice, as documented, was a failure",
    "typedevents/amqp/900196": "a bus that the broker gave no announcements any more took the others for known",
    "durable/mqtt311/1400014/steps=0,2,4,18,20,22,23,47,48/faults=0/world=2": "ids of one batch were forgotten by text",
    "durable/mqtt5/2770219": "a dead letter gave its credit back twice, so that more than the prefetch was handled",
    "gateway/amqp/1400010/steps=1,5,6,36,37,38,41/faults=/world=2": "a reload gave back messages that it stored",
    "gateway/amqp/1500034": "a message that came again on its way to the disk was stored twice",
    "gateway/mqtt311/1500040": "a route that a reload enabled did not publish what was stored",
    "distributed/mqtt5/1400024": "events of a kept session came between the registrations of consumers that overlap",
    "distributed/amqp/1500214": "the broker gave events to the connection of a killed member beside the new one",
    "gateway/amqp/1520048/steps=4,6,7,10,11,16,17/faults=0": "a device's own copies counted as those of the gateway",
    "gateway/amqp/1520013/steps=16,17,18,19,20,21,22,23,29,30/faults=0/world=1": "lost records counted as dropped",
    "distributed/amqp/2400006": "a member that the broker refused at first never joined its network",
}
