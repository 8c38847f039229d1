"""Names that mean several things, or nothing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable

from tests.house.sources import FACES, Found, House

#: subjects that name no thing; rule 1 of the style of this project
VAGUE = re.compile(r"\b(whoever|nobody|somebody|anybody|those that|what is|what was)\b", re.IGNORECASE)
#: modules that each package has under the same name, after the contract that they fulfil
CONTRACTS = {"adapter", "settings", "errors", "constants", "names"}


def shared_nouns(house: House) -> list[str]:
    """Return the names of classes that several modules define, each with its places.

    Leading underscores do not count: ``_Route`` is a ``Route``. Classes in classes and in functions count as well.
    """
    return _shared((node.name.lstrip("_"), Found(file, node.lineno, "")) for file, node in house.find(ast.ClassDef))


def shared_module_names(house: House) -> list[str]:
    """Return the names of modules that several packages have, without faces and ``CONTRACTS``."""
    return _shared(
        (file.stem.lstrip("_"), Found(file, 1, ""))
        for file in house.product
        if file.stem not in FACES and file.stem not in CONTRACTS
    )


def vague_words(house: House) -> list[Found]:
    """Return the subjects that name no thing, in the sources and the pages."""
    pages = [*(house.root / "docs").rglob("*.md"), house.root / "README.md"]
    texts = {**house.files, **{page.relative_to(house.root): page.read_text(encoding="utf-8") for page in pages}}
    return [
        Found(file, number, word)
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for word in VAGUE.findall(line)
    ]


def _shared(names: Iterable[tuple[str, Found]]) -> list[str]:
    places: dict[str, list[Found]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    several = {name: found for name, found in places.items() if len({each.file for each in found}) > 1}
    return [
        f"{name} ({len(found)}): {', '.join(f'{each.file}:{each.line}' for each in found)}"
        for name, found in sorted(several.items(), key=lambda each: (-len(each[1]), each[0]))
    ]
