"""How adapters and codecs are found: entry points of installed distributions, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from messaging.errors import ConfigurationError, UnknownSchemeError
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.doubles.fake import FakeBroker
from tests.doubles.fixtures import Connect, install
from tests.scripts import FORK, run_script

ADAPTER = """
from messaging.adapter import Adapter
from messaging.model.settings import Settings
from messaging_adapters.memory import MemoryAdapter

class LoopbackAdapter(MemoryAdapter):
    provider = "third.party"
"""

CODEC = """
class ReverseCodec:
    content_types = ("application/x-reverse",)
    def encode(self, obj, parameters):
        return str(obj).encode()[::-1]
    def decode(self, data, model, parameters):
        return data[::-1].decode()
"""


def test_a_package_outside_the_project_adds_an_adapter(tmp_path: Path) -> None:
    install(tmp_path, "third-party", "[messaging.adapters]\nloopback = third_party:LoopbackAdapter\n")
    (tmp_path / "third_party.py").write_text(ADAPTER)
    script = """
import messaging
with messaging.connect("loopback://x") as m, m.subscribe("a") as stream:
    m.publish("a", b"1").result(5)
    assert stream.receive(5).payload == b"1"
    assert m.runtime.get_runtime_dto().provider_name == "third.party"
try:
    messaging.connect("loopbck://x")
except messaging.UnknownSchemeError as error:
    assert "loopback" in str(error) and "memory" in str(error), error
else:
    raise AssertionError
"""
    run_script(script, first=tmp_path)


def test_a_package_outside_the_project_adds_a_codec(tmp_path: Path) -> None:
    install(tmp_path, "third-codec", "[messaging.codecs]\napplication/x-reverse = third_codec:ReverseCodec\n")
    (tmp_path / "third_codec.py").write_text(CODEC)
    script = """
import messaging
with messaging.connect("memory://x") as m, m.subscribe("a") as stream:
    m.publish("a", "abc", content_type="application/x-reverse").result(5)
    message = stream.receive(5)
    assert message.payload == b"cba"
    assert message.value() == "abc"
"""
    run_script(script, first=tmp_path)


FOREIGN = f"""
{FORK}
def connect(folder):
    sys.path.insert(0, folder)
    with messaging.connect("memory://x") as m:
        m.publish("a", b"1").result(5)

for folder in sys.argv[1:]:
    child(lambda: connect(folder))
"""
#: the files of another package named ``adapters``, which many programs have
ADAPTERS: dict[str, dict[str, str]] = {
    "package": {"adapters/__init__.py": ""},
    "module": {"adapters.py": ""},
    "submodule": {"adapters/__init__.py": "", "adapters/memory.py": ""},
    "import error": {"adapters/__init__.py": "import there_is_no_such_module"},
    "broken": {"adapters/__init__.py": "raise RuntimeError('broken')"},
}


def test_another_package_named_adapters_disturbs_no_connection(tmp_path: Path) -> None:
    for case, files in ADAPTERS.items():
        for name, text in files.items():
            (tmp_path / case / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / case / name).write_text(text)
    folders = [str(tmp_path / case) for case in ADAPTERS]
    run_script(f"import sys\nsys.argv = {['', *folders]!r}\n{FOREIGN}", seconds=120)


def test_a_missing_extra_says_which_to_install(tmp_path: Path) -> None:
    (tmp_path / "paho").mkdir()
    (tmp_path / "paho" / "__init__.py").write_text("raise ModuleNotFoundError('No module named paho', name='paho')")
    (tmp_path / "aio_pika.py").write_text("raise ModuleNotFoundError('No module named aio_pika', name='aio_pika')")
    (tmp_path / "aiormq.py").write_text("raise ModuleNotFoundError('No module named aiormq', name='aiormq')")
    script = """
import messaging
for url, extra in (("mqtt://127.0.0.1:9", "mqtt"), ("amqp://127.0.0.1:9", "amqp")):
    try:
        messaging.connect(url)
    except messaging.MissingExtraError as error:
        assert error.extra == extra, error
        assert f"pip install 'rx-messaging[{extra}]'" in str(error), error
    else:
        raise AssertionError(url)
with messaging.connect("memory://x") as m:
    m.publish("a", b"1").result(5)
"""
    run_script(script, first=tmp_path)


def test_the_core_imports_no_adapter(tmp_path: Path) -> None:
    script = """
import sys, messaging
others = ("messaging_adapters", "pyspark_messaging", "paho", "aio_pika", "aiormq")
loaded = [name for name in sys.modules if name.partition(".")[0] in others]
assert not loaded, loaded
"""
    run_script(script, first=tmp_path)


def test_an_unknown_scheme_names_those_installed(connect: Connect, broker: FakeBroker) -> None:
    with pytest.raises(UnknownSchemeError, match=r"no adapter for nats:// is installed; installed: .*") as caught:
        connect("nats://localhost")
    for scheme in ("amqp", "amqps", "bare", "fake", "memory", "mqtt", "mqtts"):
        assert scheme in str(caught.value)
    assert connect(broker).publish("a", b"1").result(PATIENCE) is None


@table(
    ("scheme", "message"),
    [
        ("notanadapter", "is not a messaging.adapter.Adapter"),
        ("closedmodule", "does not load"),
        ("noattribute", "does not load"),
        ("syntaxerror", "does not load"),
    ],
)
def test_an_entry_point_that_is_no_adapter_is_said_plainly(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, message: str
) -> None:
    (tmp_path / "third_broken.py").write_text("def (:")
    install(tmp_path, "third-broken", "[messaging.adapters]\nsyntaxerror = third_broken:Adapter\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=message) as caught:
        connect(f"{scheme}://x")
    assert scheme in str(caught.value)
