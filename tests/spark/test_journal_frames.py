"""Frames: whole or not there."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.spark.journal import frames

SEED = 77


def image(*bodies: bytes, first: int = 5, seed: int = SEED) -> bytes:
    parts = []
    for number, body in enumerate(bodies):
        parts += [bytes(part) for part in frames.encode(first + number, 1, pa.py_buffer(body), seed)]
    return b"".join(parts)


def scanned(data: bytes, seed: int = SEED) -> list[bytes]:
    return [frame.body.to_pybytes() for frame in frames.scan(pa.py_buffer(data), seed) if frame.is_intact()]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_encoded_frames_are_scanned(bodies: list[bytes]) -> None:
    data = image(*bodies)
    assert scanned(data) == bodies
    found = list(frames.scan(pa.py_buffer(data), SEED))
    assert [frame.header.first for frame in found] == list(range(5, 5 + len(bodies)))
    assert [frame.position for frame in found[1:]] == [frame.end for frame in found[:-1]]


def test_a_frame_that_is_cut_anywhere_is_invalid() -> None:
    data = image(b"first", b"the second")
    whole = len(image(b"first"))
    for cut in range(len(data)):
        assert scanned(data[:cut]) == ([b"first"] if cut >= whole else [])


def test_every_bit_that_flips_is_noticed() -> None:
    data = bytearray(image(b"a body"))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert scanned(bytes(data)) == []
        data[bit // 8] ^= 1 << bit % 8
    assert scanned(bytes(data)) == [b"a body"]


def test_frames_of_another_log_are_invalid() -> None:
    assert scanned(image(b"a"), seed=SEED + 1) == []


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
