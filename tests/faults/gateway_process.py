"""A gateway in a process of its own, which runs until it is killed: ``gateway_process SETTINGS.json``."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from messaging.gateway.gateway import Gateway
from messaging.gateway.settings import GatewaySettings


def main() -> None:
    """Run the gateway; SIGTERM stops it in good order."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(name)s %(message)s")
    gateway = Gateway(GatewaySettings.model_validate(json.loads(Path(sys.argv[1]).read_text())))
    signal.signal(signal.SIGTERM, lambda *_: gateway.stop())
    gateway.start()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    gateway.run_until_stopped()


if __name__ == "__main__":
    main()
