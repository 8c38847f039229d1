"""``python -m messaging.cli``: the command ``messaging`` without its script."""

import sys

from messaging.cli import main

sys.exit(main())
