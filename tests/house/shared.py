"""Lines that two places of the sources have in common."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.house.sources import House, lines_of

#: the shortest run of lines that counts
LEAST = 6


class Run(NamedTuple):
    """Lines that stand, one after the other, in two places."""

    length: int
    first: tuple[Path, int]
    second: tuple[Path, int]
    text: str

    def __str__(self) -> str:
        places = " = ".join(f"{file}:{line}" for file, line in (self.first, self.second))
        return f"{self.length} lines: {places}: {self.text}"


def shared_runs(house: House) -> list[Run]:
    """Return the pairs of places that have ``LEAST`` lines or more in common, the longest first.

    Lines are compared without their indentation. Blank lines, comments, docstrings, imports and lines that consist of
    punctuation do not count. A run is as long as both places agree; two places in one file do not overlap.
    """
    lines = {file: _lines(house, file) for file in house.product}
    windows: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for file, numbered in lines.items():
        texts = [text for _, text in numbered]
        for start in range(len(texts) - LEAST + 1):
            windows[tuple(texts[start : start + LEAST])].append((file, start))
    found = []
    for places in windows.values():
        for first, second in itertools.combinations(places, 2):
            if not _agree(lines, first, second, -1):
                length = next(step for step in itertools.count(LEAST) if not _agree(lines, first, second, step))
                if first[0] == second[0]:
                    length = min(length, second[1] - first[1])
                if length >= LEAST:
                    (one, start), (other, at) = first, second
                    number, text = lines[one][start]
                    found.append(Run(length, (one, number), (other, lines[other][at][0]), text))
    return sorted(found, key=lambda run: (-run.length, run.first, run.second))


def _agree(
    lines: dict[Path, list[tuple[int, str]]], first: tuple[Path, int], second: tuple[Path, int], step: int
) -> bool:
    """Return whether the lines ``step`` lines behind two places are the same."""
    (one, start), (other, at) = first, second
    start, at = start + step, at + step
    is_inside = 0 <= start < len(lines[one]) and 0 <= at < len(lines[other])
    return is_inside and lines[one][start][1] == lines[other][at][1]


def _lines(house: House, file: Path) -> list[tuple[int, str]]:
    """Return number and text of the lines that count."""
    imports = [node for node in house.nodes[file] if isinstance(node, ast.Import | ast.ImportFrom)]
    skipped = {line for node in imports for line in lines_of(node)}
    return [(number, text) for number, text in house.code(file) if number not in skipped and re.search(r"\w", text)]
