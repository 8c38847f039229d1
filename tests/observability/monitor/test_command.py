"""``messaging monitor``."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest

import messaging
from messaging.cli import main
from messaging.observability.monitor import SnapshotPublisher
from messaging.services import ServiceRegistry
from messaging.testing.brokers import Mosquitto
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, eventually
from tests.cli.program import Program

TOKEN = "0123456789abcdef-token"


def snapshot(port: int, token: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/api/snapshot", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())
    finally:
        connection.close()


def test_the_command_serves_processes_of_a_broker_until_interrupted(mosquitto: Mosquitto, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    arguments = ("monitor", mosquitto.url, "--listen", "127.0.0.1:0", "--channel", "by/command", "--token-file")
    with (
        messaging.connect(mosquitto.url, services=ServiceRegistry(), name="watched") as m,
        SnapshotPublisher(m, interval=0.2, process="press-1", channel="by/command"),
        Program(*arguments, str(file)) as program,
    ):
        url = program.out.until(lambda line: line.startswith(b"http://")).decode().strip()
        port = int(url.rstrip("/").rpartition(":")[2])
        eventually(lambda: "by/command/press-1" in snapshot(port, TOKEN)["processes"])
        program.signal(signal.SIGINT)
        assert program.ended() == 130
        assert TOKEN.encode() not in program.out.rest() + program.err.rest()


@table(
    "listen, text",
    [
        ("8787", "--listen must be HOST:PORT"),
        ("127.0.0.1:x", "--listen must be HOST:PORT"),
        ("127.0.0.1:70000", "--listen must be HOST:PORT"),
        ("0.0.0.0:0", "needs a token"),
    ],
)
def test_a_wrong_address_is_refused(
    listen: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESSAGING_MONITOR_TOKEN", "MESSAGING_MONITOR_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["monitor", "memory://command", "--listen", listen]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert text in err
