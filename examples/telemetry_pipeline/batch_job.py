"""The batch job over the tables of the streaming job, which may be running.

python examples/telemetry_pipeline/batch_job.py OUTPUT [--ledger FILE]
spark-submit --master URL ... runs it on that master; OUTPUT must then be a directory that driver and executors share.
"""

import argparse
from pathlib import Path

from pyspark_messaging.telemetry import batch
from pyspark_messaging.telemetry.job import Folders
from pyspark_messaging.telemetry.session import check_installed, spark_session


def main(output: Path, ledger: Path | None) -> None:
    check_installed()
    folders = Folders(output)
    with spark_session("telemetry-batch", folders.work / "spark") as spark:
        tables = batch.run(spark, folders, ledger)
        print("by day and site")
        batch.by_site(tables, "day").orderBy("day", "site").show(truncate=False)
        print("the devices with the most anomalies")
        batch.most_anomalies(tables).show(truncate=False)
        if ledger is not None:
            print("completeness: messages that the broker accepted, and messages that are stored")
            batch.completeness(spark, tables, ledger).orderBy("device").show(1000, truncate=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="the directory of the streaming job")
    parser.add_argument("--ledger", type=Path, help="the ledger of the fleet")
    given = parser.parse_args()
    main(given.output, given.ledger)
