"""The environment of the program: names of its variables, forks of the process (``forks``), signals (``signals``).

Imports nothing of this project: the help of the command line names the variables, and must be fast.
"""

from __future__ import annotations

from typing import Final

#: begins the variables of settings: the rest is the name of the setting
ENVIRONMENT_PREFIX: Final = "MESSAGING_"
#: the URL of the broker
URL_VARIABLE: Final = "MESSAGING_URL"
