"""The samples of the page on requests run on every broker, and print what they say: none depends on luck."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

import pytest

from messaging import Features
from messaging.runtime import MessageServiceRuntime
from messaging.testing.conformance.backends import Backend
from messaging.testing.conformance.helpers import feature
from messaging.testing.tables import table
from messaging.testing.waiting import eventually

_PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "reply-to.md"
_SAMPLES: Final = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
_URL: Final = '"memory://docs"'
#: what each prints
_PRINTED: Final = ("6\n", "total=1.0\n", "ACME 0\nACME 1\nACME 2\nACME 3\n", "HELP\n")

reply_to = feature(Features.REPLY_TO)


@pytest.mark.envelope
@reply_to
@table("number", range(len(_PRINTED)))
def test_a_sample_of_the_page_on_requests_prints_what_it_says(
    backend: Backend, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(_SAMPLES) == len(_PRINTED)
    sample = _SAMPLES[number]
    assert sample.count(_URL) == 1
    names: dict[str, Any] = {"__name__": "sample"}
    exec(compile(sample.replace(_URL, repr(backend.url)), _PAGE.name, "exec"), names)
    assert capsys.readouterr().out == _PRINTED[number]


@reply_to
@table("form", ["async with", "await", "ready"])
def test_a_registration_on_an_event_loop_waits_for_its_subscription(backend: Backend, form: str) -> None:
    """The handler answers the first request; leaving the block ends it."""
    channel = backend.channel()

    async def main() -> None:
        m = await backend.connect()
        registration = m.reply(channel, lambda: b"here")
        if form == "async with":
            async with registration as entered:
                assert entered is registration
                assert (await m.request(channel, b"?", qos=1)).payload == b"here"
        else:
            await (registration if form == "await" else registration.ready)
            assert (await m.request(channel, b"?", qos=1)).payload == b"here"
            assert registration.unregister()
        assert not registration.unregister()

    asyncio.run(main())
    runtime = backend.services.service(MessageServiceRuntime)
    assert runtime is not None
    eventually(lambda: not runtime.get_runtime_dto().reply_to_subscriptions, "it is gone")
