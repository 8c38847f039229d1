"""``messaging monitor``: the live page of the processes that publish their snapshots at a broker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions  # read at run time by options.command
from messaging.cli.options import option
from messaging.cli.output import ExitCode, wait_while_read, write
from messaging.errors import ArgumentError


@options.command
def monitor(
    broker: BrokerOptions,
    listen: Annotated[
        str, option("--listen", "HOST:PORT", "Address of the page; port 0 for a free one.")
    ] = "127.0.0.1:8787",
    channel: Annotated[
        str, option("--channel -t", "CHANNEL", "First levels of the channels of the snapshots.")
    ] = "messaging/monitor",
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            "FILE",
            "File with the token that viewers need; without one the page is for this machine only.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, option("--allowed-host", "NAME", "Name of a proxy in front. Repeatable.")
    ] = None,
    mask: Annotated[
        list[str] | None, option("--mask", "NAME", "Hide the values of these fields, too. Repeatable.")
    ] = None,
) -> int:
    """Serve a live page of the processes that publish their snapshots at a broker, until interrupted.

    A process publishes with messaging.observability.monitor.SnapshotPublisher. The page shows instances, rates,
    buffers, dead letters, event buses, journals and gateways, and messages of a channel that you choose.

    Example: messaging monitor mqtt://localhost
    """
    from messaging.observability.monitor.server import Monitor

    host, separator, port = listen.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ArgumentError(f"--listen must be HOST:PORT, such as 127.0.0.1:8787, not {listen!r:.80}")
    with (
        broker.connect("monitor") as m,
        Monitor(
            m, host=host.strip("[]"), port=int(port), channel=channel, mask=mask or (),
            token_file=token_file, allowed_hosts=allowed_host or (),
        ) as page,
    ):  # fmt: skip
        write(f"{page.url}\n".encode())
        wait_while_read(threading.Event())
    return ExitCode.OK
