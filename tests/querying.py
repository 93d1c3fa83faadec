"""What stories about format `pgoutput` have in common: a session, a received log, and streams that run to their end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conftest import Database
from receiving import receive_all
from walmere.config import Config
from walmere.spark.session import session


class Queries:
    """A subscription that only receives, and queries over its log."""

    def __init__(self, database: Database, directory: Path, **source: Any) -> None:
        self.database = database
        self.scratch = directory
        self.directory = directory / "subscription"
        self.config: Config = database.config(self.directory, **source)

    @property
    def spark(self) -> SparkSession:
        return session("tests", "local[2]", {})

    def receive(self) -> None:
        receive_all(self.database, self.config)

    def read(self, table: str | None = None, **options: str) -> list[Row]:
        """All rows of the log, in its order."""
        return self.load(table, **options).orderBy("_commit_lsn", "_seq").collect()

    def load(self, table: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("pgoutput").options(**self._options(table, options))
        return reader.load()

    def stream(self, table: str | None = None, **options: str) -> DataFrame:
        return self.spark.readStream.format("pgoutput").options(**self._options(table, options)).load()

    def _options(self, table: str | None, options: Mapping[str, str]) -> dict[str, str]:
        its = {"directory": str(self.directory), **options}
        return its if table is None else {"table": table, **its}

    def start(self, stream: DataFrame, name: str, **trigger: Any) -> StreamingQuery:
        """Into Parquet files, from the checkpoint of that name; without a trigger, until it is stopped."""
        writer = stream.writeStream.format("parquet").option("path", str(self.sink(name)))
        writer = writer.option("checkpointLocation", str(self.scratch / f"{name}.checkpoint"))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def available_now(self, stream: DataFrame, name: str) -> list[int]:
        """Run it to its end. Returns the rows of its batches that had some."""
        query = self.start(stream, name, availableNow=True)
        query.awaitTermination()
        return [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]

    def sink(self, name: str) -> Path:
        return self.scratch / f"{name}.parquet"

    def landed(self, name: str) -> list[Row]:
        """What the files hold, in the log's order."""
        return self.spark.read.parquet(str(self.sink(name))).orderBy("_commit_lsn", "_seq").collect()
