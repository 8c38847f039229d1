"""Positions of the keys of TOML documents."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from messaging.gateway.positions import toml_positions
from messaging.gateway.problems import KeyPath, TextPosition
from messaging.testing.tables import table

DOCUMENT = """\
name = "plant"  # [not.a.table]
"quoted.key" = '''
a = 1
[b]''''
text.long = \"\"\"x = 1
\\"\"\" # no comment
\"\"\"

  [instances.local]
  url = "mqtt://localhost#"   # a comment = 1
[routes."a b".from]
instance = 'local'
channels = [ "a=[1]", # ]
  "b", { x.y = 1, z = [ 2,3 ] },
]
[routes."a b"]
at = 1979-05-27 07:32:00
[[steps]]
n = 1
[[steps.inner]]
[[steps]]
  [steps.more]
    n = { }
"""


def paths(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """The paths of all keys and elements below ``value``."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = set()
    for key, inner in parts:
        found |= {(*path, key)} | paths(inner, (*path, key))
    return found


def test_every_key_and_element_has_its_line_and_column() -> None:
    found = toml_positions(DOCUMENT)
    assert found.keys() == paths(tomllib.loads(DOCUMENT))
    shown = {".".join(map(str, path)): (each.line, each.column) for path, each in found.items()}
    assert shown == {
        "name": (1, 1), "quoted.key": (2, 1), "text": (5, 1), "text.long": (5, 6), "instances": (9, 4),
        "instances.local": (9, 14), "instances.local.url": (10, 3), "routes": (11, 2), "routes.a b": (16, 9),
        "routes.a b.from": (11, 15), "routes.a b.from.instance": (12, 1), "routes.a b.from.channels": (13, 1),
        "routes.a b.from.channels.0": (13, 14), "routes.a b.from.channels.1": (14, 3),
        "routes.a b.from.channels.2": (14, 8), "routes.a b.from.channels.2.x": (14, 10),
        "routes.a b.from.channels.2.x.y": (14, 12), "routes.a b.from.channels.2.z": (14, 19),
        "routes.a b.from.channels.2.z.0": (14, 25), "routes.a b.from.channels.2.z.1": (14, 27),
        "routes.a b.at": (17, 1), "steps": (18, 3), "steps.0": (18, 3), "steps.0.n": (19, 1),
        "steps.0.inner": (20, 9), "steps.0.inner.0": (20, 9), "steps.1": (21, 3), "steps.1.more": (22, 10),
        "steps.1.more.n": (23, 5),
    }  # fmt: skip


@table("text", ["", "\n", "# only a comment", "a=1", "a=1\r\nb=2\r\n", "[a]", "a = []\n", "a.b.c={}"])
def test_short_documents(text: str) -> None:
    assert toml_positions(text).keys() == paths(tomllib.loads(text))


def test_lines_with_both_kinds_of_ends_count_once() -> None:
    assert toml_positions("a = 1\r\nb = '''\r\nx'''\nc = 2")["c",] == TextPosition(4, 1)


# --- any document

KEYS = st.one_of(
    st.sampled_from(["a", "b", "c-d", "1", "true", "a b", 'q"', "x.y", "é", "#", "\\", "[", "'", ""]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4),
)
TEXTS = st.text(st.sampled_from("a\"'\\\n#[]{}=,. é\t"), max_size=8)
SCALARS = st.one_of(
    st.booleans(), st.integers(-9, 99), TEXTS, st.sampled_from([1.5, 1e20]),
    st.datetimes().map(lambda at: at.replace(microsecond=0)),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)
#: tables, and lists of them, so that headers are written, too
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | st.lists(inner, min_size=1, max_size=2) | VALUES, max_size=3),
    max_leaves=8,
)


class Writer:
    """Writes a document in one of the many forms that TOML has for it."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.lines: list[str] = []

    def flip(self) -> bool:
        return bool(self.draw(st.booleans()))

    def blank(self) -> str:
        return str(self.draw(st.sampled_from(["", " ", "\t "])))

    def gap(self) -> str:
        return str(self.draw(st.sampled_from(["", " ", "\n", " # ], x = 1\n  "])))

    def key(self, key: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_-]+", key) and self.flip():
            return key
        if "'" not in key and self.flip():
            return f"'{key}'"
        return json.dumps(key, ensure_ascii=self.flip() and key.isascii()).replace("\x7f", "\\u007f")

    def text(self, text: str) -> str:
        form = self.draw(st.integers(0, 3))
        if form == 1 and "'" not in text and "\n" not in text:
            return f"'{text}'"
        if form == 2 and "'''" not in text and not text.endswith("'"):
            return f"'''\n{text}'''"
        if form == 3:
            escaped = text.replace("\\", "\\\\").replace('"""', '""\\"')
            return f'"""\n{escaped}"""'
        return json.dumps(text, ensure_ascii=False)

    def value(self, value: Any) -> str:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            elements = [f"{self.gap()}{self.value(each)}{self.gap()}" for each in value]
            return "[" + ",".join(elements) + ("," if elements and self.flip() else "") + self.gap() + "]"
        if isinstance(value, dict):
            pairs = [f"{self.blank()}{self.key(key)}{self.blank()}={self.value(each)} " for key, each in value.items()]
            return "{" + ",".join(pairs) + "}"
        if hasattr(value, "isoformat"):
            return str(value.isoformat(" " if self.flip() else "T"))
        return repr(value)

    def line(self, text: str) -> None:
        end = self.draw(st.sampled_from(["", " ", " # c = 1", "\n", "\n# [x]"]))
        self.lines.append(f"{self.blank()}{text}{end}")

    def dotted(self, start: str, value: Any) -> None:
        if isinstance(value, dict) and value and self.flip():
            for key, inner in value.items():
                self.dotted(f"{start}{self.blank()}.{self.blank()}{self.key(key)}", inner)
        else:
            self.line(f"{start}{self.blank()}={self.blank()}{self.value(value)}")

    def table(self, header: str, table: dict[str, Any]) -> None:
        later = []
        for key, value in table.items():
            is_table = isinstance(value, dict)
            is_array = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
            if (is_table or is_array) and self.flip():
                later.append((key, value))
            else:
                self.dotted(self.key(key), value)
        for key, value in later:
            inner = f"{header}.{self.key(key)}" if header else self.key(key)
            if isinstance(value, dict):
                self.line(f"[{self.blank()}{inner}{self.blank()}]")
                self.table(inner, value)
            else:
                for each in value:
                    self.line(f"[[{inner}]]")
                    self.table(inner, each)


@st.composite
def documents(draw: Any) -> tuple[str, Any]:
    data = draw(TABLES)
    writer = Writer(draw)
    writer.table("", data)
    return draw(st.sampled_from(["\n", "\r\n"])).join(writer.lines), data


@given(documents())
def test_the_keys_found_are_those_of_the_document(document: tuple[str, Any]) -> None:
    text, data = document
    parsed = tomllib.loads(text)
    assert paths(parsed) == paths(data)  # the writer is right
    found = toml_positions(text)
    assert found.keys() == paths(parsed)
    lines = text.replace("\r\n", "\n").split("\n")
    for path, position in found.items():
        if isinstance(path[-1], str):
            rest = lines[position.line - 1][position.column - 1 :]
            ((name, _),) = tomllib.loads(re.match(r"""\s*("(\\.|[^"])*"|'[^']*'|[^\s.=\]]+)""", rest)[0] + "=1").items()  # type: ignore[index]
            assert name == path[-1]
