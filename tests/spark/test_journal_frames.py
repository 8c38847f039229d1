"""Frames: whole or not there."""

from __future__ import annotations

import pyarrow as pa
import pytest

from adapters.spark.journal import frames

SEED = 77


def image(*bodies: bytes, first: int = 5, seed: int = SEED) -> bytes:
    parts = []
    for number, body in enumerate(bodies):
        parts += [bytes(part) for part in frames.encode(first + number, 1, pa.py_buffer(body), seed)]
    return b"".join(parts)


@pytest.mark.parametrize("gap", [0, 1, 31, 2**20 - 34, 2**20 - 2, 2**20 - 1, 2**20, 2**20 + 1])
def test_an_intact_frame_is_found_anywhere_behind_damage(gap: int) -> None:
    damaged = b"x" + b"\0" * gap
    assert frames.any_after(pa.py_buffer(damaged + image(b"whole")), 0, SEED)
    assert not frames.any_after(pa.py_buffer(damaged + image(b"whole")[:-1]), 0, SEED)
    assert not frames.any_after(pa.py_buffer(damaged), 0, SEED)


def test_a_payload_that_looks_like_frames_is_no_frame() -> None:
    """A sender puts a journal into a message, and a crash tears the frame of that message."""
    torn = image(image(b"inner", b"inner", seed=0) * 10)[1:]
    assert not frames.any_after(pa.py_buffer(torn), 0, SEED)


def test_a_length_that_no_body_has_is_damage() -> None:
    data = frames._FIELDS.pack(frames.MAGIC, 1, 0, 2**40, 0)
    data += frames._CHECK.pack(frames.zlib.crc32(data))
    assert frames.header(data) is None
