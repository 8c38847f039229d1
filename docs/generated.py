"""Generate tables of the documentation from the code.

``python docs/generated.py`` prints the tables. With ``--write`` it replaces them in the pages. A test compares both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args, get_origin

from pydantic import BaseModel

from messaging.connection.properties import announced as announced_by
from messaging.gateway import GatewaySettings, schema
from messaging.instance import find_adapter
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS, Features, parse_url
from messaging.model.settings import NetworkSettings, Settings, TlsSettings, load_settings
from messaging_adapters.amqp.extensions import EXTENSIONS

ROOT = Path(__file__).parent.parent

ANNOUNCING = {
    "memory": "memory://table",
    "MQTT 5": "mqtt://localhost?version=5",
    "MQTT 3.1.1": "mqtt://localhost?version=3.1.1",
    "3.1.1 + envelope": "mqtt://localhost?version=3.1.1&envelope=true",
    "AMQP (RabbitMQ)": "amqp://localhost",
}


class Part(NamedTuple):
    """A generated part: between ``<!-- name: begin -->`` and ``<!-- name: end -->`` of its page."""

    name: str
    page: Path
    make: Callable[[], str]

    def replaced(self) -> str:
        """Return the page with this part generated anew."""
        begin, end = (f"<!-- {self.name}: {mark} -->\n" for mark in ("begin", "end"))
        before, _, rest = self.page.read_text().partition(begin)
        _, _, after = rest.partition(end)
        return before + begin + self.make() + end + after


def announced(url: str) -> frozenset[str]:
    """Return the features that an adapter announces before it knows its broker, without its own extensions."""
    parsed = parse_url(url)
    kind = find_adapter(parsed.scheme)
    adapter = kind(parsed, load_settings(kind.settings_type, parsed, {}), "table")
    return announced_by(adapter) - kind.publish_extensions.keys() - kind.subscribe_extensions.keys()


def features() -> str:
    """Return a table with a row for each feature of the project that an adapter announces."""
    columns = {name: announced(url) for name, url in ANNOUNCING.items()}
    constants = {name: value for name, value in vars(Features).items() if name.isupper()}
    lines = [f"| feature | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for value in [*constants.values(), GENERATE_REPLY_CHANNEL_ALIAS]:
        marks = ["yes" if value in column else "" for column in columns.values()]
        if any(marks):
            lines.append(f"| `{value}` | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def settings() -> str:
    """Return a table for each settings class, with the settings that it adds to its base."""
    parts: list[tuple[str, type[Settings], frozenset[str]]] = [("Every adapter", Settings, frozenset())]
    parts.append(("Network: `mqtt://` and `amqp://`", NetworkSettings, frozenset(Settings.model_fields)))
    parts.append(("TLS: `mqtts://`, `wss://` and `amqps://`", TlsSettings, frozenset(NetworkSettings.model_fields)))
    for scheme in ("memory", "mqtt", "amqp"):
        kind = find_adapter(scheme).settings_type
        base = TlsSettings if issubclass(kind, TlsSettings) else Settings
        parts.append((f"`{scheme}://`", kind, frozenset(base.model_fields)))
    lines = []
    for title, kind, inherited in parts:
        lines += [f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
        for name, field in kind.model_fields.items():
            if name not in inherited:
                default = "" if field.default is None else f"`{field.default}`"
                lines.append(f"| `{name}` | {default} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def amqp() -> str:
    """Return a table of the extensions of AMQP alone."""
    lines = ["| key | side | value | default | what it does |", "|---|---|---|---|---|"]
    for key, extension in EXTENSIONS.items():
        side, _, value, default, effect = extension
        lines.append(f"| `{key}` | {side} | {value} | {default} | {effect} |")
    return "\n".join(lines) + "\n"


def gateway() -> str:
    """Return a table for each part of a gateway's configuration."""
    lines: list[str] = []
    for kind, titles in _gateway_parts().items():
        lines += [
            f"### {' and '.join(f'`{each}`' for each in titles)}",
            "",
            "| key | default | meaning |",
            "|---|---|---|",
        ]
        for name, field in kind.model_fields.items():
            given = field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else "" if given in (None, {}, []) else f"`{_toml(given)}`"
            lines.append(f"| `{field.alias or name}` | {default} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gateway_parts() -> dict[type[BaseModel], list[str]]:
    """Return the models of a configuration, in order, with the keys of their tables."""
    found: dict[type[BaseModel], list[str]] = {}

    def add(kind: type[BaseModel], title: str) -> None:
        titles = found.setdefault(kind, [])
        if title in titles:
            return
        titles.append(title)
        for name, field in kind.model_fields.items():
            for inner, is_named in _models(field.annotation):
                key = f"{field.alias or name}.NAME" if is_named else str(field.alias or name)
                add(inner, key if kind is GatewaySettings else f"{title}.{key}")

    add(GatewaySettings, "the file")
    return found


def _models(annotation: object, *, is_named: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_named
        return
    for each in get_args(annotation):
        yield from _models(each, is_named=is_named or get_origin(annotation) is dict)


PARTS = (
    Part("features", ROOT / "docs" / "features.md", features),
    Part("settings", ROOT / "docs" / "settings.md", settings),
    Part("amqp", ROOT / "docs" / "amqp.md", amqp),
    Part("gateway", ROOT / "docs" / "gateway-settings.md", gateway),
)
#: the JSON schema of configurations, for editors
SCHEMA = ROOT / "docs" / "gateway.schema.json"

if __name__ == "__main__":
    for part in PARTS:
        if "--write" in sys.argv[1:]:
            part.page.write_text(part.replaced())
            SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
        else:
            sys.stdout.write(part.make())
