"""The documentation is checked like code: tables are what the code says, samples run."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import messaging

ROOT = Path(__file__).parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = load()


@pytest.mark.parametrize(
    ("name", "row"), [("features", "| `acknowledge` |"), ("settings", "| `prefetch` |"), ("amqp", "| `queueType` |")]
)
def test_what_is_generated_is_what_the_code_says(name: str, row: str) -> None:
    (part,) = (part for part in GENERATED.PARTS if part.name == name)
    text = part.page.read_text()
    assert row in text
    assert part.replaced() == text, "run: python docs/generated.py --write"


def samples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


SAMPLES = samples(ROOT / "README.md")
SAMPLES_OF_EVENTS = samples(ROOT / "docs" / "events.md")


def run_sample(sample: str) -> str:
    result = subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", "-c", sample],
        capture_output=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    return result.stdout


def named_tests(page: Path) -> list[tuple[str, str]]:
    """The tests that a page names, each of which exists."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    for path, name in named:
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    return named


#: what the samples of the README print, in their order
PRINTED = [
    "21.5 °C\n",
    "sensors/attic {'celsius': 21.5}\n",
    "{'celsius': 21.5}\n",
    "21.5\n",
    "6\n",
    "",
    "attic is warm\n",
]


def test_the_first_sample_of_the_readme_is_a_handler() -> None:
    assert "@m.on(" in SAMPLES[0]
    assert len(SAMPLES) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
@pytest.mark.parametrize("broker", ["memory", "mosquitto", "rabbitmq"])
def test_sample_of_the_readme_runs(request: pytest.FixtureRequest, broker: str, number: int) -> None:
    sample = SAMPLES[number]
    if broker != "memory":
        if "memory://" not in sample:
            pytest.skip("needs no broker")
        sample = sample.replace("memory://readme", request.getfixturevalue(broker).url)
    assert run_sample(sample) == PRINTED[number]


@pytest.mark.parametrize("broker", ["memory", "mosquitto", "rabbitmq"])
def test_the_examples_of_the_package_run(request: pytest.FixtureRequest, broker: str) -> None:
    text = messaging.__doc__ or ""
    if broker != "memory":
        text = text.replace("memory://demo", request.getfixturevalue(broker).url)
    example = doctest.DocTestParser().get_doctest(text, {}, f"messaging on {broker}", None, None)
    assert len(example.examples) > 3
    told: list[str] = []
    for _ in range(5):  # an example that depends on luck fails in one of them
        failed, _ = doctest.DocTestRunner().run(example, out=told.append, clear_globs=False)
        assert not failed, "".join(told)


@pytest.mark.parametrize("number", range(len(SAMPLES_OF_EVENTS)))
def test_sample_of_the_page_on_events_runs(number: int) -> None:
    run_sample(SAMPLES_OF_EVENTS[number])


def test_sample_of_the_page_on_extensions_runs() -> None:
    """A context builder of one's own, found by its feature."""
    (sample,) = (each for each in samples(ROOT / "docs" / "extensions.md") if "register_context_builder" in each)
    run_sample(sample)


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
    assert len(named_tests(ROOT / "docs" / "requirements.md")) > 25


def test_every_requirement_of_the_event_services_names_a_test_that_exists() -> None:
    assert len(named_tests(ROOT / "docs" / "event-requirements.md")) > 220
