"""A process that forwards messages: a gateway, or the bare adapters without a journal.

``python -m benchmarks.peers.forwarder gateway|bare SETTINGS.json`` runs until it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import messaging
from messaging import Message, MessageContext
from messaging.gateway import Gateway, GatewaySettings


def bare(settings: dict[str, Any]) -> None:
    """Publish each message of the source to the target, and acknowledge it when the target has confirmed it."""
    instances = {name: dict(each) for name, each in settings["instances"].items()}
    route = settings["routes"]["r"]
    source = messaging.connect(instances["plant"].pop("url"), name="bench-plant", keep_session=True)
    target = messaging.connect(instances["cloud"].pop("url"), outbox_size=2000)
    context = MessageContext(route["to"]["channel"], extensions={"guaranteedDelivery": True})
    stream = source.subscription.subscribe(
        MessageContext(route["from"]["channel"], extensions={"qos": 1, "prefetch": 1024, "bufferSize": 1024}),
        keep_subscription=True, acknowledge="manual",
    )  # fmt: skip
    publish = target.publisher.publish

    def forward(message: Any) -> None:
        incoming = message.context
        publish(Message(message.payload, context)).listen(lambda: incoming.settle(True))

    stream.subscribe(forward)
    threading.Event().wait()


def main() -> None:
    """Run until the process is killed."""
    settings = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "gateway":
        Gateway(GatewaySettings.model_validate(settings)).run()
    else:
        bare(settings)


if __name__ == "__main__":
    main()
