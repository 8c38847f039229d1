"""The tables of ``docs/settings.md``, made from the settings classes.

``python docs/settings_table.py`` prints them; with ``--write`` it replaces those in the page. A test keeps them alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

from messaging.instance import find_adapter
from messaging.settings import Settings, TlsSettings

PAGE = Path(__file__).parent / "settings.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def tables() -> str:
    """A table in Markdown for each settings class: what it adds to its base."""
    parts = [("Every adapter", Settings, frozenset[str]())]
    parts.append(("TLS: `mqtts://` and `amqps://`", TlsSettings, frozenset(Settings.model_fields)))
    for scheme in ("memory", "mqtt", "amqp"):
        kind = find_adapter(scheme).settings_type
        base = TlsSettings if issubclass(kind, TlsSettings) else Settings
        parts.append((f"`{scheme}://`", kind, frozenset(base.model_fields)))
    lines = []
    for title, kind, inherited in parts:
        lines += [f"## {title}", "", "| option | default | |", "|---|---|---|"]
        for name, field in kind.model_fields.items():
            if name not in inherited:
                default = "" if field.default is None else f"`{field.default}`"
                lines.append(f"| `{name}` | {default} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def replaced(text: str) -> str:
    """``text`` with the tables between the markers made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        sys.stdout.write(tables())
