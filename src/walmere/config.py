"""`walmere.toml`, and environment variables that override it.

A variable `WALMERE_<SECTION>__<KEY>` overrides a key: `WALMERE_SOURCE__PASSWORD=…`,
`WALMERE_SOURCE__PUBLICATIONS='["shop"]'`. A text is written as it is, any other value as in TOML.

A connection string may hold a password, so it is never shown: not in an error, not in a log, not in a repr.
"""

from __future__ import annotations

import os
import re
import tomllib
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from walmere import paths
from walmere.errors import ConfigError
from walmere.local_cache import VARIABLE
from walmere.object_store.options import TIMEOUT, VARIABLES, checked, is_secret, locate
from walmere.table_sections import TableSection, Types, checked_key, refused_in_a_database

CACHE: Final = f"spark.executorEnv.{VARIABLE}"
PREFIX: Final = "WALMERE_"
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}\Z")
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(file):/", re.IGNORECASE)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    # defer_build: a section is built as a part of `Config`, and not once more by itself
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, defer_build=True)


def _path(value: object) -> object:
    """A local path, as text or as a file:// URL."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError('must be text: "…"')
    if not value:
        raise ValueError("must not be empty")
    if (url := _URL.match(value)) is not None:
        scheme = url[1] or url[2]
        if scheme.lower() != "file":
            raise ValueError(f"the scheme {scheme}:// is not supported here; give a local path")
        value = _file_path(value)
    if "\0" in value:
        raise ValueError("must not contain a zero byte")
    try:
        return Path(value).expanduser() if url is None else Path(value)
    except RuntimeError:
        raise ValueError("the user after ~ has no home directory") from None


def _lake(value: object) -> object:
    """A local path, or the URL of an object store."""
    url = _URL.match(value) if isinstance(value, str) else None
    if not isinstance(value, str) or url is None or (url[1] or url[2]).lower() == "file":
        return _path(value)
    try:
        return locate(value).url
    except ConfigError as error:
        raise ValueError(f"{error.wrong}; {error.hint}") from None


def _file_path(url: str) -> str:
    """The local path of a file:// URL."""
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise ValueError("a file:// URL must not name a host: use file:///path")
    if parts.query or parts.fragment or not parts.path.startswith("/"):
        raise ValueError("a file:// URL has an absolute path and nothing else; write ? as %3F and # as %23")
    try:
        return unquote(parts.path, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("a file:// URL must be UTF-8 after its percent-encoding is decoded") from None


class Source(_Section):
    """The publisher."""

    section: ClassVar[str] = "source"

    dsn: SecretStr
    """Anything that libpq accepts: a URI, key=value, `service=…`."""
    password: SecretStr | None = None
    """Better in `WALMERE_SOURCE__PASSWORD`, `PGPASSWORD`, `.pgpass` or a service file."""
    publications: tuple[str, ...] = Field(min_length=1)
    """One or more publications of the source."""
    slot: str
    """The replication slot, created at the first start: 1 to 63 lower-case letters, digits, `_`."""
    streaming: bool = True
    """Receive large transactions while they are in progress (protocol 2 and later)."""
    two_phase: bool = False
    """Receive prepared transactions at PREPARE TRANSACTION (PostgreSQL 15 and later)."""
    failover: bool = False
    """Create the slot so that it is synchronised to standbys (PostgreSQL 17 and later)."""
    origin: Literal["any", "none"] = "any"
    """`"none"`: leave out changes that came to the source by replication (PostgreSQL 16 and later)."""
    heartbeat: Seconds = 10.0
    """Idle seconds after which a logical message is written, so that the slot advances. 0: never."""
    timeout: float = Field(default=60.0, ge=1, le=86_400)
    """Seconds of silence after which a connection counts as lost: PostgreSQL's `wal_receiver_timeout`."""

    @field_validator("publications", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("publications")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value) or not all(0 < len(name.encode()) < 64 and "\0" not in name for name in value):
            raise ValueError("each name must have 1 to 63 bytes and be listed once")
        return value

    @field_validator("slot")
    @classmethod
    def _slot_name(cls, value: str) -> str:
        if not _SLOT.match(value):
            raise ValueError("must have 1 to 63 lower-case letters, digits and underscores")
        return value


class SourceAddress(_Section):
    """The server of the source, for a reader of the log that only looks something up there."""

    section: ClassVar[str] = "source"

    dsn: SecretStr
    password: SecretStr | None = None
    timeout: float = 60.0


class SubscriptionSettings(_Section):
    """The subscription's name, state directory and change log."""

    name: str
    """1 to 63 bytes, without `/` and control characters. `pg_stat_replication` shows `walmere_<name>`."""
    directory: Path
    """The change log and the state of all tables, relative to the file's own directory. With a `store`: a cache."""
    segment_bytes: int = Field(default=64 << 20, ge=1 << 16, le=1 << 30)
    """A segment of the change log ends at this size, or after `segment_seconds`."""
    segment_seconds: Seconds = 0.1
    """A segment ends at this age, or at `segment_bytes`."""
    keep_seconds: Seconds = 86_400.0
    """How long a segment stays after every sink has applied it."""
    store: str | None = None
    """The URL of an object store for change log and state, such as `"s3://bucket/walmere/shop"`. Each subscription
    needs its own. A subscription with a local change log is moved there at the next start.
    """
    upload_seconds: float = Field(default=1.0, ge=0.05, le=60)
    """What was received is put into the store at this age, or at `upload_bytes`."""
    upload_bytes: int = Field(default=16 << 20, ge=1 << 16, le=256 << 20)
    """The size of one put, at most. The receiver holds up to four times as much in memory."""
    cache_bytes: int = Field(default=1 << 30, ge=0)
    """With a store: so many bytes of segments stay in the directory; older ones are read from the store."""

    _paths = field_validator("directory", mode="before")(_path)

    @field_validator("store")
    @classmethod
    def _store_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return locate(value).url
        except ConfigError as error:
            raise ValueError(f"{error.wrong}; {error.hint}") from None

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        """The name is used in paths, slot names and `application_name`."""
        if not 0 < len(value.encode(errors="replace")) < 64:
            raise ValueError("must have 1 to 63 bytes")
        if "/" in value or any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise ValueError("must not contain / or control characters")
        if not value.strip("."):
            raise ValueError("must not consist of dots only")
        return value


class DeltaTarget(_Section):
    """A directory of Delta tables, to which the tables are mirrored."""

    kind: Literal["delta"] = "delta"
    """A lake."""
    path: Path | str
    """Tables are at `<path>/<schema>/<table>`, rejects at `<path>/_rejects.<schema>/<table>`. A directory, relative to
    the file's own; or the URL of an object store, such as `"s3://bucket/lake"`.
    """
    mode: Literal["mirror"] = "mirror"
    """Tables equal to their source. There is no other mode yet."""
    gather_partitions: bool = False
    """Make one table of the partitions of a table that are published each under its own name."""
    messages: str | None = Field(default=None, pattern=r"^[^.]+\.[^.]+$")
    """Write logical messages to a table of this name, `schema.table`."""
    keep_seconds: Seconds = 3600.0
    """How far back tables can be read: a version stays for that long after a newer one has replaced it. Files that are
    unused for longer are deleted.
    """
    deletion_vectors: bool = True
    """Mark changed rows in deletion vectors. `false`: rewrite their files, for readers that do not support deletion
    vectors. A table is switched in place, by its next batch.
    """
    max_rewrite_bytes_per_hour: int = Field(default=10 << 30, ge=1 << 20)
    """With `deletion_vectors = false`: batches get larger, so that they rewrite about this many bytes per hour. The
    tables are then further behind, and `status` shows when the next batch begins. `--once` and `--until` do not wait.
    """
    batch_seconds: Seconds | None = None
    """A batch begins at least so many seconds after the one before. Not set: 0.5, in an object store 1. Each batch
    writes files, and makes requests to a store.
    """

    _paths = field_validator("path", mode="before")(_lake)


class PostgresTarget(_Section):
    """Another PostgreSQL database, to which the tables are mirrored: what CREATE SUBSCRIPTION does."""

    section: ClassVar[str] = "target"

    kind: Literal["postgres"]
    """A database."""
    dsn: SecretStr
    """Anything that libpq accepts: a URI, key=value, `service=…`."""
    password: SecretStr | None = None
    """Better in `WALMERE_TARGET__PASSWORD`, `PGPASSWORD`, `.pgpass` or a service file. If source and target have
    different passwords, `PGPASSWORD` is not enough: it is for both.
    """
    mode: Literal["mirror"] = "mirror"
    """Tables equal to their source. There is no other mode yet."""
    gather_partitions: bool = False
    """Make one table of the partitions of a table that are published each under its own name."""
    create_tables: bool = False
    """Create missing schemas and tables from the source's catalogs, and columns that are added later. `false`: what is
    missing is an error.
    """
    on_conflict: Literal["stop", "skip", "overwrite"] = "stop"
    """What to do with a row that violates a constraint of the target, or has a value that does not fit."""
    state_schema: str = Field(default="walmere", alias="schema", pattern=r"^[a-z_][a-z0-9_]{0,62}$")
    """The schema of the target in which Walmere has its own tables: 1 to 63 lower-case letters, digits, `_`."""
    timeout: float = Field(default=60.0, ge=1, le=86_400)
    """Seconds without an answer after which a connection counts as lost. TCP keepalives, `tcp_user_timeout` and
    `connect_timeout` (2 to 10 s) follow from it; values in `dsn` have precedence.
    """

    @property
    def messages(self) -> None:
        """Logical messages are not written to a database."""


def _kind(target: object) -> object:
    """The kind of a target, for pydantic: Delta is the default."""
    return target.get("kind", "delta") if isinstance(target, dict) else getattr(target, "kind", "delta")


Target: TypeAlias = Annotated[
    Annotated[DeltaTarget, Tag("delta")] | Annotated[PostgresTarget, Tag("postgres")], Discriminator(_kind)
]


class Maintenance(_Section):
    """Upkeep of the target's tables, beside the stream."""

    deleted_share: float = Field(default=0.1, gt=0, le=1)
    """Rewrite a file when this share of its rows is deleted."""
    file_bytes: int = Field(default=256 << 20, ge=1 << 16, le=1 << 30)
    """The size of new files, at most. Files of less than a quarter of it are joined."""
    bytes_per_hour: int = Field(default=20 << 30, ge=0)
    """Rewrite at most this many bytes per hour, also across restarts. What waits for it is in `status`. A rewrite that
    is larger than this is done when nothing was rewritten for an hour. 0: nothing is rewritten.
    """


class Storage(_Section):
    """Object stores: where they are, and how they are reached. Credentials are never here."""

    endpoint: str | None = None
    """The address of the server, such as `"http://minio.example:9000"`. Not set: the cloud's own."""
    region: str | None = None
    """Of the bucket. Not set: AWS_REGION, the region of the profile, or us-east-1."""
    timeout: float = Field(default=TIMEOUT, ge=1, le=600)
    """Seconds for one request. A request that fails is repeated for up to a minute."""
    options: Mapping[str, str | int | float | bool] = Field(default_factory=dict)
    """Other options of the store by name, such as `{virtual_hosted_style_request = true}`."""

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str | int | float | bool]) -> Mapping[str, str | int | float | bool]:
        for name in value:
            if is_secret(name):
                raise ValueError(f"{name} is a secret; set it in the environment instead (such as {VARIABLES['s3']})")
        return value

    @property
    def settings(self) -> dict[str, str]:
        """All as options of a store."""
        own = {"endpoint": self.endpoint, "region": self.region, "timeout": f"{self.timeout:g}s"}
        others = {
            name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in self.options.items()
        }
        return {**{name: each for name, each in own.items() if each is not None}, **others}


class Spark(BaseModel):
    """`master`, and any Spark setting under its own name."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, hide_input_in_errors=True, defer_build=True)

    master: str | None = None
    """Where tasks run: `local[N]`, `spark://…`, `yarn` or `k8s://…` (client mode). Not set: what `spark-submit` says,
    or else `local[*]`.
    """
    shared_directory: bool = False
    """On a cluster, local paths are refused. `true`: all executors have the same files under the paths of `[target]`
    and `[subscription]`, on a shared file system.
    """
    cache_directory: str | None = None
    """A directory of each executor for caches, such as key indexes. Not set: Spark's local directory."""

    @model_validator(mode="after")
    def _settings(self) -> Spark:
        for name, value in (self.model_extra or {}).items():
            if not name.startswith("spark.") or not isinstance(value, str | int | float):
                raise ValueError(f"{name} is not a Spark setting: a name is spark.…, a value is text or a number")
        return self

    @property
    def settings(self) -> dict[str, str]:
        """Names and values as Spark expects them."""
        extra = {**({CACHE: self.cache_directory} if self.cache_directory else {}), **(self.model_extra or {})}
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in extra.items()}


class Config(_Section):
    """All of `walmere.toml`."""

    source: Source
    subscription: SubscriptionSettings
    target: Target | None = None
    storage: Storage = Storage()
    maintenance: Maintenance = Maintenance()
    spark: Spark = Spark()
    table: tuple[TableSection, ...] = ()
    """Which tables are mirrored, and how: [[table]]."""
    types: Types = Field(default_factory=dict)
    """By type of PostgreSQL, another type in the target than the usual one."""
    hash_key: SecretStr | None = None
    """From the environment: the key of `mask = "hash"`."""

    @field_validator("table", mode="before")
    @classmethod
    def _table_sections(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("hash_key")
    @classmethod
    def _not_in_the_file(cls, _: object) -> None:
        raise ValueError("it is a secret; set WALMERE_HASH_KEY in the environment instead")

    @property
    def changelog(self) -> Path:
        """Where the change log is."""
        return self.subscription.directory / paths.CHANGELOG


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read and check the configuration. Raises only ConfigError."""
    doing = f"reading {path}"
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(doing, "there is no such file", "name it with -c, or write one: `walmere init`") from None
    except OSError as error:
        raise ConfigError(doing, error.strerror or "the file cannot be read") from None
    except UnicodeDecodeError:
        raise ConfigError(doing, "the file is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        # the message has a position but not the text, which may contain a password
        raise ConfigError(doing, f"the file is not TOML: {error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(doing, "a number is too long, or tables are nested too deeply") from None
    variables = _overlay(content, environment)
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        problems = [_problem(dict(detail), variables) for detail in details]
        raise ConfigError(doing, "; ".join(problems), "`walmere help configuration` lists the keys") from None
    # paths are relative to the file, not to the current directory
    here = path.parent.absolute()
    if isinstance(config.target, PostgresTarget):
        refused_in_a_database(config.table, config.types, doing)
    subscription = config.subscription.model_copy(update={"directory": here / config.subscription.directory})
    target = config.target
    if isinstance(target, DeltaTarget) and isinstance(target.path, Path):
        lake = here / target.path
        _require_apart(doing, subscription.directory, lake)
        target = target.model_copy(update={"path": lake})
    stores = [subscription.store, target.path if isinstance(target, DeltaTarget) else None]
    for url in stores:
        try:
            if isinstance(url, str):
                checked(locate(url), config.storage.settings)
        except ConfigError as error:
            raise ConfigError(doing, f"storage: {error.wrong}", error.hint) from None
    hash_key = checked_key(environment, doing)
    return config.model_copy(update={"subscription": subscription, "target": target, "hash_key": hash_key})


def _require_apart(doing: str, directory: Path, lake: Path) -> None:
    """Refuse a lake inside the state directory, or the reverse: `walmere drop` deletes the state directory."""
    try:
        state, tables = directory.resolve(), lake.resolve()
    except (OSError, RuntimeError) as error:  # a loop of symbolic links
        raise ConfigError(doing, f"target.path or subscription.directory cannot be resolved: {error}") from None
    if state == tables:
        wrong = f"target.path and subscription.directory are the same directory, {state}"
    elif state in tables.parents:
        wrong = f"target.path {tables} is inside subscription.directory {state}"
    elif tables in state.parents:
        wrong = f"subscription.directory {state} is inside target.path {tables}"
    else:
        return
    raise ConfigError(doing, wrong, "set them to separate directories")


def _overlay(content: dict[str, Any], environment: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Apply the environment variables. Returns which variable set which key, so that an error can name it."""
    variables: dict[tuple[str, ...], str] = {}
    for name, text in environment.items():
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not separator:
            continue
        if section not in content:
            content[section] = {}
            variables[section,] = name
        table = content[section]
        if isinstance(table, dict):
            table[key] = _value(section, key, text)
            variables[section, key] = name
    return variables


def _value(section: str, key: str, text: str) -> Any:
    sections: dict[str, tuple[type[BaseModel], ...]] = {
        "source": (Source,),
        "subscription": (SubscriptionSettings,),
        "target": (DeltaTarget, PostgresTarget),
        "storage": (Storage,),
        "maintenance": (Maintenance,),
        "spark": (Spark,),
    }  # the keys of [types] are text
    fields = {name: field for each in sections.get(section, ()) for name, field in each.model_fields.items()}
    kind = fields[key].annotation if key in fields else str
    if kind in (str, str | None, Path, Path | str, SecretStr, SecretStr | None) or key in (
        "origin",
        "schema",
        "kind",
        "on_conflict",
    ):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _problem(detail: dict[str, Any], variables: Mapping[tuple[str, ...], str]) -> str:
    section, *keys = detail["loc"]
    if section == "target" and keys[:1] in (["delta"], ["postgres"]):  # pydantic adds the kind
        del keys[0]
    where = variables.get((section, *keys[:1])) or ".".join(map(str, (section, *keys)))
    if section == "table" and keys and isinstance(keys[0], int):
        where = ".".join(map(str, (f"[[table]] {keys[0] + 1}", *keys[1:])))
    match detail["type"]:
        case "extra_forbidden" if section == "storage" and is_secret(str(keys[0])):
            return f"{where} is a secret; set it in the environment instead (such as {VARIABLES['s3']})"
        case "extra_forbidden":
            return f"{where} is not a key of the configuration"
        case "missing":
            return f"{where} is missing"
        case "union_tag_invalid":
            return f'{where}.kind must be "delta" or "postgres"'
        case "tuple_type" if section == "table" and not keys:
            return "table must be an array of tables: [[table]]"
        case "tuple_type":
            return f'{where} must be an array: ["…"]'
        case "model_type" | "dict_type":
            return f"{where} must be a table: [{where}]"
        case _:
            message = str(detail["msg"]).removeprefix("Value error, ")
            return f"{where}: {message[:1].lower()}{message[1:]}"
