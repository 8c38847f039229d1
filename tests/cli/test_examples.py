"""The examples run without arguments and at brokers, and print the expected lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from messaging.testing.brokers import RabbitMQ
from tests.cli.program import ROOT, process

EXPECTED = {
    "01_publish_subscribe_sync": [
        "examples/weather/oslo: snow",
        "examples/weather/rome: sunny",
        "examples/weather/cork: rain",
    ],
    "02_asyncio": ["5", "4", "3", "2", "1", "lift-off"],
    "03_rx_operators": ["mean of two: 20.7", "mean of two: 21.6", "mean of two: 22.5", "completed"],
    "04_acknowledgement": [
        "accepted: [1, 3]",
        "refused: 2",
        *(f"attempt {number}: rejected: True" for number in (1, 2, 3)),
        "returned: an unwanted parcel (maxDeliveries)",
    ],
    "05_work_queue": ["Ada did 6 jobs", "Grace did 6 jobs", "done, each once: True"],
    "06_typed_messages": [
        "12:30 attic: 31.5 °C",
        "12:30 hall: 20.0 °C",
        'does not fit: {"sensor": "cellar", "celsius": "cold"}',
        "counted: 1",
    ],
    "07_request_reply": [
        "four apples: 1.00",
        "two of apple: 0.50",
        "two of bread: 7.00",
        "refused: LookupError: no cake today",
        "does not fit: DecodeError",
        "no responder: UnroutableError",
        "no reply: OutcomeUnknownError",
    ],
    "08_stock_quotes": [
        "ACME: 101.20",
        "ACME: 101.35",
        "ACME: 100.90",
        "all received: True",
        "handler stopped: True",
    ],
    "09_mqtt_asks_amqp": [
        "fastest from Cork: Cobh, 24 minutes",
        "from Oslo: Bergen, 403 minutes",
        "from Oslo: Narvik, 1120 minutes",
    ],
    "10_typed_events": [
        "receipt for orders/placed: Receipt(id='1', total=250.0, currency='EUR')",
        "large: 2 with 2 items",
        "unhandled weather/report: {'celsius': 21.5, 'wind': {'from': 'NW'}}",
        "audit: orders/cancelled 3",
        "audit: orders/returned 4",
        "late: [3, 4, 5]",
        "kept: [1, 2, 3, 4, 5]",
    ],
    "11_event_admin": [
        "alarm: home/alarm/SMOKE in the kitchen",
        "log: cannot heat (builtins.ValueError)",
        "services: REGISTERED",
        "services: UNREGISTERING",
        "on the bus: home/door/OPEN {'room': 'hall'}",
        "on the bus: home/alarm/WATER {'room': 'cellar', 'level': 4}",
        "alarm: home/alarm/WATER in the cellar",
    ],
    "12_transactional_outbox": [
        "order 2: rolled back, so no message",
        "order 1: invoice written",
        "order 3: invoice written",
        "order 3: handled before",
        "invoices: [1, 3]",
    ],
    "13_events_between_processes": [
        "the shop has closed",
        "the kitchen cooks soup",
        "the kitchen cooks fish",
        "the kitchen cooks cake",
        "the ledger books order 2 late",
        "the ledger books order 3 late",
    ],
    "14_session_with_replies": [
        "lot-1: Ada bids 50",
        "lot-1: Grace bids 50",
        "lot-2: Grace bids 100",
        "everyone has seen the vase",
        "on offer: lamp",
        "on offer: clock",
        "on offer: vase",
        "the session ended: close",
    ],
    "15_plain_mqtt_member": [
        "joined: lamp wants light/switch",
        "lamp: light/switch {'on': True}",
        "home: {'is_on': True, 'watts': 7}",
    ],
    "16_a_device_that_sleeps": [
        "awake",
        "cellar: event 1",
        "cellar: event 2",
        "cellar: event 3",
        "awake",
        "cellar: event 4",
        "cellar: event 5",
        "cellar: event 6",
    ],
    "17_filter_agent_mailbox": [
        "event 2 in the cellar: 95.5 °C",
        "event 4 in the cellar: 99.0 °C",
    ],
    "18_gateway": [
        "cloud/bonn/d1: 22.0 °C",
        "cloud/bonn/d1: 27.0 °C",
        "how are you? Fine!",
        "2 published, 0 stored, 0 dead letters",
    ],
}
#: examples that never connect to a broker
LOCAL = {"10_typed_events", "11_event_admin"}
#: examples that need a broker which several processes or programs reach
BETWEEN_PROCESSES = {"13_events_between_processes", "15_plain_mqtt_member", "17_filter_agent_mailbox"}
FILES = sorted((ROOT / "examples").glob("*.py"))


def output(example: Path) -> list[str]:
    done = process(sys.executable, "-W", "error", str(example), PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def check(example: Path, found: list[str]) -> None:
    """Compare the output of an example with the expected one."""
    lines = slice(-1, None) if example.stem == "05_work_queue" else slice(None)  # which worker gets a job is open
    assert found[lines] == EXPECTED[example.stem][lines]


def test_every_example_is_tested() -> None:
    assert [file.stem for file in FILES] == sorted(EXPECTED)


@pytest.mark.parametrize(
    "example", [each for each in FILES if each.stem not in BETWEEN_PROCESSES], ids=lambda file: file.stem
)
def test_example_prints_the_expected_lines(example: Path) -> None:
    check(example, output(example))


@pytest.mark.parametrize("broker", ["mosquitto", "rabbitmq"])
@pytest.mark.parametrize("example", [each for each in FILES if each.stem not in LOCAL], ids=lambda file: file.stem)
def test_example_runs_at_a_broker(
    example: Path,
    broker: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if broker == "rabbitmq" and example.stem in ("09_mqtt_asks_amqp", "15_plain_mqtt_member"):
        pytest.skip("needs a broker of both kinds: see the next tests")
    monkeypatch.setattr(sys, "argv", [str(example), request.getfixturevalue(broker).url])
    runpy.run_path(str(example), run_name="__main__")
    check(example, capfd.readouterr().out.splitlines())


def test_mqtt_asks_amqp_at_one_broker(
    rabbitmq_mqtt: RabbitMQ, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (example,) = (file for file in FILES if file.stem == "09_mqtt_asks_amqp")
    # RabbitMQ 4 does not mark the messages of its MQTT plugin: AMQP cannot recognise an envelope there
    options = "version=5" if rabbitmq_mqtt.version >= (4,) else "version=3.1.1&envelope=true"
    urls = [f"{rabbitmq_mqtt.mqtt_url}?{options}", rabbitmq_mqtt.url]
    monkeypatch.setattr(sys, "argv", [str(example), *urls])
    runpy.run_path(str(example), run_name="__main__")
    check(example, capfd.readouterr().out.splitlines())


def test_a_plain_mqtt_program_meets_amqp_at_one_broker(
    rabbitmq_mqtt: RabbitMQ, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (example,) = (file for file in FILES if file.stem == "15_plain_mqtt_member")
    monkeypatch.setattr(sys, "argv", [str(example), rabbitmq_mqtt.mqtt_url, rabbitmq_mqtt.url])
    runpy.run_path(str(example), run_name="__main__")
    check(example, capfd.readouterr().out.splitlines())


def test_the_plain_part_of_the_plain_program_imports_nothing_of_the_toolkit() -> None:
    (example,) = (file for file in FILES if file.stem == "15_plain_mqtt_member")
    plain = example.read_text(encoding="utf-8").partition("# --- the program on the other side")[0]
    code = plain + "\nassert Lamp and not [each for each in sys.modules if each.partition('.')[0] == 'messaging']\n"
    assert process(sys.executable, "-c", code).returncode == 0
