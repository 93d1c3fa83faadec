"""Metrics follow Prometheus's rules, and every file that names one names one that exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from walmere.errors import SinkFull
from walmere.metrics import names
from walmere.metrics.families import RunCounters, Samples, add_status, exposition
from walmere.metrics.names import MetricName
from walmere.metrics.receiver import add_receiver, add_receiver_alone, receiver_report

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "walmere.json"
PROMTOOL = shutil.which("promtool")

# what promtool check metrics refuses, and Prometheus's page on naming asks for
NOT_BASE_UNITS = re.compile(
    r"_(milli|micro|nano)?(second|minutes?|hours?|days?|kilobytes|megabytes|gigabytes|bits|percent|ms|us|ns|kb|mb|gb)(_|$)"
)
_SUFFIXES = {"gauge": ("",), "counter": ("",), "histogram": ("_bucket", "_sum", "_count")}
TYPES = re.compile(r"_(gauge|counter|summary|histogram)(_|$)")

TABLE: dict[str, Any] = {
    "name": 'odd."name"\n', "phase": "d", "rows_copied": 10, "rows_estimated": 100, "snapshot_lsn": None,
    "applied_lsn": "16/B374D848", "rejects": 2, "error": None, "published": True, "lag_bytes": 7, "lag_seconds": 0.5,
    "locked": None, "next_copy": None, "files": 3, "bytes": 4096, "deleted_rows": 5, "written_bytes_per_hour": 6,
    "upkeep_waits_for": "[maintenance] bytes_per_hour", "conflicts": 1,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "subscription": "shop", "paused": False, "source_lsn": "16/B374D848", "received_lsn": "16/B374D848",
    "durable_lsn": "16/B374D800", "applied_lsn": "16/B374D700", "lag_bytes": 0x148, "lag_seconds": 0.25,
    "slot": {"name": "s", "active": True, "wal_status": "extended", "confirmed_lsn": "16/0", "retained_bytes": 1 << 24},
    "receiver": {"running": True, "lag_bytes": 0, "lag_seconds": 0.0}, "tables": [TABLE],
    "disk": {"log_bytes": 1, "lake_bytes": 4096},
}  # fmt: skip
REPORT = {"connected": True, "received_bytes": 9, "transactions": 8, "written_bytes": 7, "reconnects": 0}


def all_samples(samples: Samples) -> None:
    add_status(samples, STATUS)
    add_status(samples, {**STATUS, "subscription": "other", "tables": []})
    add_receiver(samples, "shop", REPORT)
    samples.add(names.RUNNING, 1, "shop")
    samples.add(names.STATUS_AGE, 0.5, "shop")
    counters = RunCounters("shop")
    counters.progress({"tables": [{"name": "public.orders", "changes": 12}]})
    for seconds in (0.05, 0.1, 0.7, 400.0):
        counters.batch_ended(seconds)
    counters.retried(SinkFull("writing", "the disk is full"))
    counters.add_to(samples)


@pytest.mark.parametrize("metric", names.EVERY, ids=lambda metric: metric.name)
def test_a_name_follows_the_rules(metric: MetricName) -> None:
    assert re.fullmatch(r"walmere_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter"), "counters, and only these, end with _total"
    assert metric.name.endswith("_info") == (metric.labels is None)
    assert not NOT_BASE_UNITS.search(metric.name), "only base units: seconds, bytes"
    assert not TYPES.search(metric.name), "no type in a name"
    assert len(metric.help) > 10
    assert metric.help.endswith(".")
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.all_labels)
    assert "le" not in metric.all_labels
    unit = re.sub("_total$", "", metric.name).rpartition("_")[2]
    if unit in ("seconds", "bytes"):
        assert metric.name.count(unit) == 1


def test_names_and_help_texts_are_unique() -> None:
    assert len({each.name for each in names.EVERY}) == len(names.EVERY) > 30
    assert len({each.help for each in names.EVERY}) == len(names.EVERY)


def test_every_metric_is_exposed_once_with_its_type_and_help() -> None:
    text = exposition(all_samples).decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    for metric in names.EVERY:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert {*family.samples[0].labels} - {"le"} == {*metric.all_labels}
        assert ("le" in family.samples[0].labels) == (metric.kind == "histogram")
        assert text.count(f"# TYPE {metric.name} ") == 1
    own = [each for each in families if each.startswith("walmere_")]
    assert len(own) == len(names.EVERY)
    assert "process_resident_memory_bytes" in families


def test_the_values_are_those_of_the_status() -> None:
    found = {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label != "subscription"),
        ): sample.value
        for family in text_string_to_metric_families(exposition(all_samples).decode())
        for sample in family.samples
        if sample.labels.get("subscription") == "shop"
    }
    assert found["walmere_lag_seconds",] == 0.25
    assert found["walmere_wal_position_bytes", "source"] == 0x16B374D848
    assert found["walmere_wal_position_bytes", "source"] - found["walmere_wal_position_bytes", "applied"] == 0x148
    assert found["walmere_table_copied_rows", TABLE["name"]] == 10
    assert found["walmere_table_phase", "d", TABLE["name"]] == 1
    assert sum(found["walmere_table_phase", phase, TABLE["name"]] for phase in "idfsr") == 1
    assert found["walmere_slot_wal_status", "extended"] == 1
    assert found["walmere_slot_wal_status", "lost"] == 0
    assert found["walmere_applied_changes_total", "public.orders"] == 12
    assert found["walmere_receiver_transactions_total",] == 8
    assert found["walmere_batches_total",] == 4
    assert found["walmere_apply_retries_total",] == 1


def test_a_histogram_counts_applied_batches_by_their_upper_bounds() -> None:
    text = exposition(all_samples).decode()
    [family] = [each for each in text_string_to_metric_families(text) if each.name == "walmere_batch_duration_seconds"]
    buckets = {each.labels["le"]: each.value for each in family.samples if each.name.endswith("_bucket")}
    assert [*map(float, buckets)] == [*names.BATCH_BOUNDS, float("inf")]
    assert (buckets["0.1"], buckets["0.5"], buckets["1.0"], buckets["300.0"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    others = {each.name.rpartition("_")[2]: each.value for each in family.samples if "le" not in each.labels}
    assert others == {"count": 4, "sum": pytest.approx(400.85)}


def test_what_is_not_known_has_no_sample() -> None:
    silent = {**STATUS, "source_lsn": None, "lag_bytes": None, "lag_seconds": None, "slot": None, "tables": []}
    text = exposition(lambda samples: add_status(samples, silent)).decode()
    assert 'walmere_source_up{subscription="shop"} 0.0' in text
    assert "walmere_lag_seconds" not in text
    assert "walmere_slot" not in text


def test_a_receiver_alone_reports_its_counters_and_positions(tmp_path: Path) -> None:
    (tmp_path / "receiver.json").write_text(json.dumps({**REPORT, "received_lsn": "0/10", "durable_lsn": "0/0"}))
    text = exposition(lambda samples: add_receiver_alone(samples, "shop", receiver_report(tmp_path))).decode()
    assert 'walmere_wal_position_bytes{stage="received",subscription="shop"} 16.0' in text
    assert 'stage="durable"' not in text
    assert 'walmere_receiver_running{subscription="shop"} 1.0' in text
    (tmp_path / "receiver.json").write_text('{"pid": 1')
    assert receiver_report(tmp_path) == {}
    assert receiver_report(tmp_path / "nowhere") == {}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not on this machine")
def test_promtool_accepts_metrics_and_rules() -> None:
    assert PROMTOOL is not None
    text = exposition(all_samples)
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    subprocess.run([PROMTOOL, "check", "rules", ALERTS], check=True, capture_output=True)
    subprocess.run([PROMTOOL, "check", "config", ALERTS.with_name("prometheus.yaml")], check=True, capture_output=True)


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression of deploy/ is, and the expression."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_every_metric_and_label_in_deploy_exists(where: str, expression: str) -> None:
    known = {f"{each.name}{suffix}": each for each in names.EVERY for suffix in _SUFFIXES[each.kind]}
    used = re.findall(r"\b(walmere_\w+)(?:\{([^}]*)\})?", expression)
    assert used, f"{where} uses no metric of ours"
    for name, selector in used:
        assert name in known, where
        assert {*re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)} <= {*known[name].all_labels, "le"}, where


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    wanted = {"WalmereLag", "WalmereWalRetained", "WalmereSlotInactive", "WalmereRejects", "WalmereUpkeepBehind"}
    assert wanted <= {rule["alert"] for rule in group["rules"]}
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "subscription" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_panels_of_the_grafana_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
