"""Several hosts in one URL: the next one is connected to when one is lost, or the URL is refused."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from messaging import InvalidUrlError, Messaging
from messaging.adapter import TakesEndpoint
from messaging.instance import find_adapter
from messaging.testing.conformance.backends import Backend, Wire
from messaging.testing.conformance.helpers import nothing_more, online, publish, receive, wire
from messaging.testing.waiting import eventually


def _address(link: Wire) -> str:
    return f"{link.proxy.host}:{link.proxy.port}"


def _host(m: Messaging) -> str | None:
    return m.runtime.get_runtime_dto().connection.host


@wire
def test_the_next_host_is_connected_to_and_streams_go_on(backend: Backend, channel: str) -> None:
    """Both hosts lead to the same broker. An adapter that is told no host must not connect to the first for ever."""
    first, second = backend.wire(), backend.wire()
    parts = urlsplit(first.url)
    url = parts._replace(netloc=f"{parts.netloc},{_address(second)}").geturl()
    if not issubclass(find_adapter(parts.scheme), TakesEndpoint):
        with pytest.raises(InvalidUrlError, match="2 hosts"):
            backend.connect(url)
        return
    m = backend.connect(url, reconnect_min=0.02, reconnect_max=0.1)
    publisher = backend.connect()
    assert _host(m) == _address(first)
    with m.subscribe(channel, **backend.reliable) as stream:
        for here, there in ((first, second), (second, first)):
            publish(publisher, channel, [b"here"], **backend.reliable)
            assert receive(stream, 1) == [b"here"]
            here.cut()
            eventually(lambda there=there: _host(m) == _address(there), "connected to the other host")  # type: ignore[misc]
            online(m)
            publish(m, channel, [b"there"], **backend.reliable)
            assert receive(stream, 1) == [b"there"]
            here.up()
        nothing_more(publisher, channel, stream, **backend.reliable)
    first.cut()  # a host that is down is left out by the first connection
    assert _host(backend.connect(url)) == _address(second)
