"""``python -m messaging.testing.conformance [URL ...] [options of pytest]``: run the suite."""

from __future__ import annotations

import sys
from itertools import takewhile

import pytest

PACKAGE = "messaging.testing.conformance"


def main(arguments: list[str]) -> int:
    """Run the suite against the brokers at the URLs, and return pytest's exit code.

    Args:
        arguments: URLs of brokers first; the rest is passed on to pytest. Without a URL, the suite runs against this
            project's adapters on brokers of its own.
    """
    urls = [*takewhile(lambda each: "://" in each, arguments)]
    chosen = [option for url in urls for option in ("--backend-url", url)]
    return pytest.main(["-p", "messaging.testing.plugin", "--pyargs", PACKAGE, *chosen, *arguments[len(urls) :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
