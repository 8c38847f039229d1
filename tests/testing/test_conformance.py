"""The conformance suite as another project runs it: from the wheel, against an adapter of another package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from messaging.testing.brokers import Mosquitto, free_port
from tests.doubles.fixtures import install
from tests.scripts import ROOT

#: an adapter that announces what it cannot do, for the suite to find
ADAPTERS = """
from dataclasses import replace
from pathlib import Path
import messaging.testing
from messaging_adapters.mqtt import MqttAdapter

assert Path(messaging.testing.__file__).is_relative_to(Path(__file__).parent), "not the installed package"

class PlainAdapter(MqttAdapter):
    provider = "third.party"

class BoastfulAdapter(MqttAdapter):
    async def open(self, events):
        resumed = await super().open(events)
        features = self.capabilities.features | {"priority"}
        self.capabilities = replace(self.capabilities, features=features)
        return resumed
"""
ENTRY_POINTS = "[messaging.adapters]\nplain = third_party:PlainAdapter\nboastful = third_party:BoastfulAdapter\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the wheel of this project and another package are installed."""
    folder = tmp_path_factory.mktemp("site")
    wheels = tmp_path_factory.mktemp("wheels")
    run(ROOT, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels))
    (wheel,) = wheels.glob("*.whl")
    run(wheels, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder), str(wheel))
    install(folder, "third-party", ENTRY_POINTS)
    (folder / "third_party.py").write_text(ADAPTERS)
    return folder


def run(cwd: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run Python and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def suite(site: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the suite in an empty folder, where it finds the installed packages alone."""
    options = ("-q", "-p", "no:cacheprovider")
    return run(folder, "-m", "messaging.testing.conformance", *arguments, *options, code=code, PYTHONPATH=str(site))


def test_an_adapter_of_another_package_passes(site: Path, tmp_path: Path, mosquitto: Mosquitto) -> None:
    url = mosquitto.url.replace("mqtt:", "plain:")
    told = suite(site, tmp_path, url, "-k", "test_coverage or test_publish or test_queues or test_reconnect")
    passed = re.search(r"(\d+) passed", told)
    assert passed is not None
    assert int(passed[1]) > 40


def test_an_announced_feature_without_effect_fails(site: Path, tmp_path: Path, mosquitto: Mosquitto) -> None:
    url = mosquitto.url.replace("mqtt:", "boastful:")
    told = suite(site, tmp_path, url, "-k", "priority or every_announced", code=1)
    assert "test_what_has_priority_overtakes_what_waits[boastful-1]" in told


def test_a_url_without_a_port_is_an_error_that_says_so(site: Path, tmp_path: Path) -> None:
    assert "no port; name it" in suite(site, tmp_path, "plain://u:secret@127.0.0.1", code=4)


def test_a_broker_that_cannot_be_reached_ends_the_run_at_once(site: Path, tmp_path: Path) -> None:
    told = suite(site, tmp_path, f"plain://127.0.0.1:{free_port()}", code=4)
    assert "cannot connect to 127.0.0.1" in told
    assert "Traceback" not in told


def test_without_its_options_the_suite_needs_no_plugin_on_the_command_line(site: Path, tmp_path: Path) -> None:
    arguments = ("-m", "pytest", "-q", "-W", "error", "--pyargs", "messaging.testing.conformance")
    told = run(tmp_path, *arguments, "-k", "test_coverage and memory", PYTHONPATH=str(site))
    assert "1 passed" in told
