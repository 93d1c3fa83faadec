"""`walmere run`: puts source, Spark and target together."""

from __future__ import annotations

from pathlib import Path

from walmere.config import Config
from walmere.errors import ConfigError
from walmere.sinks.delta import DeltaSink
from walmere.spark.apply import Apply
from walmere.spark.session import session
from walmere.spark.tasks import SparkTasks
from walmere.subscription.launcher import Launcher
from walmere.subscription.tables import Tables
from walmere.subscription.tablesync import TableSync


def launcher(config: Config, file: Path) -> Launcher:
    """Start Spark and make a launcher that is ready to run."""
    if config.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", 'add [target] with kind = "delta" and path = "…"')
    spark = session(config.subscription.name, config.spark.master, config.spark.settings)
    directory = config.subscription.directory
    tables = Tables(directory)
    sink = DeltaSink(str(config.target.path))
    sync = TableSync(config.source, config.subscription.name, tables, sink, SparkTasks(spark))
    return Launcher(config, file, tables, sync, Apply(spark, directory, sink, tables))
