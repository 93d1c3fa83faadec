"""What the configuration says about a table of the source: whether it is mirrored, where, and with which columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pydantic import SecretStr

from walmere.config import Config
from walmere.definition import PublishedColumn, ShapedColumn, Shaping
from walmere.errors import ConfigError
from walmere.names import TableName
from walmere.shaping.clustering import can_sort
from walmere.shaping.columns import TargetColumns, target_columns
from walmere.shaping.keyed_hash import key_fingerprint
from walmere.shaping.table_choice import TableChoice
from walmere.table_sections import HASH, HASH_KEY, KEY_HINT, ColumnSection
from walmere.types.choice import by_type
from walmere.types.codec import base_type
from walmere.types.pgtype import PgType


@dataclass(frozen=True, slots=True)
class TableRules(TableChoice):
    """The sections of one subscription, and what else concerns columns. It pickles."""

    types: tuple[tuple[str, str], ...] = ()
    hash_key: SecretStr | None = None

    @classmethod
    def of(cls, config: Config) -> TableRules:
        """The rules of a configuration."""
        return cls(config.table, tuple(sorted(config.types.items())), config.hash_key)

    def require_key(self) -> None:
        """Raise ConfigError if a section needs the key of hashes, and there is none."""
        hashes = any(column.mask == HASH for each in self.sections for column in each.columns.values())
        if hashes and self.hash_key is None:
            raise ConfigError("applying the sections [[table]]", f'mask = "hash" needs {HASH_KEY}', KEY_HINT)

    def shaping(
        self,
        source: TableName,
        columns: Sequence[PublishedColumn],
        key: Sequence[str],
        types: Mapping[int, PgType],
        hidden: Sequence[tuple[int, str]] = (),
    ) -> Shaping | None:
        """How the target's table differs from the published one; None: in nothing. Raises ConfigError.

        `hidden`: attnum and name of columns that the target must not have. If one was renamed, a section has to name it
        again; otherwise its values would appear in the target because of an ALTER TABLE at the source.
        """
        if not self.sections and not self.types:
            return None
        self.require_key()  # a table must not seem to have another shaping only because there is no key
        doing = f"applying the sections [[table]] to {source}"
        wanted = self._columns(source, {each.name for each in columns}, doing)
        names = {each.attnum: each.name for each in columns}
        for attnum, name in hidden:
            now = names.get(attnum, name)
            if now != name and now not in wanted:
                wrong = f"column {now} was called {name} when the table was copied, and was dropped or masked"
                raise ConfigError(doing, wrong, f"name column {now} in the section")
        shaped = tuple(
            ShapedColumn(each.name, rule.drop, rule.mask, rule.type)
            for each in columns
            if (rule := wanted.get(each.name)) is not None and (rule.drop or rule.mask or rule.type)
        )
        made = Shaping(
            shaped,
            self._used_types(columns, types),
            self._key_fingerprint() if any(each.mask == HASH for each in shaped) else None,
            self._soft_deletes(source),
        )
        _require_suitable(made, columns, key, types, doing)
        return made if made != Shaping() else None

    def columns(
        self, columns: Iterable[PublishedColumn], types: Mapping[int, PgType], shaping: Shaping | None
    ) -> TargetColumns:
        """The columns of the target."""
        sent = [(each.name, each.type_oid, each.typmod) for each in columns]
        return target_columns(sent, types, shaping, self.hash_key)

    def cluster_by(self, source: TableName, schema: pa.Schema) -> tuple[str, ...]:
        """The columns by which the rows of a copy are sorted. Raises ConfigError if the target does not have them.

        Columns of a pattern that the table does not have are left out.
        """
        found = [(each, each.cluster_by) for each in self._matching(source) if each.cluster_by is not None]
        if not found:
            return ()
        section, wanted = found[-1]
        doing = f"applying the sections [[table]] to {source}"
        for name in wanted:
            if name in schema.names and not can_sort(schema.field(name).type):
                wrong = f"cluster_by: rows cannot be sorted by column {name}, which is {schema.field(name).type}"
                raise ConfigError(doing, wrong, "remove it from cluster_by")
            if name not in schema.names and section.exact:
                raise ConfigError(doing, f"cluster_by: the target has no column {name}", "correct cluster_by")
        return tuple(name for name in wanted if name in schema.names)

    def _columns(self, source: TableName, known: set[str], doing: str) -> dict[str, ColumnSection]:
        """The rules of columns. A section for one table must name columns that it has."""
        wanted: dict[str, ColumnSection] = {}
        for section in self._matching(source):
            missing = sorted(set(section.columns) - known)
            if section.exact and missing:
                hint = "correct the name, or remove it from the section"
                raise ConfigError(doing, f"the table has no published column {', '.join(missing)}", hint)
            wanted |= section.columns
        return wanted

    def _used_types(
        self, columns: Iterable[PublishedColumn], types: Mapping[int, PgType]
    ) -> tuple[tuple[str, str], ...]:
        """The choices of `[types]` that change a column: others must not cause a new copy."""
        chosen = dict(self.types)
        used = {
            base_type(each.type_oid, each.typmod, types)[0].name
            for each in columns
            if chosen and by_type(each.type_oid, each.typmod, types, chosen) is not None
        }
        return tuple((name, lake_type) for name, lake_type in self.types if name in used)

    def _soft_deletes(self, source: TableName) -> str | None:
        found = [each.soft_deletes for each in self._matching(source) if each.soft_deletes is not None]
        return found[-1] if found else None

    def _key_fingerprint(self) -> str | None:
        return None if self.hash_key is None else key_fingerprint(self.hash_key.get_secret_value())


def _require_suitable(
    shaping: Shaping, columns: Sequence[PublishedColumn], key: Sequence[str], types: Mapping[int, PgType], doing: str
) -> None:
    """Raise ConfigError if the columns cannot be cast as chosen, or the target's rows could not be identified."""
    for each in columns:
        try:
            made = target_columns([(each.name, each.type_oid, each.typmod)], types, shaping)
        except ValueError as error:
            raise ConfigError(doing, f"column {each.name}: {error}", "choose another type") from None
        if each.name in key and made.unsuitable_key([each.name]) is not None:
            raise ConfigError(
                doing,
                f"column {each.name} is part of the replica identity, which identifies the rows in the target",
                "hash it (different values stay different): it cannot be dropped or masked in another way",
            )
    if shaping.soft_deletes is not None and not key:
        hint = "give the table a primary key, or remove soft_deletes"
        raise ConfigError(doing, "soft_deletes needs a key, and the table has none", hint)
    if shaping.soft_deletes is not None and shaping.soft_deletes.lower() in {each.name.lower() for each in columns}:
        wrong = f"soft_deletes is {shaping.soft_deletes}, which is a column of the table"
        raise ConfigError(doing, wrong, "choose another name")
    if columns and sum(each.drop for each in shaping.columns) == len(columns):
        raise ConfigError(doing, "all columns are dropped", "set include = false to leave the table out")
