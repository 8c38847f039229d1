"""A TLS transport that has let go of its connection, as asyncio's of Python 3.11.2 does, is closed all the same."""

from __future__ import annotations

import asyncio

import pytest

from adapters.amqp.protocol import cut


@pytest.mark.parametrize("is_closing", [True, False])
def test_only_an_open_transport_may_fail_to_abort(is_closing: bool) -> None:
    class Broken(asyncio.Transport):
        def is_closing(self) -> bool:
            return is_closing

        def abort(self) -> None:
            raise AttributeError("'NoneType' object has no attribute '_abort'")

    if is_closing:
        cut(Broken())
    else:
        with pytest.raises(AttributeError, match="_abort"):
            cut(Broken())
