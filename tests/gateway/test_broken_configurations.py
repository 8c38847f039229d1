"""``messaging gateway check`` on configurations with one error each, in ``tests/gateway/broken``.

The line with the error ends with ``#! KEY: TEXT``: the key that the check must name with this line, and a part of what
it must say. An empty key stands for the whole file.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from messaging.cli.app import run
from messaging.errors import GatewaySettingsError
from messaging.gateway import load, read
from messaging.testing.tables import table

FOLDER = Path(__file__).parent / "broken"
FILES = sorted(each for each in FOLDER.iterdir() if each.suffix in (".toml", ".yaml", ".yml"))
_MARK = re.compile(r"#! ([^:]*): (.*)$")


def expected(file: Path) -> tuple[int, str, str]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        found = _MARK.search(line)
        if found is not None:
            return number, found[1], found[2]
    raise AssertionError(f"{file} has no mark")


def test_there_are_enough() -> None:
    assert len(FILES) >= 40


@table("file", FILES, ids=lambda each: each.stem)
def test_the_check_names_line_key_and_fix_and_nothing_loads(
    file: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    line, key, text = expected(file)
    assert run(["gateway", "check", str(file)]) == 1
    errors = [each for each in capfdbinary.readouterr().out.decode().splitlines() if ": error: " in each]
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"{file}:{line}:"), errors[0]
    _, _, said = errors[0].partition(": error: ")
    if key:
        assert said.startswith(f"{key}: "), said
    assert text in said, said
    with pytest.raises(GatewaySettingsError) as refusal:
        load(file)
    assert sum("error: " in str(each) for each in refusal.value.problems) == 1
    assert read(file).settings is None
