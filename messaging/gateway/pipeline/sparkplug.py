"""The step ``sparkplug``: Sparkplug B payloads to readings, one message each.

The step keeps the births of a route in memory. After a restart it asks edge nodes for a rebirth when they send data.
Data that cannot be read until then fails, and becomes a dead letter: nothing is lost, and nothing is guessed. A replay
of dead letters reads them by the births that are known then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from messaging.codecs.encodings import Encodings, decompress, parse_encodings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from messaging.gateway.pipeline.draft import Draft
    from messaging.sparkplug import Reading

#: metrics that control an edge node, and tell nothing about the plant
_CONTROL: Final = ("Node Control/", "Device Control/")
_BDSEQ: Final = "bdSeq"
#: bytes of a payload that was compressed as a whole
_MAX_PAYLOAD: Final = 4 * 2**20
#: what is no name of a channel
_FORBIDDEN: Final = str.maketrans(dict.fromkeys("+#\0", "_"))
#: the device of a metric of an edge node, in channels
NO_DEVICE: Final = "-"


class SparkplugStep:
    """Turns a Sparkplug message into a message for each reading. For one thread at a time.

    Attributes:
        request_rebirth: publishes a command to the source, given its channel and payload; ``None``: nothing is asked.

    Raises:
        MissingExtraError: the extra ``sparkplug`` is not installed.
    """

    def __init__(self) -> None:
        from messaging.sparkplug import SparkplugDecoder  # needs an extra, which other routes do without

        self.request_rebirth: Callable[[str, bytes], object] | None = None
        self._decoder = SparkplugDecoder(self._ask)
        self._read: Callable[[str, bytes], list[Reading]] = self._decoder.read

    def _ask(self, channel: str, payload: bytes) -> None:
        if self.request_rebirth is not None:
            self.request_rebirth(channel, payload)

    def inherit(self, other: SparkplugStep) -> None:
        """Go on with the births of a step that this one replaces."""
        self.request_rebirth = self.request_rebirth or other.request_rebirth
        self._decoder = other._decoder
        self._read = self._decoder.read

    def reread(self, other: SparkplugStep) -> None:
        """Read messages of the past by the births that another step knows, whose state stays as it is."""
        self._decoder = other._decoder
        self._read = self._decoder.reread

    def __call__(self, draft: Draft) -> Iterable[Draft]:
        """Return a message for each reading.

        Raises: as :meth:`messaging.sparkplug.SparkplugDecoder.read`.
        """
        payload = draft.payload
        if draft.content_encoding is not None:
            compressions = parse_encodings(draft.content_encoding).compressions
            payload = decompress(payload, Encodings(None, compressions), _MAX_PAYLOAD)
        return [_message(draft, reading) for reading in self._read(draft.channel, payload) if not _is_control(reading)]


def _is_control(reading: Reading) -> bool:
    return reading.metric.startswith(_CONTROL) or (reading.metric == _BDSEQ and reading.device is None)


def _message(draft: Draft, reading: Reading) -> Draft:
    names: dict[str, Any] = {
        "group": reading.group,
        "edge_node": reading.edge_node,
        "device": NO_DEVICE if reading.device is None else reading.device,
        "metric": reading.metric.translate(_FORBIDDEN),
    }
    made = draft.copy(captures={**draft.captures, **names})
    made.set_value(reading.to_json())
    return made
