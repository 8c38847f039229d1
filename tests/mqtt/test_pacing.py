"""When reading waits for more, and when it does not."""

from __future__ import annotations

from messaging.testing.tables import table
from messaging_adapters.mqtt.connection import BUSY, PAUSE, WORTH, ReadPacer


def feed(pacer: ReadPacer, start: float, seconds: float, rate: float, count: int) -> tuple[float, float]:
    """Read ``count`` packets at a time, ``rate`` packets a second, until told to wait; when that was, and the pause."""
    now, end = start, start + seconds
    while now < end:
        now += count / rate
        pause = pacer.pause_after(count, now)
        if pause:
            return now, pause
    return now, 0.0


@table(
    "rate, count, expected",
    {
        "small reads at a high rate are worth waiting": (4 * BUSY, 2, PAUSE),
        "a low rate is not": (BUSY / 2, 2, 0.0),
        "large reads are not": (10 * BUSY, WORTH, 0.0),
    },
)
def test_waiting_pays_for_small_reads_at_a_high_rate(rate: float, count: int, expected: float) -> None:
    now, pause = feed(ReadPacer(), 100.0, 10.0, rate, count)
    assert pause == expected
    assert (now < 100.1) == bool(expected)


def test_it_goes_on_as_long_as_it_pays() -> None:
    pacer = ReadPacer()
    now, _ = feed(pacer, 100.0, 1.0, 4 * BUSY, 2)
    for _ in range(100):
        now += 0.002
        assert pacer.pause_after(WORTH, now) == PAUSE
    assert pacer.pause_after(WORTH - 1, now + 0.002) == 0.0


def test_where_it_does_not_pay_it_is_tried_less_and_less_often() -> None:
    """A broker that waits for acknowledgements sends no more for being waited for."""
    pacer, now, tries = ReadPacer(), 100.0, 0
    while now < 200.0:
        now, pause = feed(pacer, now, 200.0 - now, 2 * BUSY, 4)
        if pause:
            tries += 1
            now += pause
            assert pacer.pause_after(4, now) == 0.0
    assert 5 < tries < 25
