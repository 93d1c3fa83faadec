"""The sink of a configuration."""

from __future__ import annotations

from pathlib import Path

from walmere import paths
from walmere.config import Config, PostgresTarget
from walmere.errors import ConfigError
from walmere.sinks.base import Sink
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.postgres.sink import PostgresSink


def sink_of(config: Config, file: Path) -> Sink:
    """The sink that writes to the target. `file` is where the configuration is from."""
    if config.target is None:
        raise ConfigError(f"reading {file}", "there is no [target]", 'add [target] with kind = "delta" and path = "…"')
    target = config.target
    if isinstance(target, PostgresTarget):
        return PostgresSink(
            target,
            config.subscription.name,
            target.state_schema,
            target.on_conflict,
            target.create_tables,
            two_phase=config.source.two_phase,
        )
    return DeltaSink(
        str(target.path),
        deletion_vectors=target.deletion_vectors,
        index=str(config.subscription.directory / paths.INDEX),
        file_size=config.maintenance.file_bytes if target.deletion_vectors else 0,
        keep_seconds=target.keep_seconds,
        batch_seconds=target.batch_seconds,
        storage_options=config.storage.settings if isinstance(target.path, str) else None,
    )
