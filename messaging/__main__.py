"""``python -m messaging``: the command ``messaging`` without its script."""

import sys

from messaging.cli import main

if __name__ == "__main__":
    sys.exit(main())
