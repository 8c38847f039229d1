"""The files under ``docker``: as far as they can be checked without an engine."""

from __future__ import annotations

import configparser
import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import messaging
from messaging.gateway import Gateway, GatewaySettings, load
from messaging.testing.brokers import Mosquitto, RabbitMQ, free_port, require
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE, Recorder, eventually, subscribed
from tests.certificates import LOOPBACK, Authority
from tests.gateway.kit import Broker, route, settings, unique

yaml = pytest.importorskip("yaml")

ROOT: Final = Path(__file__).parents[1]
DOCKER: Final = ROOT / "docker"
COMPOSE: Final = DOCKER / "compose.yml"
GATEWAYS: Final = tuple(DOCKER / f"compose.{name}.yml" for name in ("gateway", "gateway-tls", "cluster"))
FILES: Final = (COMPOSE, *GATEWAYS)
UNIT: Final = DOCKER / "gateway" / "rx-messaging-gateway.service"
KUBERNETES: Final = DOCKER / "kubernetes"
#: values of the variables that the files need
VARIABLES: Final = {
    "MOSQUITTO_PASSWORD": "m", "RABBITMQ_PASSWORD": "r", "RABBITMQ_COOKIE": "c", "CERTIFICATES": "/certificates",
}  # fmt: skip
#: time that a gateway needs to close its connections, after it has published what is stored, seconds
CLOSING: Final = 10.0
#: bytes of the image of the gateway, at most; and of its base: public listings of python:3.*-alpine say 43 to 50 MB
MAX_IMAGE: Final = 120_000_000
BASE_IMAGE: Final = 50_000_000


def compose(file: Path) -> dict[str, Any]:
    """Return a compose file with its variables put in, as `docker compose config` would."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        return "$" if name is None else VARIABLES.get(name, (default or "").removeprefix("-"))

    text = re.sub(r"\$(?:\$|\{(\w+)(?::([-?][^}]*))?\})", value, file.read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


SERVICES: Final = [
    pytest.param(file, name, service, id=f"{file.stem}-{name}")
    for file in FILES
    for name, service in compose(file)["services"].items()
]


# --- compose files


@table("file", FILES, ids=lambda file: file.stem)
def test_compose_accepts_the_file(file: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "--file", str(file), "--profile", "cli", "config", "--quiet"]
    environment = {**os.environ, **VARIABLES}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@table("file, name, service", SERVICES)
def test_ports_are_published_on_loopback_only(file: Path, name: str, service: dict[str, Any]) -> None:
    ports = service.get("ports", [])
    assert [port for port in ports if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []
    assert ports or name == "messaging"


@table("file", FILES, ids=lambda file: file.stem)
def test_no_two_services_want_one_port_or_volume(file: Path) -> None:
    services = compose(file)["services"].values()
    ports = [port.rpartition(":")[0] for service in services for port in service.get("ports", [])]
    volumes = [each.partition(":")[0] for service in services for each in service.get("volumes", [])]
    named = [each for each in volumes if not each.startswith((".", "/"))]
    assert len(ports) == len(set(ports))
    assert sorted(named) == sorted(compose(file)["volumes"])


@table("file, name, service", SERVICES)
def test_images_are_pinned_and_services_have_health_checks(file: Path, name: str, service: dict[str, Any]) -> None:
    if name == "messaging":  # the command line, built from the sources
        assert (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        return
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+(-\w+)?", service["image"])
    check = service["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)


@table("file", FILES, ids=lambda file: file.stem)
def test_every_mounted_file_is_there(file: Path) -> None:
    mounted = [
        volume.split(":")[0]
        for service in compose(file)["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]
    assert len(mounted) >= 3
    assert [path for path in mounted if not (DOCKER / path).is_file()] == []


@table("file", GATEWAYS, ids=lambda file: file.stem)
def test_passwords_come_from_required_variables_and_secrets(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"^\s*\w*PASS\w*: (.*)$", text, re.MULTILINE)) == {
        "${RABBITMQ_PASSWORD:?set it to a long random password}"
    }
    assert "guest" not in text
    assert {tuple(each) for each in compose(file)["secrets"].values()} == {("environment",)}
    used = set(re.findall(r"\$\{(\w+)", text)) | {each["environment"] for each in compose(file)["secrets"].values()}
    assert used <= VARIABLES.keys()
    head = text.partition("\nname:")[0]
    assert [name for name in used if f"{name}=" not in head] == [], "the head of the file tells of each variable"


@table("file", GATEWAYS, ids=lambda file: file.stem)
def test_a_gateway_in_a_container_has_no_privileges_and_time_to_drain(file: Path) -> None:
    services = compose(file)["services"]
    for name in ("gateway", "mosquitto"):
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
    gateway = services["gateway"]
    grace = float(gateway["stop_grace_period"].removesuffix("s"))
    assert grace >= GatewaySettings.model_fields["drain_timeout"].default + CLOSING
    assert {each.split(":")[1] for each in gateway["volumes"]} >= {"/var/lib/rx-messaging-gateway"}
    mounted = {secret for service in services.values() for secret in service.get("secrets", [])}
    assert mounted == set(compose(file)["secrets"])


@table("file", GATEWAYS, ids=lambda file: file.stem)
def test_the_configuration_fits_the_services(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = compose(file)["services"]
    gateway = services["gateway"]
    (tmp_path / "password").write_text("x\n")
    certificate = Authority(tmp_path).cafile
    monkeypatch.setenv("GATEWAY_DATA", str(tmp_path / "data"))
    for name in ("MOSQUITTO", "RABBITMQ"):
        monkeypatch.setenv(f"{name}_PASSWORD_FILE", str(tmp_path / "password"))
    for name, value in gateway.get("environment", {}).items():
        monkeypatch.setenv(name, value.replace("/certificates/ca.pem", str(certificate)))
    found = load(DOCKER / "gateway" / "gateway.toml")
    for instance in found.instances.values():
        parsed = messaging.model.parse_url(instance.url)
        assert [host.name for host in parsed.hosts if host.name not in services] == []
        assert parsed.password is None
    assert found.monitoring is not None
    port = found.monitoring.rpartition(":")[2]
    assert [each.split(":")[-1] for each in gateway["ports"]] == [port]
    assert f"http://127.0.0.1:{port}/healthz" in gateway["healthcheck"]["test"]
    if "tls" in file.stem:
        assert [each.url.partition(":")[0] for each in found.instances.values()] == ["mqtts", "amqps"]


# --- configurations of brokers


def lines_of(name: str, *without: str) -> list[str]:
    """Return the lines of a configuration; what a private broker decides itself is left out."""
    lines = (DOCKER / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", *without))]


def test_mosquitto_understands_its_configuration() -> None:
    require("mosquitto")
    with Mosquitto(lines_of("mosquitto/mosquitto.conf", "listener", "persistence_location")) as broker:
        assert broker.running


def made_passwords(folder: Path, password: str) -> Path:
    """Run the start script of Mosquitto's container up to the broker; return the file of passwords that it made."""
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto_passwd is not installed")
    (folder / "secret").write_text(password)
    script = (DOCKER / "gateway" / "mosquitto.sh").read_text()
    made = folder / "passwords"
    for old, new in {
        "/run/secrets/mosquitto_password": str(folder / "secret"),
        "/tmp/passwords": str(made),
        "exec mosquitto -c /mosquitto/config/mosquitto.conf": "exec true",
    }.items():
        assert old in script
        script = script.replace(old, new)
    subprocess.run(["sh", "-c", script], check=True, capture_output=True, timeout=PATIENCE)
    assert password not in made.read_text()
    assert made.stat().st_mode & 0o077 == 0
    return made


def gateway_mosquitto(folder: Path, name: str, password: str) -> Mosquitto:
    """Return a Mosquitto with the configuration of a compose file; ``folder`` has its certificates."""
    passwords = made_passwords(folder, password)
    kept = lines_of(f"gateway/{name}", "listener", "persistence_location", "password_file", "log_dest")
    lines = [line.replace("/certificates/", f"{folder}/") for line in kept]
    return Mosquitto([*lines, f"password_file {passwords}", "log_type all", f"persistence_location {folder}/"])


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_the_gateway_of_the_compose_files_runs(
    protocol: str, rabbitmq: RabbitMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("mosquitto")
    scheme, options, name = "mqtt", "?version=5", "mosquitto.conf"
    if protocol == "tls":
        authority = Authority(tmp_path, "ca")
        authority.issue("mosquitto", LOOPBACK)
        scheme, options, name = "mqtts", f"?version=5&cafile={authority.cafile}", "mosquitto-tls.conf"
    (tmp_path / "mosquitto").write_text("a b$'c\n")
    (tmp_path / "rabbitmq").write_text("guest\n")
    with gateway_mosquitto(tmp_path, name, "a b$'c") as broker:
        at = f"127.0.0.1:{broker.port}{options}"
        for variable, value in {
            "GATEWAY_DATA": tmp_path / "data",
            "GATEWAY_MONITORING": f"127.0.0.1:{free_port()}",
            "MOSQUITTO_URL": f"{scheme}://devices@{at}",
            "MOSQUITTO_PASSWORD_FILE": tmp_path / "mosquitto",
            "RABBITMQ_URL": rabbitmq.url.replace("guest:guest@", "guest@"),
            "RABBITMQ_PASSWORD_FILE": tmp_path / "rabbitmq",
        }.items():
            monkeypatch.setenv(variable, str(value))
        arrived: Recorder[messaging.Message] = Recorder()
        with (
            Gateway(load(DOCKER / "gateway" / "gateway.toml")) as gateway,
            messaging.connect(f"{scheme}://devices@{at}", password="a b$'c") as devices,
            messaging.connect(rabbitmq.url) as applications,
        ):
            applications.on("telemetry/#", lambda message: arrived.append(message))
            eventually(lambda: all(each.is_source_up and each.is_target_up for each in gateway.report().routes), "up")

            def is_passed_on() -> bool:
                devices.publish("devices/d1/temperature", b"21", qos=1).result(PATIENCE)
                return bool(arrived)

            eventually(is_passed_on, "telemetry")
            assert (arrived[0].context.channel, arrived[0].payload) == ("telemetry/d1/temperature", b"21")
        with pytest.raises(messaging.MessagingError), messaging.connect(f"{scheme}://{at}", connect_timeout=PATIENCE):
            pass  # without a password


@pytest.mark.slow
@pytest.mark.parametrize("names", [["rabbitmq/messaging"], ["gateway/rabbitmq", "gateway/rabbitmq-cluster"]], ids=str)
def test_rabbitmq_understands_its_configuration(names: list[str]) -> None:
    require("rabbitmq")
    # the hosts of the cluster are not there: a node alone would wait for them
    lines = [line for name in names for line in lines_of(f"{name}.conf", "cluster_formation")]
    with RabbitMQ([line for line in lines if "listeners" not in line], plugins=["rabbitmq_mqtt"]) as broker:
        assert broker.running


@pytest.mark.slow
def test_rabbitmq_understands_its_configuration_with_tls(tmp_path: Path) -> None:
    require("rabbitmq")
    authority, port = Authority(tmp_path, "ca"), free_port()
    authority.issue("rabbitmq", LOOPBACK)
    tmp_path.chmod(0o755)
    (tmp_path / "rabbitmq.key").chmod(0o644)
    kept = lines_of("gateway/rabbitmq-tls.conf", "listeners.tcp", "mqtt.listeners", "stream.listeners")
    lines = [
        line.replace("/certificates/", f"{tmp_path}/").replace("ssl.default = 5671", f"ssl.1 = 127.0.0.1:{port}")
        for line in kept
    ]
    with RabbitMQ(lines, plugins=["rabbitmq_mqtt"]):
        url = f"amqps://guest:guest@127.0.0.1:{port}/?cafile={authority.cafile}"
        with messaging.connect(url) as m:
            assert m.connection_state.value.is_up


def test_a_listener_without_tls_is_only_where_the_name_of_the_file_does_not_promise_it() -> None:
    assert lines_of("gateway/rabbitmq-tls.conf")[:1] == ["listeners.tcp = none"]
    assert {"mqtt.listeners.tcp = none", "stream.listeners.tcp = none"} <= set(lines_of("gateway/rabbitmq-tls.conf"))
    listeners = [line for line in lines_of("gateway/mosquitto-tls.conf") if line.startswith("listener")]
    assert listeners == ["listener 8883"]
    for name in ("mosquitto.conf", "mosquitto-tls.conf"):
        assert "allow_anonymous false" in lines_of(f"gateway/{name}")


# --- images


@table("name", ["Dockerfile", "gateway/Dockerfile"])
def test_images_are_pinned_run_without_root_and_copy_only_existing_files(name: str) -> None:
    text = (DOCKER / name).read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users
    assert not users[-1].startswith(("root", "0"))
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        pinned = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], base)
        assert re.fullmatch(r"python:3\.\d+\.\d+-(slim-\w+|alpine\d+\.\d+)", pinned)
    copied = [each for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for each in line.split()]
    assert {"messaging", "adapters", "pyproject.toml"} <= set(copied)
    ignored = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert [each for each in copied if f"!{each}" not in ignored] == []
    assert [each for each in copied if not (ROOT / each).exists()] == []


def _gateway_requirements() -> set[str]:
    """Return the names of the packages that the image of the gateway installs, without the project itself."""
    text = (DOCKER / "gateway" / "Dockerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pending = [Requirement(each) for each in project["dependencies"]]
    for extra in extras.split(","):
        pending += [Requirement(each) for each in project["optional-dependencies"][extra]]
    found: set[str] = set()
    while pending:
        each = pending.pop()
        name = canonicalize_name(each.name)
        if name in found or name == "rx-messaging" or (each.marker is not None and not each.marker.evaluate()):
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                pending.append(needed)
    return found


def _pinned() -> dict[str, str]:
    lines = lines_of("gateway/constraints.txt")
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_package_of_the_image_is_pinned_and_fits_the_requirements() -> None:
    pinned = _pinned()
    assert _gateway_requirements() - pinned.keys() == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for each in (Requirement(text) for group in groups for text in group):
        version = pinned.get(canonicalize_name(each.name))
        assert version is None or each.specifier.contains(version), str(each)


def test_the_image_of_the_gateway_is_small() -> None:
    """Computed, not measured: the base, the packages as they are installed here, and the project with its bytecode."""
    files = [
        Path(str(file.locate()))
        for name in _gateway_requirements()
        for file in importlib.metadata.files(name) or ()
        if file.suffix != ".pyc"
    ]
    own = [file for top in ("messaging", "adapters") for file in (ROOT / top).rglob("*.py")]
    total = 0
    for file in {*files, *own}:
        if file.is_file():
            # bytecode is about as large as its source, and the wheel of Alpine about as large as that of Debian
            total += file.stat().st_size * (2 if file.suffix == ".py" else 1)
    assert total > 20_000_000, "the packages were not found"
    installed = total * 1.1  # metadata, scripts, and bytecode that is larger than its source
    assert BASE_IMAGE + installed <= MAX_IMAGE, f"{installed / 1e6:.1f} MB beside the base"


def test_the_image_has_a_health_check_and_ends_by_sigterm() -> None:
    text = (DOCKER / "gateway" / "Dockerfile").read_text()
    assert re.search(r"^STOPSIGNAL SIGTERM$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n\s+CMD \[.*/healthz\"\]$", text, re.MULTILINE)
    assert "--only-binary=:all:" in text
    assert "--constraint" in text


# --- systemd


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(UNIT)
    return found


def seconds(text: str) -> float:
    number, kind = re.fullmatch(r"(\d+)(s|min)", text).groups()  # type: ignore[union-attr]
    return float(number) * (60 if kind == "min" else 1)


def test_the_unit_is_that_of_a_service_that_notifies() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].split()[1:] == ["gateway", "run", "/etc/rx-messaging/gateway.toml"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert seconds(service["TimeoutStopSec"]) >= GatewaySettings.model_fields["drain_timeout"].default + CLOSING
    assert seconds(service["WatchdogSec"]) >= 10
    assert service["Restart"] == "on-failure"
    assert service["LoadCredential"].startswith("cloud-password:/etc/rx-messaging/")


def test_the_unit_has_the_least_privilege() -> None:
    service = unit()["Service"]
    for key in ("NoNewPrivileges", "PrivateTmp", "MemoryDenyWriteExecute", "DynamicUser", "PrivateDevices"):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == ""
    assert set(service["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}
    assert service["StateDirectory"] == "rx-messaging-gateway"


@pytest.fixture
def installed_unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    found = tmp_path / UNIT.name
    found.write_text(UNIT.read_text().replace("/opt/rx-messaging/bin/messaging", "/bin/true"))
    return found


def test_systemd_accepts_the_unit(installed_unit: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(installed_unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_finds_the_unit_little_exposed(installed_unit: Path) -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=15", str(installed_unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze is older than 250")
    assert done.returncode == 0, done.stdout[-300:]
    assert re.search(r"Overall exposure level .*: (0\.\d|1\.[0-5]) OK", done.stdout)


def test_the_gateway_needs_no_memory_that_is_writable_and_executable(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute, by the system call of Linux 6.3 instead of systemd's filter."""
    program = tmp_path / "program.py"
    example = ROOT / "examples" / "18_gateway.py"
    program.write_text(
        "import ctypes, runpy, sys\n"
        "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):\n"
        "    sys.exit(77)\n"
        f"sys.argv = [{str(example)!r}]\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip("the kernel cannot deny it")
    assert done.returncode == 0, done.stderr
    assert "2 published" in done.stdout


class Manager:
    """The notification socket of systemd, as a service sees it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(0.1)
        self.told: list[dict[str, str]] = []

    def wait(self, key: str, value: str | None = None, *, after: int = 0) -> None:
        """Wait until the service has told a value."""

        def is_told() -> bool:
            with contextlib.suppress(TimeoutError):
                text = self._socket.recv(4096).decode()
                self.told.append(dict(line.split("=", 1) for line in text.splitlines()))
            return any(key in each and value in (None, each[key]) for each in self.told[after:])

        eventually(is_told, f"{key}={value}; told {self.told}")

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def served(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_command_of_the_unit_behaves_as_the_unit_expects(tmp_path: Path) -> None:
    """With the variables that systemd sets for Type=notify, WatchdogSec and LoadCredential."""
    require("mosquitto")
    with gateway_mosquitto(tmp_path, "mosquitto.conf", "secret") as broker:
        credentials = tmp_path / "credentials"
        credentials.mkdir()
        (credentials / "cloud-password").write_text("secret\n")
        file = tmp_path / "gateway.toml"
        file.write_text(
            f"""
name = "unit"
data = "{tmp_path}/state"
[instances.cloud]
url = "mqtt://devices@127.0.0.1:{broker.port}"
credential = "cloud-password"
[routes.all]
from = {{ instance = "cloud", channel = "a" }}
to = {{ instance = "cloud", channel = "b" }}
buffer = {{ full = "block" }}
"""
        )
        manager = Manager(tmp_path)
        path = str(UNIT.read_text().partition("ExecStart=")[2].splitlines()[0].split()[-1])
        assert path == "/etc/rx-messaging/gateway.toml"
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(manager.path),
            "WATCHDOG_USEC": "600000",
            "CREDENTIALS_DIRECTORY": str(credentials),
        }
        command = [sys.executable, "-m", "messaging", "gateway", "run", str(file)]
        with served(command, environment, tmp_path / "log") as process, contextlib.closing(manager):
            manager.wait("READY", "1")
            manager.wait("WATCHDOG", "1")
            status = [each["STATUS"] for each in manager.told if "STATUS" in each]
            assert status[0] == "1 routes, 0 messages stored"
            before = len(manager.told)
            process.send_signal(signal.SIGHUP)
            manager.wait("RELOADING", "1", after=before)
            manager.wait("READY", "1", after=before)
            process.send_signal(signal.SIGTERM)
            manager.wait("STOPPING", "1", after=before)
            assert process.wait(PATIENCE) == 0
        log = (tmp_path / "log").read_text()
        assert "secret" not in log.replace("/secret", "")
        assert stat_mode(tmp_path / "state") == 0o700


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# --- Kubernetes


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a file by their kinds."""
    found = [each for each in yaml.safe_load_all((KUBERNETES / name).read_text()) if each is not None]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def test_one_pod_at_a_time_has_the_buffers() -> None:
    found = objects("gateway.yaml")
    assert set(found) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "NetworkPolicy"}
    spec = found["Deployment"]["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOncePod"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_pod_has_no_privileges_and_its_volumes_are_there() -> None:
    found = objects("gateway.yaml")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+", container["image"])
    assert {"requests", "limits"} <= container["resources"].keys()
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    user = (DOCKER / "gateway" / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in user


def test_probes_ask_the_gateway_at_the_address_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects("gateway.yaml")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (environment,) = container["env"]
    assert environment == {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    paths = {}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[name]
        assert probe["httpGet"]["port"] in ports
        assert probe["timeoutSeconds"] < probe["periodSeconds"]
        paths[name] = probe["httpGet"]["path"]
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}

    # the configuration of the map is right, and its paths are those of the mounts
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    file = tmp_path / "gateway.toml"
    text = found["ConfigMap"]["data"]["gateway.toml"]
    document = tomllib.loads(text)
    mounts = tuple(each["mountPath"] for each in container["volumeMounts"])
    secret = Path(document["instances"]["cloud"]["password_file"])
    assert str(secret.parent) in mounts
    assert document["data"].startswith(mounts)
    (tmp_path / "password").write_text("x")
    file.write_text(text.replace(str(secret), str(tmp_path / "password")).replace(document["data"], str(tmp_path)))
    settings = load(file)
    assert settings.monitoring == f"10.1.2.3:{ports['monitoring']}"
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout + CLOSING
    storage = found["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"]
    assert sum(each.buffer.max_bytes for each in settings.routes.values()) < int(storage.removesuffix("Gi")) * 2**30
    assert secret.name in objects("secret.example.yaml")["Secret"]["stringData"]


def test_the_example_of_a_secret_has_no_values() -> None:
    secret = objects("secret.example.yaml")["Secret"]
    assert set(secret["stringData"].values()) == {""}
    (volume,) = (
        each
        for each in objects("gateway.yaml")["Deployment"]["spec"]["template"]["spec"]["volumes"]
        if "secret" in each
    )
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]


# --- the data folder, as docs/operations.md has it


def test_a_copy_of_the_folder_of_a_stopped_gateway_goes_on_elsewhere(mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = unique("moved")

    def chosen(folder: str, target: str) -> GatewaySettings:
        instances = {"a": {"url": f"memory://{name}"}, "b": {"url": target}}
        routes = {"all": route("a", f"{name}/b")}
        return settings(tmp_path / folder, name=name, instances=instances, routes=routes, drain_timeout=0.1)

    with Gateway(chosen("first", "mqtt://127.0.0.1:1")) as gateway, Broker(f"memory://{name}") as plant:
        eventually(lambda: gateway.report().routes[0].is_subscribed)
        plant.send("a", *(f"{number}".encode() for number in range(100)))
        eventually(lambda: gateway.report().routes[0].buffer.depth == 100, "stored")
    subprocess.run(["cp", "-a", str(tmp_path / "first"), str(tmp_path / "second")], check=True)
    command = [sys.executable, "-m", "messaging", "journal", "verify", str(tmp_path / "second" / "routes" / "all")]
    assert subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
    with messaging.connect(mosquitto.url) as cloud:
        arrived = subscribed(cloud, f"{name}/b", qos=1)
        with Gateway(chosen("second", mosquitto.url)):
            assert arrived.wait_payloads(100) == [f"{number}".encode() for number in range(100)]  # the copy goes on
