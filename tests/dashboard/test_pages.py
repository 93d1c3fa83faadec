"""The page over HTTP: its files, the event stream, metrics, and the buttons."""

from __future__ import annotations

import re
import urllib.error
from importlib import resources
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Database
from dashboards import served
from processes import Background, eventually, write_config
from walmere.api import Subscription
from walmere.dashboard.pages import Broken, subscriptions_of
from walmere.errors import ConfigError

STATIC = {each.name: each for each in resources.files("walmere.dashboard").joinpath("static").iterdir()}


def test_the_page_names_no_other_host() -> None:
    for name, file in STATIC.items():
        addresses = {*re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"(?m)(?:^|\s)//.*$", "", file.read_text()))}
        assert addresses <= {"http://www.w3.org"}, name  # the name of SVG's elements, which nobody fetches


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    text = STATIC["page.html"].read_text()
    assert "<style" not in text
    assert " style=" not in text
    assert not re.search(r" on\w+=", text)
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="/static/page.js">']
    assert not any("innerHTML" in file.read_text() for name, file in STATIC.items() if name.endswith(".js"))


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("dark", ["0", "1"])
@pytest.mark.parametrize("ground", ["panel", "ground"])
def test_text_can_be_read_in_light_and_dark(dark: str, ground: str) -> None:
    css = STATIC["page.css"].read_text()
    [*blocks] = re.findall(rf"--dark: {dark};(.*?)color-scheme", css, re.DOTALL)
    assert len(blocks) == 1 + int(dark)
    for block in blocks:
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
        for name in ("text", "muted", "good", "busy", "warning", "problem", "water"):
            one, other = sorted((luminance(colours[name]), luminance(colours[ground])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, f"{name} on {ground}"


def test_a_directory_has_all_its_configurations_also_a_broken_one(database18: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file \*\.toml"):
        subscriptions_of(tmp_path, Subscription)
    (tmp_path / "a.toml").write_text("[source]\n")
    with pytest.raises(ConfigError, match="missing"):
        subscriptions_of(tmp_path, Subscription)
    write_config(database18.config(tmp_path / "state"), tmp_path / "b.toml")
    broken, usable = subscriptions_of(tmp_path, Subscription)
    assert isinstance(broken, Broken)
    assert isinstance(usable, Subscription)
    [alone] = subscriptions_of(tmp_path / "b.toml", Subscription)
    assert isinstance(alone, Subscription)

    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with served(broken, usable) as page:
        shown = {}
        for name, content in page.events():
            if name == "now":
                shown[content["name"]] = content
            if len(shown) == 2:
                break
        assert shown["a.toml"]["status"] is None
        assert "missing" in shown["a.toml"]["findings"][0]["what"]
        assert [table["name"] for table in shown["test"]["status"]["tables"]] == ["public.t"]
        assert shown["test"]["summary"]["text"] == "not running"
        families = [*text_string_to_metric_families(page.get("/metrics").decode())]
        assert {sample.labels.get("subscription") for each in families for sample in each.samples} >= {"test"}


def test_events_and_metrics_follow_what_is_received(database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path / "state")
    subscription = Subscription(write_config(config, tmp_path / "walmere.toml"))
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with Background(config), served(subscription) as page:
        eventually(database18.streaming)
        database18.execute("INSERT INTO t SELECT generate_series(1, 5)")
        name, history = next(page.events())
        assert (name, history["phases"]["r"]) == ("history", "ready")
        now = next(content for name, content in page.events() if name == "now" and content.get("transactions"))
        assert now["transactions"][0]["tables"] == [{"name": "public.t", "inserts": 5}]
        assert now["transactions"][0]["applied"] is False, "nothing applies"
        assert now["running"] is False
        assert now["status"]["receiver"]["running"] is True

        def metric(name: str) -> float | None:
            for family in text_string_to_metric_families(page.get("/metrics").decode()):
                for sample in family.samples:
                    if sample.name == name and sample.labels["subscription"] == "test":
                        return float(sample.value)
            return None

        eventually(lambda: (metric("walmere_receiver_transactions_total") or 0) >= 1)
        eventually(lambda: (metric("walmere_slot_active")) == 1)
        assert (metric("walmere_receiver_received_bytes_total") or 0) > 0
        assert (metric("walmere_receiver_written_bytes_total") or 0) > 0
        assert metric("walmere_receiver_connected") == 1
        assert metric("walmere_running") == 0


def test_buttons_pause_resume_and_copy_again(database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path / "state")
    subscription = Subscription(write_config(config, tmp_path / "walmere.toml"))
    with served(subscription) as page:
        paused = []
        for action in ("pause", "resume"):
            assert page.post(f"/api/0/{action}") == 200
            paused.append(subscription.paused)
        assert paused == [True, False]
        for path, body, code, wrong in (
            ("/api/0/resync", {"tables": ["nobody"]}, 409, "nobody"),
            ("/api/0/resync", {"tables": []}, 409, "names no table"),
            ("/api/0/resync", None, 409, "names no table"),
            ("/api/0/drop", None, 404, "not found"),
            ("/api/1/pause", None, 404, "not found"),
            ("/api/-1/pause", None, 404, "not found"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                page.post(path, body)
            assert refused.value.code == code
            assert wrong in refused.value.read().decode()
            refused.value.close()


@pytest.mark.parametrize(
    "path", ["/static/../pages.py", "/static/%2e%2e/pages.py", "/static/page.html", "/static/none.js"]
)
def test_only_the_files_of_the_page_are_served(database18: Database, tmp_path: Path, path: str) -> None:
    subscription = Subscription(write_config(database18.config(tmp_path / "state"), tmp_path / "walmere.toml"))
    with served(subscription) as page:
        assert page.get("/static/page.css")
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            page.get(path)
        refused.value.close()
