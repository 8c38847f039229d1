"""The look-up of host names: each name once at a time, on a worker thread; and connecting to them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from messaging.environment.forks import per_process
from messaging.environment.signals import on_failure
from messaging.execution import on_worker, shielded


@per_process
def _looked_up() -> dict[str, asyncio.Future[list[str]]]:
    """Return the look-ups that have no answer yet, by name. On the engine loop."""
    return {}


async def addresses_of(name: str) -> list[str]:
    """Return the IP addresses of a host name, in the order of the resolver. On the engine loop.

    A name is looked up once at a time. While that hangs, the next caller waits for the same answer, so that one thread
    at most hangs with each name.

    Raises:
        OSError, UnicodeError: there is none.
        RuntimeError: no thread can be started.
    """
    looked_up = _looked_up()
    pending = looked_up.get(name)
    if pending is None:
        pending = looked_up[name] = on_worker(lambda: _look_up(name))
        pending.add_done_callback(lambda _: looked_up.pop(name, None))
    return await shielded(pending)


async def reach(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the first address of ``host`` that answers. On the engine loop.

    Event loops connect to names, too. Cancelling that leaves errors of the resolver that asyncio logs.

    Raises:
        OSError, UnicodeError: the name has no address, or none answers.
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for found in [host] if is_address(host) else await addresses_of(host):
        family, kind, protocol, _, address = socket.getaddrinfo(
            found, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            with on_failure(sock.close):
                await loop.sock_connect(sock, address)
        except OSError as error:
            failure = error
        else:
            return sock
    raise failure or OSError("its name has no address")


def _look_up(name: str) -> list[str]:
    return [*dict.fromkeys(map(_shown, socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))]


def _shown(found: tuple[object, object, object, str, tuple[object, ...]]) -> str:
    """Return the IP address in a result of the resolver: a link-local one of IPv6 with the number of its link."""
    *_, address = found
    text, scope = str(address[0]), address[3:]
    return f"{text}%{scope[0]}" if any(scope) and "%" not in text else text


def is_address(name: str) -> bool:
    """Return whether ``name`` is an IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
