"""A user's application is accepted by mypy and pyright in strict mode, and its mistakes are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
APPLICATION = Path(__file__).with_name("application.py")
MARK = "  # error"
#: seconds that a checker may take on a busy machine
#: without a cache a type checker reads the stubs of every dependency
CHECKING = 12 * PATIENCE

MARKED = [number for number, line in enumerate(APPLICATION.read_text().splitlines(), 1) if line.endswith(MARK)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The application, and the Rx sample of ``docs/basics.md``."""
    samples = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "basics.md").read_text(), re.MULTILINE | re.DOTALL)
    (sample,) = (each for each in samples if "reactivex" in each)
    path = tmp_path_factory.mktemp("typing") / "sample.py"
    path.write_text(sample)
    return {"application": APPLICATION, "sample": path}


def mypy(paths: list[Path], _: Path) -> set[tuple[str, int]]:
    """The files and lines that mypy --strict refuses."""
    cache = ROOT / ".cache" / "mypy-application"  # kept: the next run takes a fifth of the time
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", "--cache-dir", str(cache)]
        + [str(path) for path in paths],
        cwd=ROOT, capture_output=True, text=True, timeout=CHECKING, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return {
        (Path(found[1]).stem, int(found[2]))
        for line in done.stdout.splitlines()
        if (found := re.match(r"(.*?):(\d+): error:", line))
    }


def pyright(paths: list[Path], folder: Path) -> set[tuple[str, int]]:
    """The files and lines that pyright in strict mode refuses."""
    config = folder / "pyrightconfig.json"
    settings = {"typeCheckingMode": "strict", "include": [str(path) for path in paths], "extraPaths": [str(ROOT)]}
    config.write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(config), "--pythonpath", sys.executable],
        cwd=ROOT, capture_output=True, text=True, timeout=CHECKING, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(paths), done.stdout
    return {
        (Path(each["file"]).stem, each["range"]["start"]["line"] + 1)
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_an_application_is_accepted_and_its_mistakes_are_refused(
    checker: object, files: dict[str, Path], tmp_path: Path
) -> None:
    assert len(MARKED) > 20
    assert len(APPLICATION.read_text().splitlines()) >= 200
    assert callable(checker)
    found = checker([*files.values()], tmp_path)
    assert sorted(line for name, line in found if name == "application") == MARKED
    assert not [line for name, line in found if name == "sample"]
