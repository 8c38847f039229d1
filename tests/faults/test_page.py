"""docs/faults.md speaks of tests that exist, and leaves none of the fault tests out."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "faults.md"
#: those of the tools, and what the page tells in words
TOOLS = {"test_proxy.py", "test_ledger.py", "test_page.py", "test_promises.py"}
OTHERS = {
    "test_a_resumed_session_keeps_the_order_whatever_waits_in_it",
    "test_a_silent_server_is_abandoned_after_the_connect_timeout",
    "test_memory_that_grows_is_noticed",
    "test_counts_that_grow_are_noticed",
}


def test_the_page_names_every_fault_test_and_no_other() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text()))
    there = {
        (file.name, name)
        for file in FOLDER.glob("test_*.py")
        if file.name not in TOOLS
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE)
        if name not in OTHERS
    }
    assert named - there == set()
    assert there - named == set()
