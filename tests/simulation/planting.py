"""Puts a planted fault into the modules of this process, before they are imported. No file is written."""

from __future__ import annotations

import importlib.machinery
import sys
from typing import TYPE_CHECKING

from tests.house import ROOT
from tests.simulation.planted import edited, find

if TYPE_CHECKING:
    from types import CodeType


def plant(name: str) -> None:
    """Have the modules of a fault be compiled from its texts. Before any of them is imported.

    Raises:
        RuntimeError: a module of the fault was imported already.
    """
    texts = {str(ROOT / file): text for file, text in edited(find(name)).items()}
    loaded = [module for module in sys.modules.values() if getattr(module, "__file__", None) in texts]
    if loaded:
        raise RuntimeError(f"{loaded[0].__name__} was imported before the fault was planted")
    read = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, module: str) -> CodeType | None:
        path = loader.get_filename(module)
        if path in texts:
            return loader.source_to_code(texts[path].encode(), path)
        return read(loader, module)

    setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)  # noqa: B010  # mypy: it is a method
