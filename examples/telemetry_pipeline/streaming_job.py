"""The streaming job against your broker: it reads telemetry, and writes tables and alerts.

python examples/telemetry_pipeline/streaming_job.py URL OUTPUT [--seconds S]
spark-submit --master URL ... runs it on that master; OUTPUT must then be a directory that driver and executors share.

Restarted with the same OUTPUT, also after a crash, it continues where it stopped: no message is stored twice, and every
message that the broker has kept meanwhile is stored.
"""

import argparse
import time
from pathlib import Path

from pyspark_messaging.telemetry.bridge import AlertBridge
from pyspark_messaging.telemetry.job import Folders, TelemetryJob
from pyspark_messaging.telemetry.model import Alert
from pyspark_messaging.telemetry.session import check_installed, spark_session


def main(url: str, output: Path, seconds: float | None) -> None:
    check_installed()
    folders = Folders(output)
    with AlertBridge(url) as bridge, spark_session("telemetry", folders.work / "spark") as spark:

        @bridge.bus.on("alerts/*", type=Alert)
        def alarm(topic: str, alert: Alert) -> None:
            print(f"{topic}: {alert.reason}", flush=True)

        job = TelemetryJob(spark, url, folders)
        try:
            job.wait_subscribed()
            print(f"{len(job.queries)} queries run; Ctrl-C ends them", flush=True)
            began = time.monotonic()
            while seconds is None or time.monotonic() - began < seconds:
                time.sleep(1)
                job.check()
            job.drain()
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            job.stop()
        bridge.flush()
        print(f"{len(bridge.delays)} alerts; tables are in {folders.tables}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="broker, such as mqtt://localhost")
    parser.add_argument("output", type=Path, help="directory for tables, journal and checkpoints")
    parser.add_argument("--seconds", type=float, help="how long to run; by default until Ctrl-C")
    given = parser.parse_args()
    main(given.url, given.output, given.seconds)
