"""A program whose message handler never returns; run by test_handlers, which kills it.

``python -m tests.faults.handling URL CHANNEL OPTION=VALUE...`` writes a line to its output when a message is handled.
"""

from __future__ import annotations

import sys
import threading

import messaging


def main(url: str, channel: str, options: dict[str, str]) -> None:
    """See the module."""
    queue = {"queue": options.pop("queue")} if "queue" in options else {}
    m = messaging.connect(url, **options)

    def handle(message: messaging.Message) -> None:
        sys.stdout.write(f"{message.payload.decode()}\n")
        sys.stdout.flush()
        threading.Event().wait()

    m.on(channel, handle, keep_subscription=True, **queue)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], dict(each.split("=", 1) for each in sys.argv[3:]))
