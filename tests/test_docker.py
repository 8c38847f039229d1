"""The files under ``docker``: as far as they can be checked without an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from messaging.testing.brokers import Mosquitto, RabbitMQ, require

DOCKER = Path(__file__).parents[1] / "docker"
COMPOSE = DOCKER / "compose.yml"


def test_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "--file", str(COMPOSE), "--profile", "cli", "config", "--quiet"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_brokers_without_passwords_are_published_on_loopback_only() -> None:
    ports = re.findall(r'- "([\d.:]*\d+:\d+)"', COMPOSE.read_text())
    assert len(ports) >= 4
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_mounted_file_is_there() -> None:
    mounted = re.findall(r"- \./(\S+?):/\S+:ro$", COMPOSE.read_text(), re.MULTILINE)
    assert len(mounted) == 3
    assert [path for path in mounted if not (DOCKER / path).is_file()] == []


def test_mosquitto_understands_its_configuration() -> None:
    require("mosquitto")
    lines = (DOCKER / "mosquitto/mosquitto.conf").read_text().splitlines()
    with Mosquitto([line for line in lines if not line.startswith(("listener", "persistence_location"))]) as broker:
        assert broker.running


@pytest.mark.slow
def test_rabbitmq_understands_its_configuration() -> None:
    require("rabbitmq")
    lines = (DOCKER / "rabbitmq/messaging.conf").read_text().splitlines()
    with RabbitMQ([line for line in lines if "listeners" not in line], plugins=["rabbitmq_mqtt"]) as broker:
        assert broker.running


def test_image_does_not_run_as_root_and_copies_only_existing_files() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"messaging", "adapters", "pyproject.toml"} <= set(copied)
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert [name for name in copied if f"!{name}" not in ignored] == []
    assert [name for name in copied if not (DOCKER.parent / name).exists()] == []
