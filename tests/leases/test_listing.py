"""The command that lists leases."""

from __future__ import annotations

import datetime

from messaging.cli.leases import time_text
from messaging.leases import LeaseInfo


def test_an_expiration_at_the_end_of_the_calendar_is_shown() -> None:
    for moment in (datetime.datetime.min, datetime.datetime.max, datetime.datetime.min.replace(tzinfo=datetime.UTC)):
        assert str(moment.year) in time_text(LeaseInfo("id", "", 1.0, 1.0, moment))
    assert time_text(LeaseInfo("id", "", 1.0, 1.0, None)) == "-"
