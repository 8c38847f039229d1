"""Check the documentation like code: generated tables match the code, samples run, links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import messaging
from messaging.model import keywords
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.forking import ForkedProcess

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = load()


@table(
    ("name", "row"), [("features", "| `acknowledge` |"), ("settings", "| `prefetch` |"), ("amqp", "| `queueType` |")]
)
def test_generated_tables_match_the_code(name: str, row: str) -> None:
    (part,) = (part for part in GENERATED.PARTS if part.name == name)
    text = part.page.read_text()
    assert row in text
    assert part.replaced() == text, "run: python docs/generated.py --write"


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of a page; ``python`` marks programs, ``py`` fragments."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", *arguments],
        capture_output=True, encoding="utf-8", timeout=60, check=False, cwd=folder,
    )  # fmt: skip


def output(*arguments: str, folder: Path | None = None) -> str:
    done = run(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def on(request: pytest.FixtureRequest, broker: str, program: str) -> str:
    """Return the program with the URL of the broker in place of its own."""
    if broker == "memory":
        return program
    program, found = re.subn(r'"(memory|mqtt|amqp)://\w+"', f'"{request.getfixturevalue(broker).url}"', program)
    assert found
    return program


def named_tests(page: Path) -> list[tuple[str, str]]:
    """Return the tests that a page names. Each must exist."""
    named = re.findall(r"`((?:tests|messaging/testing)/[\w/]+\.py)::(\w+)`", page.read_text())
    for path, name in named:
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    return named


#: The brokers that the programs of each page run on, and their output.
EVERY = ("memory", "mosquitto", "rabbitmq")
PRINTED: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "README.md": (EVERY, ["21.5 °C\n"]),
    "docs/basics.md": (
        EVERY,
        [
            "sensors/attic {'celsius': 21.5}\n",
            "21.5 °C\n",
            "orders/new order-7 north orders/answers\n{'id': 7} b'{\"id\":7}'\n",
            "{'celsius': 21.5}\n",
            "21.5\n",
            "6\n",
            "",
            "attic is warm\n",
        ],
    ),
    "docs/guarantees.md": (EVERY, ["7 apples\n"]),
    "docs/durability.md": (EVERY, [""]),
    "docs/channels.md": (EVERY, ["plant/line-3/temperature 71.5\n"]),
    "docs/features.md": (("memory",), ["True\n"]),
    "docs/settings.md": (("memory",), ["True\n"]),
    "docs/extensions.md": (("memory",), ["{'id': 7} north\n", "{'celsius': 21.5}\n"]),
    "docs/outbox.md": (("memory", "rabbitmq"), ["invoice 7\n"]),
    "docs/journal.md": (("memory",), ["0 sensors/attic b'21.5'\n", "", ""]),
    "docs/mqtt.md": (("mosquitto",), ["{'celsius': 21.5}\n"]),
    "docs/queues.md": (("memory",), ["jobs/1 mow the lawn\n1 removed\n"]),
    "docs/memory.md": (("memory",), ["{'id': 7}\n"]),
    "docs/devices.md": (("mosquitto",), ["online\nasleep\n"]),
    "docs/credentials.md": (("mosquitto",), ["{'celsius': 21.5}\n"]),
    "docs/amqp.md": (("rabbitmq",), ["{'id': 7}\n"]),
    "docs/events.md": (
        ("memory",),
        [
            "Order(id=1, total=99.5)\norders/placed 4200.0\norders/placed 1000\n",
            "",
            "orders/placed {'id': 1}\n",
            "1 RangePolicy(minimum=0, maximum=20)\n",
            "late: {'celsius': 20}\nlate: {'celsius': 21}\nlate: {'celsius': 22}\n2 20\n3 21\n4 22\n",
            "{'id': 5}\n",
            "late: {'celsius': 21}\nnewest: {'celsius': 21}\n",
            "",
            "home/alarm/SMOKE kitchen\nhome/alarm/WINDOW attic\n",
        ],
    ),
}
PRINTED["docs/remote-events.md"] = (("memory",), ["overheated {'room': 'cellar'}\n" * 2])
PRINTED["docs/gateway.md"] = (("memory",), ["0\n"])
PRINTED["docs/observability.md"] = (("memory",), [""])
PRINTED["docs/monitor.md"] = (("memory",), ["", ""])
PRINTED["docs/tracing.md"] = (("memory",), ["{'plant': '7'}\n"])
PRINTED["docs/cloudevents.md"] = (EVERY, ["com.example.reading {'celsius': 21.5}\n"])
PRINTED["docs/sparkplug.md"] = (EVERY, ["line-3 bdSeq 0\nline-3 temperature 21.5\nline-3 temperature 22.1\n"])
PRINTED["docs/leases.md"] = (("memory",), ["3600.0 60.0\nTrue\n"])
PRINTED["docs/distributed-events.md"] = (EVERY, ["{'id': 7}\n", "{'id': 8}\n"])
#: Pages whose programs run in other tests (reply-to.md in tests/conformance), or need a Spark session.
ELSEWHERE = {"docs/reply-to.md", "docs/spark.md", "docs/tutorial.md"}


def brokers_of(page: str, number: int) -> tuple[str, ...]:
    """Return the brokers that a program of a page runs on."""
    brokers, _ = PRINTED[page]
    return brokers if "connect(" in blocks(page, "python")[number] else brokers[:1]


#: print writes a line and its end in two steps, between which a handler on another thread may print
WHOLE_LINES = """
import builtins, sys
builtins.print = lambda *values, end="\\n", **_: sys.stdout.write(" ".join(map(str, values)) + end)
"""


def forked(program: str, folder: Path) -> str:
    """Return what a program prints, run in ``folder`` by a process that has imported the package already."""
    process = ForkedProcess(f"import os, sys; os.chdir({str(folder)!r})\n{program}\nsys.exit()")
    code, printed, errors = process.communicate(PATIENCE)
    assert (code, errors) == (0, "")
    return printed


def interpreted(program: str, folder: Path) -> str:
    """Return what a program prints, run in ``folder`` by an interpreter of its own, whose end is silent, too."""
    return output("-c", program, folder=folder)


def check_samples(
    request: pytest.FixtureRequest, folder: Path, page: str, brokers: slice, run: Callable[[str, Path], str]
) -> None:
    """Check what the programs of a page print, on some of its brokers."""
    for number, expected in enumerate(PRINTED[page][1]):
        for broker in brokers_of(page, number)[brokers]:
            own = folder / f"{number}-{broker}"
            own.mkdir()
            printed = run(WHOLE_LINES + on(request, broker, blocks(page, "python")[number]), own)
            assert sorted(printed.splitlines()) == sorted(expected.splitlines()), f"program {number} on {broker}"


@pytest.mark.parametrize("page", PRINTED)
def test_samples_of_a_page_run(request: pytest.FixtureRequest, tmp_path: Path, page: str) -> None:
    """Each on the first of its brokers."""
    check_samples(request, tmp_path, page, slice(1), forked)


@pytest.mark.slow
@pytest.mark.timeout(600)
@table("page", [*PRINTED])
def test_samples_of_a_page_run_on_every_broker(request: pytest.FixtureRequest, tmp_path: Path, page: str) -> None:
    check_samples(request, tmp_path, page, slice(None), interpreted)


@table("page", PAGES)
def test_every_sample_of_a_page_is_run_or_compiles(page: str) -> None:
    if page not in ELSEWHERE:
        assert len(blocks(page, "python")) == len(PRINTED.get(page, ((), []))[1])
    for fragment in blocks(page, "py"):
        compile(fragment, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_first_sample_of_the_readme_is_a_handler() -> None:
    assert "@m.on(" in blocks("README.md", "python")[0]


TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
#: The programs of the tutorial by file name, and the output that it shows for each.
PROGRAMS = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL))
SHOWN = dict(re.findall(r"`python (\w+\.py)`[^`]*prints\n\n```text\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", ["hello.py", "readings.py", "sums.py"])
def test_program_of_the_tutorial_prints_the_same_on_every_broker(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    assert "memory://" in PROGRAMS[name]
    for broker in EVERY:
        assert forked(on(request, broker, PROGRAMS[name]), tmp_path) == SHOWN[name], broker


@pytest.mark.parametrize("broker", EVERY[1:])
def test_two_programs_of_the_tutorial_meet_at_a_broker(request: pytest.FixtureRequest, broker: str) -> None:
    assert len(PROGRAMS) == len(SHOWN) + 1 == 5
    ask = on(request, broker, PROGRAMS["ask.py"])
    responder = on(request, broker, PROGRAMS["responder.py"])
    with subprocess.Popen([sys.executable, "-c", responder], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert output("-c", ask) == SHOWN["ask.py"]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert "UnroutableError" in run("-c", ask).stderr


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


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@table("page", PAGES)
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: str) -> None:
    path = ROOT / page
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        if "://" not in target:
            linked = path.parent / target if target else path
            assert linked.exists(), target
            assert not heading or heading in anchors(linked), f"{target}#{heading}"


def test_no_heading_of_a_page_is_empty_or_there_twice() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"^( *)```.*?^\1```", "code", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        headings = re.findall(r"^(#+) (.+)\n+(#*)", text, flags=re.MULTILINE)
        names = [name for level, name, _ in headings if level == "##"]
        assert sorted({*names}) == sorted(names), page.name
        empty = [name for level, name, following in headings if following and len(following) <= len(level)]
        assert not empty, (page.name, empty)


def test_the_table_of_keywords_has_every_extension_of_several_words() -> None:
    page = (ROOT / "docs" / "extensions.md").read_text()
    table_ = page[page.index("### Keys and keywords") : page.index("### Extensions that need")]
    told = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", table_, flags=re.MULTILINE))
    kinds = (keywords.PublishKeywords, keywords.SubscribeKeywords, keywords.ReplyKeywords)
    known = {name for kind in kinds for name in kind.__annotations__ if "_" in name}
    of_contexts = {"content_type", "content_encoding", "correlation_id", "reply_to", "channel_extension"}
    assert {*told.values()} == known - of_contexts
    assert all(re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key) == name for key, name in told.items())


def test_pages_install_from_what_there_is() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")):
        assert "pip install 'rx-messaging" not in page.read_text(), page


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index] == [
        ROOT / "docs" / "index.md"
    ]


def test_every_requirement_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "requirements.md").read_text()
    numbers = [*range(10, 100, 20), 60, 80, 95, 100, *range(120, 190, 10), 200, 205, *range(210, 270, 10)]
    for number in numbers:
        assert f"| MSG{number:03} |" in page
    assert len(named_tests(ROOT / "docs" / "requirements.md")) > 25


def test_every_requirement_of_distributed_eventing_names_a_test_that_exists() -> None:
    page = ROOT / "docs" / "distributed-event-requirements.md"
    text = page.read_text()
    for number in (10, 12, 15, 20, 30, 40, 42, 45, 47, 48, 50, 55, 60, 80, 85, 87, 88, 90):
        assert f"DE{number:03}" in text
    for section in ("5.1.1", "5.1.2", "5.1.3", "5.1.4", "5.2.1", "5.2.2", "5.2.3", "5.2.4", "5.3.1"):
        assert f"| {section} |" in text
    assert len(named_tests(page)) > 35


def test_every_section_and_scenario_of_remote_events_names_a_test_that_exists() -> None:
    page = ROOT / "docs" / "remote-event-requirements.md"
    text = page.read_text()
    for section in ("2.1", "2.3.1", "2.3.2", "2.3.3", "2.3.4", "2.3.5", "2.4", "2.5", "3.1", "3.2", "3.3", "3.4", "4"):
        assert f"| EV.{section} |" in text
    for scenario in range(1, 59):
        assert re.search(rf"^\| {scenario} \| .*`tests/", text, re.MULTILINE), scenario
    assert len(named_tests(page)) > 90


def test_every_requirement_of_the_event_services_names_a_test_that_exists() -> None:
    assert len(named_tests(ROOT / "docs" / "event-requirements.md")) > 220
