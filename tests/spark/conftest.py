"""One Spark session for the tests of a process: it takes seconds to start."""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from messaging.testing.brokers import Mosquitto, require
from tests.spark.harness import session, unique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession


#: all that comes for clients that are away is kept
QUEUES = ("max_queued_messages 0", "set_tcp_nodelay true")


@pytest.fixture(scope="session", autouse=True)
def _plain_logs() -> None:
    """Pytest adds its handlers to loggers that do not propagate, and those of PySpark make a handler write JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logger = PySparkLogger.getLogger(name)
        logger.addHandler = partial(logging.Logger.addHandler, logger)  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def _compiled_pyspark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Spark home with a directory in the place of ``pyspark.zip``.

    Each of Spark's Python processes compiles what it imports from the zip file anew: 0.4 s of processor time each.
    """
    import pyspark

    package, home = Path(pyspark.__file__).parent, tmp_path_factory.mktemp("spark-home")
    libraries = home / "python" / "lib"
    (libraries / "pyspark.zip").mkdir(parents=True)
    (libraries / "pyspark.zip" / "pyspark").symlink_to(package)
    for source, folder in ((package, home), (package / "python" / "lib", libraries)):
        for each in source.iterdir():
            if not (folder / each.name).exists():
                (folder / each.name).symlink_to(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        yield


def require_java() -> None:
    """Skip the test where Spark cannot run, but fail in CI."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        if os.environ.get("CI"):
            pytest.fail("Spark needs Java 17 or newer: .ci/setup brokers installs it")
        pytest.skip("Spark needs Java 17 or newer")


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session writes what its user interface shows."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, event_log: Path) -> Iterator[SparkSession]:
    """A local session that knows the data source. Tasks may fail twice."""
    require_java()
    made = session(
        tmp_path_factory.mktemp("spark"),
        "local[2, 3]",
        **{
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": event_log.as_uri(),
        },
    )
    yield made
    made.stop()


@pytest.fixture(params=["mosquitto", "rabbitmq"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a shared broker of each kind."""
    found: str = request.getfixturevalue(request.param).url
    return found


@pytest.fixture
def channel() -> str:
    """A channel of the test's own at a shared broker."""
    return unique("channel")


@pytest.fixture
def broker() -> Iterator[Mosquitto]:
    """A Mosquitto of the test's own, which keeps what clients that are away have not got."""
    require("mosquitto")
    with Mosquitto(QUEUES) as broker:
        yield broker


@pytest.fixture
def durable_broker() -> Iterator[Mosquitto]:
    """One that keeps it over a restart, too: it writes to the disk with every message, and is slow."""
    require("mosquitto")
    with Mosquitto(QUEUES, persistence=True) as broker:
        yield broker


@pytest.fixture
def small_disk(disk_of: Callable[[str], Path]) -> Path:
    """A file system of 4 MiB."""
    return disk_of("4m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that need a session, one after the other: one worker runs them, and starts one session.

    Sessions take long to start on a busy machine, and one that is interrupted in a call to Java is broken.
    """
    with_session = [item for item in items if "spark" in getattr(item, "fixturenames", ())]
    for item in with_session:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))
    others = [item for item in items if "spark" not in getattr(item, "fixturenames", ())]
    items[:] = with_session + others
