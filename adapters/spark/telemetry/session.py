"""The Spark session of a job: the one the job was submitted with, or a local one of its own.

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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_JAVA: Final = (
    "Spark needs Java 17 or newer, and there is no 'java' on PATH nor in JAVA_HOME: install a JRE, such as "
    "'apt install openjdk-17-jre-headless'"
)
#: how long Spark may take to stop by itself, and its process to end, seconds
_STOP: Final = 15.0
#: variables of a process whose master is set from outside: by spark-submit, for a gateway of its own, Spark Connect
_SUBMITTED: Final = ("PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE")
#: settings that the jobs need in any session
_OF_THE_JOBS: Final = (
    ("spark.sql.session.timeZone", "UTC"),
    ("spark.sql.streaming.numRecentProgressUpdates", "1000"),
    ("spark.sql.execution.arrow.pyspark.enabled", "true"),
)
_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


class SparkFailedError(MessagingError):
    """Spark did not start, or a query failed."""


def check_installed(*modules: str) -> None:
    """Refuse to begin without what is needed later. Java is running already where :func:`is_submitted`.

    Args:
        modules: needed beside PySpark, pyarrow, pandas and paho.

    Raises:
        MissingExtraError: a package is missing.
        ConfigurationError: Java is.
    """
    for module in ("pyspark", "pyarrow", "pandas", "paho", *modules):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("pipeline", f"the telemetry pipeline ({module})")
    if is_submitted():
        return
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{home}/bin" if home else None) is None:
        raise ConfigurationError(_NO_JAVA)


class LocalSpark:
    """Spark in a process of its own, as a child of this one. :meth:`close` may be called from any thread, at any time.

    Args:
        name: of the application.
        folder: for the log and what Spark spills.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._launching = threading.Lock()
        self._is_closed = False
        self._gateway: Any = None

    def start(self) -> SparkSession:
        """A session with the data source registered.

        Raises:
            SparkFailedError: it did not start; says what its log ends with.
        """
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession

        from adapters.spark import register

        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ["PYSPARK_PYTHON"] = sys.executable  # workers need what this process has
        configuration = SparkConf(loadDefaults=False).setMaster("local[*]").setAppName(self._name)
        configuration.setAll(_settings(self._folder))
        log = self._folder / "spark.log"
        try:
            with self._launching, log.open("ab") as output:
                if self._is_closed:
                    raise SparkFailedError("Spark was stopped before it started")
                # Its own session, so that Ctrl-C does not reach it. It ends by itself when this process does.
                streams = {"stdout": output, "stderr": output, "start_new_session": True}
                self._gateway = launch_gateway(configuration, streams)  # type: ignore[no-untyped-call]
            spark = SparkSession(SparkContext(conf=configuration, gateway=self._gateway))
        except SparkFailedError:
            raise
        except Exception as error:
            text = log.read_text(errors="replace").strip()
            reason = text.splitlines()[-1] if text else first_line(error)
            raise SparkFailedError(f"Spark did not start: {reason} (see {log})") from error
        register(spark)
        return spark

    def close(self) -> None:
        """Stop Spark; if it does not stop, end its process. Its Python workers end with it."""
        self._is_closed = True
        with self._launching:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            _end(gateway)


def is_submitted() -> bool:
    """Return whether there is a session, or a master for one, already: from ``spark-submit``, or from a notebook."""
    from pyspark.sql import SparkSession

    return any(name in os.environ for name in _SUBMITTED) or SparkSession.getActiveSession() is not None


@contextlib.contextmanager
def spark_session(name: str, folder: Path) -> Iterator[SparkSession]:
    """Provide a session with the data source registered.

    A program that was submitted gets the session, or the master, it was submitted with. Any other program gets a
    :class:`LocalSpark`. A session that was there before stays when the context is left.

    Args:
        name: of the application, where the session is made here.
        folder: of a local session, for its log and what Spark spills.
    """
    from pyspark.sql import SparkSession

    from adapters.spark import register

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


def first_line(error: BaseException) -> str:
    """What an error of Spark says, without the query plan and the traces of all that it passed through."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # PySpark asks a Java process that may be gone
        text = ""
    # the Python side of a failure is the last line of its trace
    lines = [line.strip(" :") for line in text.split("== Streaming Query")[0].splitlines() if line.strip(" :")]
    lines = [line for line in lines if not line.startswith("An error occurred while calling")]
    ours = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith("Error")]
    return (ours or lines or [type(error).__name__])[0][:500]


def _settings(folder: Path) -> list[tuple[str, str]]:
    logging = folder / "log4j2.properties"
    logging.write_text(_LOGGING)
    # a run of a minute is over before a better compiler or collector has paid for itself
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    java += f"-Dlog4j2.configurationFile={logging.resolve().as_uri()} -Djava.io.tmpdir={folder.resolve()}"
    return [
        ("spark.driver.bindAddress", "127.0.0.1"),
        ("spark.driver.host", "127.0.0.1"),
        ("spark.driver.extraJavaOptions", java),
        ("spark.local.dir", str(folder.resolve())),
        ("spark.sql.warehouse.dir", str(folder.resolve() / "warehouse")),
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.sql.shuffle.partitions", "2"),  # for a rate that one machine makes
        *_OF_THE_JOBS,
    ]


def _end(gateway: Any) -> None:
    """Stop Spark; if it does not, end its process: that ends its Python workers, too."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    def stop() -> None:
        with contextlib.suppress(Exception):  # of a process that is gone already
            active = SparkContext._active_spark_context
            if active is not None:
                active.stop()

    thread = threading.Thread(target=stop, daemon=True)  # it may hang, and it is not to be interrupted
    thread.start()
    thread.join(_STOP)
    process: subprocess.Popen[bytes] = gateway.proc
    assert process.stdin is not None  # noqa: S101  # for mypy
    with contextlib.suppress(Exception):
        gateway.shutdown()
    process.stdin.close()
    try:
        process.wait(_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # another session in this process starts anew
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
