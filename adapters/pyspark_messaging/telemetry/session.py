"""The Spark session of a job: the session it was submitted with, or a local one.

A local session is on the loopback interface, quiet on the console, and ends with the program. The output of Java and of
the Python workers goes to a file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import ConfigurationError, MessagingError, MissingExtraError
from pyspark_messaging.errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_JAVA: Final = (
    "Spark needs Java 17 or newer, and there is no 'java' on PATH nor in JAVA_HOME: install a JRE, such as "
    "'apt install openjdk-17-jre-headless'"
)
#: how long Spark may take to stop, and its process to end, in seconds
_STOP: Final = 15.0
#: environment variables of processes whose master is set from outside: by spark-submit or Spark Connect
_SUBMITTED: Final = ("PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE")
#: settings that the jobs need in any session
_OF_THE_JOBS: Final = (
    ("spark.sql.session.timeZone", "UTC"),
    ("spark.sql.streaming.numRecentProgressUpdates", "1000"),
    ("spark.sql.execution.arrow.pyspark.enabled", "true"),
)


class SparkFailedError(MessagingError):
    """Spark did not start, or a query failed."""


def check_installed(*modules: str) -> None:
    """Check that PySpark, pyarrow, pandas, paho and ``modules`` are installed, and Java unless :func:`is_submitted`."""
    for module in ("pyspark", "pyarrow", "pandas", "paho", *modules):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("pipeline", f"the telemetry pipeline ({module})")
    if is_submitted():
        return
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{home}/bin" if home else None) is None:
        raise ConfigurationError(_NO_JAVA)


class LocalSpark:
    """Spark in a child process, with its log and temporary files in ``folder``.

    :meth:`close` may be called from any thread, at any time.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._launching = threading.Lock()
        self._is_closed = False
        self._gateway: Any = None
        self._session: SparkSession | None = None

    def start(self) -> SparkSession:
        """Return a session with the data source registered; ``SparkFailedError`` has the end of the log."""
        from pyspark import SparkConf, SparkContext, java_gateway
        from pyspark.sql import SparkSession

        from pyspark_messaging import register

        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ["PYSPARK_PYTHON"] = sys.executable  # workers need the packages of this process
        configuration = SparkConf(loadDefaults=False).setMaster("local[*]").setAppName(self._name)
        configuration.setAll(_settings(self._folder))
        log = self._folder / "spark.log"
        try:
            with self._launching, log.open("ab") as output:
                if self._is_closed:
                    raise SparkFailedError("Spark was stopped before it started")
                # Its own session, so that Ctrl-C does not reach it. It ends with this process.
                streams = {"stdout": output, "stderr": output, "start_new_session": True}
                launch: Any = java_gateway.launch_gateway  # has no types
                self._gateway = launch(configuration, streams)
            self._session = spark = SparkSession(SparkContext(conf=configuration, gateway=self._gateway))
        except SparkFailedError:
            raise
        except Exception as error:
            text = log.read_text(errors="replace").strip()
            reason = text.splitlines()[-1] if text and self._gateway is None else first_line(error)
            raise SparkFailedError(f"Spark did not start: {reason} (see {log})") from error
        register(spark)
        return spark

    def close(self) -> None:
        """Stop Spark and end its process; kill it if it does not end. Its Python workers end with it."""
        self._is_closed = True
        with self._launching:
            gateway, self._gateway = self._gateway, None
        if gateway is None:
            return

        def stop() -> None:
            with contextlib.suppress(Exception):  # its process may have ended already
                if self._session is not None:
                    self._session.stop()

        stopping = threading.Thread(target=stop, daemon=True)  # stopping may hang, and must not be interrupted
        stopping.start()
        stopping.join(_STOP)
        process = gateway.proc
        process.stdin.close()  # it exits when its stdin ends
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_submitted() -> bool:
    """Return whether ``spark-submit`` or a notebook has set a session, or a master for one."""
    from pyspark.sql import SparkSession

    return any(name in os.environ for name in _SUBMITTED) or SparkSession.getActiveSession() is not None


@contextlib.contextmanager
def spark_session(name: str, folder: Path) -> Iterator[SparkSession]:
    """Provide a session with the data source registered.

    A submitted program gets its session, or a session on its master. Any other program gets a :class:`LocalSpark`. An
    existing session stays open when the context is left.
    """
    from pyspark.sql import SparkSession

    from pyspark_messaging import register

    if is_submitted():
        was_there = SparkSession.getActiveSession() is not None
        builder = SparkSession.builder if was_there else SparkSession.builder.appName(name)
        spark = builder.config(map=dict(_OF_THE_JOBS)).getOrCreate()
        register(spark)
        try:
            yield spark
        finally:
            if not was_there:
                spark.stop()
        return
    local = LocalSpark(name, folder)
    try:
        yield local.start()
    finally:
        local.close()


def _settings(folder: Path) -> list[tuple[str, str]]:
    # a run of a minute ends before a better compiler or collector pays off
    java = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={folder.resolve()}"
    return [
        ("spark.driver.bindAddress", "127.0.0.1"),
        ("spark.driver.host", "127.0.0.1"),
        ("spark.driver.extraJavaOptions", java),
        ("spark.local.dir", str(folder.resolve())),
        ("spark.sql.warehouse.dir", str(folder.resolve() / "warehouse")),
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.sql.shuffle.partitions", "2"),  # enough for the rate of one machine
        *_OF_THE_JOBS,
    ]
