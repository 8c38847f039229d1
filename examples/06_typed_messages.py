"""Publish and receive pydantic models, and dead-letter the messages that do not fit the model.

python examples/06_typed_messages.py [URL]
"""

import sys
from datetime import UTC, datetime

from pydantic import BaseModel, Field

import messaging


class Reading(BaseModel):
    sensor: str
    celsius: float = Field(gt=-273.15)
    at: datetime


def main(url: str) -> None:
    at = datetime(2025, 6, 1, 12, 30, tzinfo=UTC)
    with (
        messaging.connect(url) as m,
        m.subscribe("examples/invalid", qos=1) as invalid,
        # Every message is validated before it enters the stream. A message that does not fit goes to the dead-letter
        # channel with its original bytes. on_invalid="skip" would drop it, and "raise" would end the stream.
        m.subscribe(
            "examples/readings", Reading, on_invalid="dead_letter", dead_letter_channel="examples/invalid", qos=1
        ) as readings,
    ):
        # An object is sent as JSON, unless content_type names another format. Bytes are sent unchanged.
        m.publish("examples/readings", Reading(sensor="attic", celsius=31.5, at=at), qos=1)
        m.publish("examples/readings", b'{"sensor": "cellar", "celsius": "cold"}', qos=1)
        m.publish("examples/readings", Reading(sensor="hall", celsius=20, at=at), qos=1)

        for _ in range(2):
            reading: Reading = readings.receive(timeout=10).value()
            print(f"{reading.at:%H:%M} {reading.sensor}: {reading.celsius} °C")
        print("does not fit:", invalid.receive(timeout=10).payload.decode())
        print("counted:", readings.counters.invalid)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples")
