"""A driver that is going to be killed: a broker's channel to a Parquet table, until its input closes.

    python -m tests.spark.driver FOLDER OPTION=VALUE ...

``FOLDER`` gets ``journal``, ``checkpoint`` and ``table``. It writes a line when the query runs, one for each
micro-batch, and one with the error of a query that fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.spark.harness import session


def main(folder: Path, options: dict[str, str]) -> int:
    from pyspark.sql.streaming.listener import StreamingQueryListener

    spark = session(folder, "local[2]")

    class Progress(StreamingQueryListener):
        def onQueryStarted(self, event: object) -> None:  # noqa: N802
            pass

        def onQueryProgress(self, event: object) -> None:  # noqa: N802
            print("batch", event.progress.batchId, event.progress.numInputRows, flush=True)  # noqa: T201

        def onQueryIdle(self, event: object) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: object) -> None:  # noqa: N802
            pass

    spark.streams.addListener(Progress())
    given = {"journalPath": str(folder / "journal"), **options}
    query = (
        spark.readStream.format("messaging")
        .options(**given)
        .load()
        .writeStream.format("parquet")
        .option("path", str(folder / "table"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    print("running", flush=True)  # noqa: T201
    while query.isActive:
        if sys.stdin.readline() == "":
            query.stop()
            spark.stop()
            return 0
    print("failed", str(query.exception()).replace("\n", " | "), flush=True)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:])))
