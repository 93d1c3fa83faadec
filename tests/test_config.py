from __future__ import annotations

import os
from pathlib import Path

import pytest

from walmere.config import Config, DeltaTarget, load
from walmere.errors import ConfigError

SECRET = "s3cr3t-Wort"
SOURCE = """
[source]
dsn = "postgresql://repl@db.example:5432/shop"
publications = ["shop"]
slot = "walmere_shop"
"""
SUBSCRIPTION = """
[subscription]
name = "shop"
directory = "/var/lib/walmere/shop"
"""


def read(folder: Path, text: str, **environment: str) -> Config:
    path = folder / "walmere.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, environment)


def refusal(folder: Path, text: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, **environment)
    assert SECRET not in str(caught.value) + repr(caught.value)
    return caught.value.wrong


def test_the_shortest_configuration_has_the_documented_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, SOURCE + SUBSCRIPTION)
    assert config.source.publications == ("shop",)
    assert (config.source.streaming, config.source.two_phase, config.source.failover) == (True, False, False)
    assert (config.source.origin, config.source.heartbeat, config.source.password) == ("any", 10.0, None)
    assert config.subscription.directory == Path("/var/lib/walmere/shop")
    assert config.changelog == Path("/var/lib/walmere/shop/changelog")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (SOURCE + "snapshot = true" + SUBSCRIPTION, "source.snapshot is not a key of the configuration"),
        (SOURCE + SUBSCRIPTION + "[surprise]\nx = 1", "surprise is not a key of the configuration"),
        (SOURCE, "subscription is missing"),
        ("[source]" + SUBSCRIPTION, "source.dsn is missing; source.publications is missing; source.slot is missing"),
        ("source = 3" + SUBSCRIPTION, "source must be a table: [source]"),
        (SOURCE.replace('["shop"]', '"shop"') + SUBSCRIPTION, 'source.publications must be an array: ["…"]'),
        (SOURCE.replace('["shop"]', "[]") + SUBSCRIPTION, "source.publications: tuple should have at least 1 item"),
        (SOURCE.replace('["shop"]', "[1]") + SUBSCRIPTION, "source.publications.0: input should be a valid string"),
        (SOURCE.replace('["shop"]', '["a", "a"]') + SUBSCRIPTION, "each name must have 1 to 63 bytes and be listed"),
        (SOURCE.replace('["shop"]', f'["{"é" * 32}"]') + SUBSCRIPTION, "have 1 to 63 bytes"),
        (SOURCE.replace("walmere_shop", "Shop") + SUBSCRIPTION, "source.slot: must have 1 to 63 lower-case"),
        (SOURCE.replace("walmere_shop", "a" * 64) + SUBSCRIPTION, "source.slot: must have 1 to 63 lower-case"),
        (SOURCE.replace("walmere_shop", "shop\\n") + SUBSCRIPTION, "source.slot: must have 1 to 63 lower-case"),
        (SOURCE + 'streaming = "yes"' + SUBSCRIPTION, "source.streaming: input should be a valid boolean"),
        (SOURCE + "heartbeat = -1" + SUBSCRIPTION, "source.heartbeat: input should be greater than or equal to 0"),
        (SOURCE + "timeout = 0" + SUBSCRIPTION, "source.timeout: input should be greater than or equal to 1"),
        (SOURCE + "heartbeat = nan" + SUBSCRIPTION, "source.heartbeat: input should be"),
        (SOURCE + "heartbeat = true" + SUBSCRIPTION, "source.heartbeat: input should be a valid number"),
        (SOURCE + 'origin = "some"' + SUBSCRIPTION, "source.origin: input should be 'any' or 'none'"),
        (SOURCE + SUBSCRIPTION.replace('"/var/lib/walmere/shop"', "7"), "subscription.directory: must be text"),
        (SOURCE + SUBSCRIPTION.replace("/var/lib/walmere/shop", ""), "subscription.directory: must not be empty"),
        (SOURCE + SUBSCRIPTION + '[target]\npath = ""', "target.path: must not be empty"),
        (SOURCE + SUBSCRIPTION.replace('"shop"', '""'), "subscription.name: must have 1 to 63 bytes"),
        (SOURCE + SUBSCRIPTION.replace('"shop"', f'"{"é" * 32}"'), "subscription.name: must have 1 to 63 bytes"),
        (SOURCE + SUBSCRIPTION.replace('"shop"', '"a/b"'), "subscription.name: must not contain /"),
        (SOURCE + SUBSCRIPTION.replace('"shop"', '"a\\u0007"'), "subscription.name: must not contain /"),
        (SOURCE + SUBSCRIPTION.replace('"shop"', '".."'), "subscription.name: must not consist of dots"),
        (SOURCE + SUBSCRIPTION.replace("/var/lib", "a\\u0000b"), "subscription.directory: must not contain a zero"),
        (SOURCE + SUBSCRIPTION.replace("/var/lib", "~nobody-of-that-name"), "subscription.directory: the user after ~"),
        (SOURCE + SUBSCRIPTION + "segment_bytes = 5", "subscription.segment_bytes: input should be greater"),
        (SOURCE + SUBSCRIPTION + "segment_bytes = 1e9", "subscription.segment_bytes: input should be a valid integer"),
        (SOURCE + SUBSCRIPTION + "[table]\nmatch = 'a.b'", "table must be an array of tables: [[table]]"),
        (SOURCE + SUBSCRIPTION + "[[table]]\ninclude = true", "[[table]] 1.match is missing"),
        (SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'orders'", '[[table]] 1.match: must be "schema.table"'),
        (SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b.c'", '[[table]] 1.match: must be "schema.table"'),
        (SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\nexclude = true", "[[table]] 1.exclude is not a key"),
        (SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\nname = ''", "[[table]] 1.name: must not be empty"),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\nnamespace = '_rejects.a'",
            "[[table]] 1.namespace: names that begin with _rejects.",
        ),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\ncolumns = {x = 'sha1'}",
            '[[table]] 1.columns.x.mask: must be "hash", "null", "redact" or a function: "module:function"',
        ),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\ncolumns = {x = {drop = true, mask = 'null'}}",
            "[[table]] 1.columns.x: a column that is dropped has neither mask nor type",
        ),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\ncolumns = {x = {mask = 'redact', type = 'int'}}",
            "[[table]] 1.columns.x: redact makes text: the type cannot be int",
        ),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\ncolumns = {x = {type = 'numeric'}}",
            "[[table]] 1.columns.x.type: numeric is not a type of the target",
        ),
        (
            SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\ncolumns = {x = {type = 'decimal(39,2)'}}",
            "[[table]] 1.columns.x.type: a decimal has 1 to 38 digits",
        ),
        (
            SOURCE + SUBSCRIPTION + "[types]\njsonb = 'struct'",
            "types: jsonb cannot be struct; it can be string or variant",
        ),
        (
            SOURCE + SUBSCRIPTION + "[types]\nuuid = 'variant'",
            "types: uuid cannot be variant; it can be string or binary",
        ),
        (SOURCE + SUBSCRIPTION + "[types]\nmoney = 'string'", "types: there is no choice for money"),
        (
            SOURCE + SUBSCRIPTION + "[types]\nuuid = 'bigint'",
            "types: uuid cannot be bigint; it can be string or binary",
        ),
        (SOURCE + SUBSCRIPTION + "[types]\nnumeric = 5", "types.numeric: input should be a valid string"),
        (
            "hash_key = 'abcdefghijklmnopqrst'" + SOURCE + SUBSCRIPTION,
            "hash_key: it is a secret; set WALMERE_HASH_KEY in the environment instead",
        ),
        (
            SOURCE + SUBSCRIPTION + "[target]\nkind = 'postgres'\ndsn = 'host=x'\n[types]\njsonb = 'variant'",
            "[types]: in a database, columns have the types of the source",
        ),
        (
            SOURCE + SUBSCRIPTION + "[target]\nkind = 'postgres'\ndsn = 'host=x'\n[types]\nuuid = 'binary'",
            "[types]: in a database, columns have the types of the source",
        ),
        (
            SOURCE + SUBSCRIPTION + "[target]\nkind = 'postgres'\ndsn = 'host=x'\n"
            "[[table]]\nmatch = 'a.*'\ninclude = false\n[[table]]\nmatch = 'a.b'\nname = 'c'",
            "[[table]] 2 (a.b): in a database, tables have the names and columns of the source",
        ),
        ("[source\n", "the file is not TOML: "),
        (SOURCE + SOURCE, "the file is not TOML: "),
        (f"x = {'9' * 5000}", "a number is too long"),
        (f"x = {'[' * 100_000}", "a number is too long, or tables are nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, wrong: str) -> None:
    assert wrong in refusal(tmp_path, text)


def test_the_key_of_hashes_comes_from_the_environment(tmp_path: Path) -> None:
    text = SOURCE + SUBSCRIPTION + "[[table]]\nmatch = 'a.b'\n[table.columns]\nemail = 'hash'"
    assert read(tmp_path, text).hash_key is None, "to read tables, or to see the status, it is not needed"
    assert "fewer than 16 characters" in refusal(tmp_path, text, WALMERE_HASH_KEY="short")
    config = read(tmp_path, text, WALMERE_HASH_KEY=SECRET * 2)
    assert config.hash_key is not None
    assert config.hash_key.get_secret_value() == SECRET * 2
    assert SECRET not in repr(config)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = refusal(tmp_path, SOURCE + "two_phase = 1\nfailover = 2" + SUBSCRIPTION)
    assert "source.two_phase" in wrong
    assert "source.failover" in wrong


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes("größe = 1".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.toml", {})


@pytest.mark.parametrize(
    "text",
    [
        f'dsn = "postgresql://u:{SECRET}@h/db',
        f"dsn = postgresql://u:{SECRET}@h/db",
        f'dsn = "host=h password=\'{SECRET}"',
        f'dsn = ["postgresql://u:{SECRET}@h/db"]',
        f'dsn = {{password = "{SECRET}"}}',
        f'dsn = "postgresql://u:{SECRET}@h/db\\q"',
        f'password = ["{SECRET}"]',
        f'passwort = "{SECRET}"',
        f'slot = "{SECRET}"',
    ],
)
def test_no_broken_file_shows_its_password(tmp_path: Path, text: str) -> None:
    refusal(tmp_path, f"[source]\n{text}\n{SUBSCRIPTION}")


def test_a_password_is_not_in_the_repr_of_a_configuration(tmp_path: Path) -> None:
    config = read(
        tmp_path, SOURCE.replace("repl@", f"repl:{SECRET}@") + SUBSCRIPTION, WALMERE_SOURCE__PASSWORD=SECRET + "2"
    )
    assert SECRET not in repr(config) + str(config) + repr(config.source) + str(config.model_dump())
    assert config.source.dsn.get_secret_value() == f"postgresql://repl:{SECRET}@db.example:5432/shop"
    assert config.source.password is not None
    assert config.source.password.get_secret_value() == SECRET + "2"


def test_each_kind_of_value_can_come_from_the_environment(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        SOURCE + SUBSCRIPTION,
        WALMERE_SOURCE__DSN="host=other",
        WALMERE_SOURCE__PASSWORD="123",
        WALMERE_SOURCE__PUBLICATIONS='["a", "B c"]',
        WALMERE_SOURCE__SLOT="7",
        WALMERE_SOURCE__TWO_PHASE="true",
        WALMERE_SOURCE__ORIGIN="none",
        WALMERE_SOURCE__HEARTBEAT="2",
        WALMERE_SUBSCRIPTION__DIRECTORY="/elsewhere",
        WALMERE_SUBSCRIPTION__SEGMENT_BYTES="1_000_000",
        WALMERE_OTHER="not ours: it has no section",
        PGPASSWORD=SECRET,
    )
    source, subscription = config.source, config.subscription
    assert source.dsn.get_secret_value() == "host=other"
    assert source.password is not None
    assert source.password.get_secret_value() == "123"
    assert (source.publications, source.slot) == (("a", "B c"), "7")
    assert (source.two_phase, source.origin, source.heartbeat) == (True, "none", 2.0)
    assert (subscription.directory, subscription.segment_bytes) == (Path("/elsewhere"), 1_000_000)


def test_the_environment_alone_is_enough_for_a_section(tmp_path: Path) -> None:
    config = read(tmp_path, SOURCE, WALMERE_SUBSCRIPTION__NAME="x", WALMERE_SUBSCRIPTION__DIRECTORY="/x")
    assert config.subscription.name == "x"


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("WALMERE_SOURCE__TWO_PHASE", "yes", ": input should be a valid boolean"),
        ("WALMERE_SOURCE__PUBLICATIONS", "shop", " must be an array"),
        ("WALMERE_SOURCE__PUBLICATIONS", "[1]", ": input should be a valid string"),
        ("WALMERE_SOURCE__HEARTBEAT", "9" * 5000, ": input should be a valid number"),
        ("WALMERE_SOURCE__PASSWROD", SECRET, " is not a key"),
        ("WALMERE_SUORCE__PASSWORD", SECRET, " is not a key"),
        ("WALMERE_SOURCE__SLOT", SECRET, ": must have 1 to 63 lower-case"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    assert name + wrong in refusal(tmp_path, SOURCE + SUBSCRIPTION, **{name: text})


def test_a_relative_directory_is_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SOURCE + SUBSCRIPTION.replace("/var/lib/walmere/shop", "state/shop")
    assert read(tmp_path, text).subscription.directory == tmp_path / "state" / "shop"
    monkeypatch.chdir(tmp_path)
    assert load(Path("walmere.toml"), {}).subscription.directory == tmp_path / "state" / "shop"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = read(tmp_path, SOURCE + SUBSCRIPTION.replace("/var/lib", "~"))
    assert config.subscription.directory == Path("/home/ada/walmere/shop")


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALMERE_SOURCE__SLOT", "from_the_environment")
    (tmp_path / "walmere.toml").write_text(SOURCE + SUBSCRIPTION)
    assert load(tmp_path / "walmere.toml").source.slot == os.environ["WALMERE_SOURCE__SLOT"]


@pytest.mark.parametrize("scheme", ["s3", "abfss", "gs", "hdfs", "https", "S3"])
def test_a_url_that_is_not_supported_is_refused_and_its_scheme_is_named(tmp_path: Path, scheme: str) -> None:
    state = SUBSCRIPTION.replace("/var/lib", f"{scheme}://bucket")
    assert f"subscription.directory: the scheme {scheme}:// is not supported" in refusal(tmp_path, SOURCE + state)
    if scheme in ("hdfs", "https"):
        target = f'[target]\npath = "{scheme}://bucket/lake"'
        wrong = refusal(tmp_path, SOURCE + SUBSCRIPTION + target)
        assert f"target.path: the scheme {scheme}:// is not supported" in wrong
        assert "s3://" in wrong


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/lake/", "s3://bucket/lake"),
        ("S3A://bucket/lake", "s3://bucket/lake"),
        ("gs://bucket/lake", "gs://bucket/lake"),
        ("az://files/lake", "az://files/lake"),
        ("abfss://files@account.dfs.core.windows.net/a/b", "abfss://files@account.dfs.core.windows.net/a/b"),
    ],
)
def test_the_url_of_an_object_store_is_a_target(tmp_path: Path, path: str, url: str) -> None:
    config = read(tmp_path, SOURCE + SUBSCRIPTION + f"[target]\npath = '{path}'")
    assert isinstance(config.target, DeltaTarget)
    assert config.target.path == url


STORED = SOURCE + SUBSCRIPTION + '[target]\npath = "s3://bucket/lake"\n'


def test_the_options_of_an_object_store(tmp_path: Path) -> None:
    text = "[storage]\nendpoint = 'http://localhost:9000'\nregion = 'eu-central-1'\n"
    text += "options = {aws_virtual_hosted_style_request = true, pool_max_idle_per_host = 4}\n"
    found = read(tmp_path, STORED + text, WALMERE_STORAGE__REGION="us-west-2", WALMERE_STORAGE__TIMEOUT="7")
    assert found.storage.settings == {
        "endpoint": "http://localhost:9000",
        "region": "us-west-2",
        "timeout": "7s",
        "aws_virtual_hosted_style_request": "true",
        "pool_max_idle_per_host": "4",
    }
    wrong = refusal(tmp_path, STORED + "[storage]\noptions = {regoin = 'x'}")
    assert "storage: regoin is not an option of s3://bucket" in wrong
    assert "storage.timeout" in refusal(tmp_path, STORED + "[storage]\ntimeout = 0")
    addresses = ["localhost:9000", "http://", "http://h:x", "http://[::1", "ftp://h", "http://h:99999"]
    # obstore would panic
    addresses += [" http://h:9000", "http://a b:1", "http://a%00", "http://1.2.3.4.5", "http://a^b"]
    for address in addresses:
        wrong = refusal(tmp_path, STORED + f"[storage]\nendpoint = '{address}'")
        assert "endpoint is not the address of a server" in wrong, address


@pytest.mark.parametrize(
    "text",
    [
        "options = {secret_access_key = 'hunter2'}",
        "options = {AWS_SESSION_TOKEN = 'hunter2'}",
        "secret_access_key = 'hunter2'",
        "azure_storage_account_key = 'hunter2'",
        "endpoint = 'https://me:hunter2@localhost'",
    ],
)
def test_a_secret_in_the_storage_section_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    wrong = refusal(tmp_path, STORED + "[storage]\n" + text)
    assert "secret" in wrong or "password" in wrong
    assert "hunter2" not in wrong
    assert "environment" in wrong or "password" in wrong


def test_a_url_with_a_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    wrong = refusal(tmp_path, STORED.replace("s3://bucket", "s3://key:hunter2@bucket"))
    assert "AWS_SECRET_ACCESS_KEY" in wrong
    assert "hunter2" not in wrong


def test_credentials_in_the_environment_are_not_part_of_the_configuration(tmp_path: Path) -> None:
    variables = {"AWS_ACCESS_KEY_ID": "hunter1", "AWS_SECRET_ACCESS_KEY": "hunter2"}
    found = read(tmp_path, STORED, **variables)
    assert "hunter" not in repr(found) + found.model_dump_json()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///srv/lake", "/srv/lake"),
        ("FILE:///srv/lake", "/srv/lake"),
        ("file:/srv/lake", "/srv/lake"),
        ("file://localhost/srv/lake", "/srv/lake"),
        ("file:///srv/my%20lake%23/%C3%A9", "/srv/my lake#/é"),
        ("file:///srv/~lake", "/srv/~lake"),
    ],
)
def test_a_file_url_is_a_local_path(tmp_path: Path, url: str, path: str) -> None:
    config = read(
        tmp_path, SOURCE + SUBSCRIPTION.replace("/var/lib/walmere/shop", f"{url}-state") + f"[target]\npath = '{url}'"
    )
    assert isinstance(config.target, DeltaTarget)
    assert config.target.path == Path(path)
    assert config.subscription.directory == Path(f"{path}-state")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("file://server/lake", "must not name a host"),
        ("file://lake", "must not name a host"),
        ("file://", "absolute path"),
        ("file:///lake?x", "%3F"),
        ("file:///lake#x", "%23"),
        ("file:///%FF", "UTF-8"),
        ("file:///a%00b", "zero byte"),
    ],
)
def test_a_file_url_that_is_no_local_path_is_refused(tmp_path: Path, url: str, wrong: str) -> None:
    assert wrong in refusal(tmp_path, SOURCE + SUBSCRIPTION + f"[target]\npath = '{url}'")


@pytest.mark.parametrize(
    ("directory", "path", "wrong"),
    [
        ("state", "state", "are the same directory"),
        ("state", "state/lake", "target.path"),
        ("lake/state", "lake", "subscription.directory"),
        ("state", "link/lake", "target.path"),
        ("state", "file://HERE/state/../state/lake", "target.path"),
    ],
)
def test_a_lake_and_a_state_directory_inside_each_other_are_refused(
    tmp_path: Path, directory: str, path: str, wrong: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to("state")
    text = SOURCE + SUBSCRIPTION.replace("/var/lib/walmere/shop", directory)
    assert wrong in refusal(tmp_path, f"{text}[target]\npath = '{path.replace('HERE', str(tmp_path))}'")
    assert read(tmp_path, f"{text}[target]\npath = 'state-lake'").target is not None, "a common prefix is no parent"
