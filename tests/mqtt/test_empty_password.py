"""An empty password is sent: it is not the same as none."""

from __future__ import annotations

import contextlib
import socket

import messaging
from messaging.errors import MessagingError
from messaging.testing.waiting import PATIENCE, in_thread

#: flags of CONNECT
USER_NAME, PASSWORD = 0x80, 0x40


def test_an_empty_password_reaches_the_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)

        def connect() -> None:
            with contextlib.suppress(MessagingError):
                messaging.connect(f"mqtt://user:@127.0.0.1:{server.getsockname()[1]}", timeout=2.0).close()

        connecting = in_thread(connect)
        client, _ = server.accept()
        with client:
            data = client.recv(4096)
        assert data[9] & (USER_NAME | PASSWORD) == USER_NAME | PASSWORD
        assert data.endswith(b"\x00\x04user\x00\x00")
    connecting.result(PATIENCE * 2)
