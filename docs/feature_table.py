"""The feature table of the README, made from what the adapters announce.

``python docs/feature_table.py`` prints it; with ``--write`` it replaces the one in ``README.md``. A test keeps the two
alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

from messaging.features import GENERATE_REPLY_CHANNEL_ALIAS, Features
from messaging.instance import find_adapter
from messaging.settings import load_settings
from messaging.url import parse_url

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- features: begin -->\n", "<!-- features: end -->\n"

COLUMNS = {
    "memory": "memory://table",
    "MQTT 5": "mqtt://localhost?version=5",
    "MQTT 3.1.1": "mqtt://localhost?version=3.1.1",
    "3.1.1 + envelope": "mqtt://localhost?version=3.1.1&envelope=true",
    "AMQP (RabbitMQ)": "amqp://localhost",
}


def announced(url: str) -> frozenset[str]:
    """What an adapter announces before it knows its broker."""
    parsed = parse_url(url)
    kind = find_adapter(parsed.scheme)
    return kind(parsed, load_settings(kind.settings_type, parsed, {}), "table").features


def table() -> str:
    """The table in Markdown: a row for each feature that anybody announces."""
    features = {name: announced(url) for name, url in COLUMNS.items()}
    constants = {name: value for name, value in vars(Features).items() if name.isupper()}
    lines = [f"| feature | {' | '.join(features)} |", f"|---|{'---|' * len(features)}"]
    known = [*constants.values(), GENERATE_REPLY_CHANNEL_ALIAS]
    others = sorted(frozenset().union(*features.values()) - {*known})
    for value in [*known, *others]:
        marks = ["yes" if value in announced else "" for announced in features.values()]
        if any(marks):
            lines.append(f"| `{value}` | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def replaced(text: str) -> str:
    """``text`` with the table between the markers made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(replaced(README.read_text()))
    else:
        sys.stdout.write(table())
