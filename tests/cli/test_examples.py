"""The examples run without arguments and at brokers, and print the expected lines."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
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
    "08_stock_quotes": ["ACME: 101.20", "ACME: 101.35", "ACME: 100.90", "all received: True", "handler stopped: True"],
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
    "17_filter_agent_mailbox": ["event 2 in the cellar: 95.5 °C", "event 4 in the cellar: 99.0 °C"],
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
#: examples with two kinds of clients, which meet at a broker of both kinds; what follows its URL of MQTT
OF_BOTH_KINDS = {"09_mqtt_asks_amqp": "OPTIONS", "15_plain_mqtt_member": ""}
FILES = sorted((ROOT / "examples").glob("*.py"))


Output = Callable[..., list[str]]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Output:
    """Run an example as a program in this process; return the lines that it writes."""

    def output(example: Path, *urls: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(example), *urls])
        runpy.run_path(str(example), run_name="__main__")
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return out.splitlines()

    return output


def check(stem: str, found: list[str]) -> None:
    """Compare the output of an example with the expected one."""
    lines = slice(-1, None) if stem == "05_work_queue" else slice(None)  # which worker gets a job is open
    assert found[lines] == EXPECTED[stem][lines]


def test_every_example_is_tested() -> None:
    assert [file.stem for file in FILES] == sorted(EXPECTED)


def test_an_example_is_a_program() -> None:
    done = process(sys.executable, "-W", "error", str(FILES[0]), PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    check(FILES[0].stem, done.stdout.splitlines())


@pytest.mark.parametrize(
    "example", [each for each in FILES if each.stem not in BETWEEN_PROCESSES], ids=lambda file: file.stem
)
def test_example_prints_the_expected_lines(example: Path, output: Output) -> None:
    check(example.stem, output(example))


#: of the examples that start processes, one broker is enough for the first tier
AT_BROKERS = [
    pytest.param(
        each, broker, id=f"{each.stem}-{broker}",
        marks=[pytest.mark.slow] if broker == "rabbitmq" and each.stem in BETWEEN_PROCESSES else [],
    )
    for each in FILES
    for broker in ("mosquitto", "rabbitmq")
    if each.stem not in LOCAL and not (broker == "rabbitmq" and each.stem in OF_BOTH_KINDS)
]  # fmt: skip


@pytest.mark.parametrize(("example", "broker"), AT_BROKERS)
def test_example_runs_at_a_broker(example: Path, broker: str, request: pytest.FixtureRequest, output: Output) -> None:
    check(example.stem, output(example, request.getfixturevalue(broker).url))


def test_mqtt_meets_amqp_at_one_broker(rabbitmq_mqtt: RabbitMQ, output: Output) -> None:
    # RabbitMQ 4 does not mark the messages of its MQTT plugin: AMQP cannot recognise an envelope there
    options = "?version=5" if rabbitmq_mqtt.version >= (4,) else "?version=3.1.1&envelope=true"
    for example in FILES:
        if example.stem in OF_BOTH_KINDS:
            urls = rabbitmq_mqtt.mqtt_url + OF_BOTH_KINDS[example.stem].replace("OPTIONS", options), rabbitmq_mqtt.url
            check(example.stem, output(example, *urls))


def test_the_plain_part_of_the_plain_program_imports_nothing_of_the_toolkit() -> None:
    (example,) = (file for file in FILES if file.stem == "15_plain_mqtt_member")
    plain = example.read_text(encoding="utf-8").partition("# --- the program on the other side")[0]
    code = plain + "\nassert Lamp and not [each for each in sys.modules if each.partition('.')[0] == 'messaging']\n"
    assert process(sys.executable, "-c", code).returncode == 0
