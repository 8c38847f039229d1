"""Received messages: from PUBLISH packets to streams, and from verdicts to acknowledgements.

**QoS 1 and 2.** The first answer to a message, PUBACK or PUBREC, is sent once every stream that got a copy has settled
it. For QoS 2 that is earlier in the handshake than in most libraries (PUBREC at once, PUBCOMP when processed), and on
purpose: with PUBREC the broker drops the message, so a process that dies before it has processed the message would lose
it. An unanswered message takes a slot of Receive Maximum, or of the broker's own limit: that is the credit. When each
answer is sent, :mod:`.answers` decides. Messages without a stream are kept by :mod:`.leftovers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from messaging.model import Incoming
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.answers import Answers
from messaging_adapters.mqtt.copies import COVERED
from messaging_adapters.mqtt.leftovers import Leftovers
from messaging_adapters.mqtt.mapping import PACKET_ID, Decoded, PublishCodec
from messaging_adapters.mqtt.packets import ProtocolError, Publish
from messaging_adapters.mqtt.settings import MqttSettings
from messaging_adapters.mqtt.streams import CopyToken, JointOutlet, Receipt, Stream, StreamOutlet

if TYPE_CHECKING:
    from messaging_adapters.mqtt.router import Router
    from messaging_adapters.mqtt.transport import Transport

logger = logging.getLogger(__name__)


class Inbound:
    """The receiving half of a session.

    Args:
        name: of the instance, for the log.
    """

    def __init__(self, name: str, router: Router, codec: PublishCodec, settings: MqttSettings) -> None:
        self._name = name
        self._router = router
        self._codec = codec
        self._v5 = settings.v5
        self._alias_maximum = settings.topic_alias_maximum
        #: topic aliases of this connection
        self._aliases: dict[int, str] = {}
        self.answers = Answers(settings.receive_maximum, settings.v5)
        self.leftovers = Leftovers(name, router, self.answers)
        #: outlets with a batch
        self._touched: list[StreamOutlet] = []
        #: joint subscriptions that take the messages of abandoned channels
        self._heirs: list[JointOutlet] = []

    # --- connection

    def connected(self, transport: Transport, session_present: bool) -> None:
        """Start on a new connection, with the session of the last one or a new one."""
        if not session_present:
            self.forget()
        self.answers.connected(transport)
        self._aliases.clear()

    def disconnected(self) -> None:
        """Hand over the messages of a lost connection, and keep the unanswered ones for a resumed session."""
        self.hand_over()
        self.answers.disconnected()

    def forget(self) -> None:
        """Drop the session: every token is stale."""
        self.answers.forget()
        self.leftovers.forget()

    def reset(self) -> None:
        """Void every handle: the broker has lost all subscriptions."""
        self._router.reset()
        self._heirs.clear()

    def close(self) -> None:
        """Answer every settled message and hold the others."""
        self.answers.answer_all()
        self.leftovers.close()
        self.answers.disconnected()

    # --- packets

    def receive(self, head: int, body: bytes) -> None:
        """Decode a PUBLISH packet, and add its message to the batches of the streams that receive it."""
        publish = packets.parse_publish(head, body, self._v5)
        if publish.properties.alias:
            self._resolve(publish)
        receipt = None
        if publish.qos:
            if publish.dup and self.answers.receive_again(publish):
                return
            receipt = self.answers.receive(publish)
        streams = self._router.receivers(publish)
        if streams is COVERED:
            if receipt is not None:
                self.answers.settled(receipt)
            return
        if not streams and receipt is not None and (heir := self._heir(publish.topic)) is not None:
            streams = [heir]
        elif not streams:
            if receipt is None or not self.leftovers.keep(receipt):
                self.leftovers.note_dropped(publish.topic)
                if receipt is not None:
                    self.answers.settled(receipt)
            return
        elif self._router.has_joints:
            streams = [each for each in streams if each.outlet.takes(each, publish.topic)]
        decoded = self._codec.decode(publish)
        if decoded is not None:
            absent = () if receipt is None else self.leftovers.beside(publish)
            self._deliver(publish.topic, decoded, receipt, streams, absent)
        elif receipt is not None:
            self.answers.settled(receipt)

    def _resolve(self, publish: Publish) -> None:
        """Replace a topic alias by its topic, or learn it (MQTT 5, 3.3.2.3.4)."""
        alias = publish.properties.alias
        if alias > self._alias_maximum:
            raise ProtocolError(
                f"topic alias {alias}; at most {self._alias_maximum} were allowed", packets.TOPIC_ALIAS_INVALID
            )
        if publish.topic:
            self._aliases[alias] = publish.topic
        elif alias in self._aliases:
            publish.topic = self._aliases[alias]
        else:
            raise ProtocolError(f"topic alias {alias} stands for nothing yet", packets.TOPIC_ALIAS_INVALID)

    def _deliver(
        self,
        topic: str,
        decoded: Decoded,
        receipt: Receipt | None,
        streams: Sequence[Stream],
        absent: Sequence[Stream] = (),
    ) -> None:
        """Deliver a message to ``streams``, and keep it for the next ones of the filters of ``absent`` streams."""
        payload, content_type, content_encoding, correlation_id, reply_to, extensions = decoded
        copies = 0
        for stream in streams:
            token, told = None, extensions
            if receipt is not None:
                # a stream that asked for QoS 0 has nothing to settle, whatever QoS it shares a subscription with
                if stream.settles:
                    token = CopyToken(receipt, stream)
                    stream.unsettled[token] = None
                    copies += 1
                if stream.tells_id:
                    more = extensions.copy()
                    more[PACKET_ID] = receipt.id
                    told = MappingProxyType(more)
            outlet = stream.outlet
            if not outlet.batch:
                self._touched.append(outlet)
            outlet.batch.append(
                Incoming(payload, topic, None, content_type, content_encoding, correlation_id, reply_to, told, token)
            )
        if receipt is not None:
            receipt.copies = copies
            if absent:
                self.leftovers.keep_for(receipt, absent)
            if not receipt.copies:
                self.answers.settled(receipt)

    def hand_over(self) -> None:
        """Call the sinks of all outlets that have messages."""
        touched, self._touched = self._touched, []
        for outlet in touched:
            batch, outlet.batch = outlet.batch, []
            if not outlet.ended:
                try:
                    outlet.sink.deliver(batch)
                except Exception:  # it must not raise, and must not cost the others their messages
                    logger.exception("mqtt '%s': the sink of messages on %r failed", self._name, batch[0].channel)

    # --- streams

    def claim(self, stream: Stream) -> None:
        """Deliver the kept messages of a new stream to it, if it settles messages: it is then answered for all."""
        stream.since = next(self.answers.numbers)
        if not stream.settles:
            return
        for receipt in self.leftovers.claim_left(stream):
            self._deliver_again(receipt, stream)
        self._deliver_unclaimed(stream, stream.route.matches)

    def abandon(self, joint: JointOutlet) -> None:
        """Deliver messages of abandoned channels to ``joint``, kept and later ones; see ``Adapter.abandon``."""
        self._heirs = [each for each in self._heirs if not each.ended and each is not joint]
        self._heirs.append(joint)
        stream = joint.settling
        if stream is not None:
            self._deliver_unclaimed(stream, joint.is_abandoned)

    def _heir(self, topic: str) -> Stream | None:
        """Return the stream that takes a message of an abandoned channel, which no stream matches."""
        found = (each.heir(topic) for each in self._heirs if not each.ended)
        return next((stream for stream in found if stream is not None), None)

    def _deliver_unclaimed(self, stream: Stream, matches: Callable[[str], bool]) -> None:
        # an earlier process may have subscribed with retainAsPublished, which MQTT 3.1.1 does not have; a stream that
        # is told packet ids recognises a retained message that it gets once more
        passes_flags = stream.route.passes_flags or (stream.tells_id and self._v5)
        for receipt in self.leftovers.claim_unclaimed(matches, passes_flags=passes_flags):
            decoded = self._codec.decode(receipt.publish)
            if decoded is None:
                self.answers.settled(receipt)
            else:
                self._deliver(receipt.publish.topic, decoded, receipt, (stream,))
        # the broker's order: in front of kept messages it may have sent one again, whose answer was lost
        stream.outlet.batch.sort(key=lambda each: each.token.receipt.number)
        self.hand_over()

    def release(self, stream: Stream) -> None:
        """Settle the unsettled messages of an ended stream."""
        for token in [*stream.unsettled]:  # in arrival order
            self.answers.settle(token)

    def leave(self, stream: Stream) -> None:
        """Leave the unsettled messages of an ended stream to the next consumer of its filter.

        It may be there already: while this stream finished its message in progress, another one has subscribed. That
        one gets the messages of which it received no copy.
        """
        self._pass_on(stream, [each for each in stream.route.streams if each is not stream and each.settles])
        self.leftovers.leave(stream)
        self.hand_over()

    def bequeath(self, stream: Stream, heir: Stream) -> None:
        """Deliver the unsettled messages of an ended stream to ``heir``, unless it received copies of its own."""
        self._pass_on(stream, [heir])
        self.release(stream)
        self.hand_over()

    def _pass_on(self, stream: Stream, heirs: Sequence[Stream]) -> None:
        """Deliver each unsettled message of an ended stream to the first heir that received no copy of it."""
        for token in [*stream.unsettled] if heirs else ():
            for heir in heirs:
                if token.receipt.number < heir.since or heir.route.is_shared:
                    del stream.unsettled[token]
                    self._deliver_again(token.receipt, heir)
                    break

    def _deliver_again(self, receipt: Receipt, stream: Stream) -> None:
        """Deliver a message in place of an unsettled copy of it."""
        if not self.answers.is_owed(receipt):
            return
        receipt.publish.dup = True
        decoded = self._codec.decode(receipt.publish)
        copies = receipt.copies
        if decoded is None:  # expired meanwhile
            receipt.copies = copies - 1
            if not receipt.copies:
                self.answers.settled(receipt)
            return
        self._deliver(receipt.publish.topic, decoded, receipt, (stream,))
        receipt.copies = copies
