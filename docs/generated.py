"""Generate tables of the documentation from the code.

``python docs/generated.py`` prints the tables. With ``--write`` it replaces them in the pages. A test compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adapters.amqp.extensions import EXTENSIONS
from messaging.instance import find_adapter
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS, Features, parse_url
from messaging.model.settings import Settings, TlsSettings, load_settings
from messaging.properties import announced as announced_by

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
    parts.append(("TLS: `mqtts://` and `amqps://`", TlsSettings, frozenset(Settings.model_fields)))
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


PARTS = (
    Part("features", ROOT / "docs" / "features.md", features),
    Part("settings", ROOT / "docs" / "settings.md", settings),
    Part("amqp", ROOT / "docs" / "amqp.md", amqp),
)

if __name__ == "__main__":
    for part in PARTS:
        if "--write" in sys.argv[1:]:
            part.page.write_text(part.replaced())
        else:
            sys.stdout.write(part.make())
