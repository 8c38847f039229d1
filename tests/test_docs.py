"""The documentation is checked like code: tables are what the code says, samples run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_feature_table_of_the_readme_is_what_the_adapters_announce() -> None:
    module = load("feature_table")
    text = (ROOT / "README.md").read_text()
    assert "| `acknowledge` |" in text
    assert module.replaced(text) == text, "run: python docs/feature_table.py --write"


def test_settings_page_is_what_the_settings_classes_say() -> None:
    module = load("settings_table")
    text = (ROOT / "docs" / "settings.md").read_text()
    assert module.replaced(text) == text, "run: python docs/settings_table.py --write"


SAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_sample_of_the_readme_runs(number: int) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SAMPLES[number]], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_requirement_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "requirements.md").read_text()
    numbers = [*range(10, 100, 20), 60, 80, 95, 100, *range(120, 190, 10), 200, 205, *range(210, 270, 10)]
    for number in numbers:
        assert f"| MSG{number:03} |" in page
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 25
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
