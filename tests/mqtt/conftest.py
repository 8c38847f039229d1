from __future__ import annotations

import pytest


@pytest.fixture(params=["5", "3.1.1"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)
