"""The page in a real Chromium: what is shown is what `walmere status --json` says, and the buttons do what they say."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, DRIVER, MISSING, Browser, chromium
from conftest import Database
from dashboards import Served, served
from mirror import Mirror
from processes import Background, eventually, walmere, write_config
from walmere.api import Subscription
from walmere.subscription.state import TableState

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)

PHASES = {"i": "waits for its copy", "d": "being copied", "f": "copied", "s": "caught up", "r": "ready"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that believes that evil.example is this machine."""
    with chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        yield browser


def shown(browser: Browser) -> dict[str, Any]:
    """What the page shows, in the words of `status --json`."""
    stages = ("source", "received", "durable", "applied")
    rows = browser.run(
        "return [...document.querySelectorAll('#tables tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"
    )
    return {
        **{f"{stage}_lsn": browser.text(f"#{stage}_lsn") for stage in stages},
        "facts": browser.texts(".node li"),
        "hops": {each: browser.text(f"#hop_{each} .lag_bytes") for each in stages[1:]},
        "tables": {row[0]: row[1:7] for row in rows},
    }


def size(count: int | None) -> str:
    """As `walmere status` prints it."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError(count)


def distance(end: str, begin: str) -> str:
    def number(lsn: str) -> int:
        high, low = lsn.split("/")
        return int(high, 16) << 32 | int(low, 16)

    if begin == "0/0":
        return "–"
    behind = max(0, number(end) - number(begin))
    return f"{size(behind)} behind" if behind else "up to date"


def expected(status: dict[str, Any]) -> dict[str, Any]:
    """What the page has to show for a status."""
    lsns = {key: status[key] or "–" for key in ("source_lsn", "received_lsn", "durable_lsn", "applied_lsn")}
    pairs = (("source", "received"), ("received", "durable"), ("durable", "applied"))
    hops = {b: distance(status[f"{a}_lsn"], status[f"{b}_lsn"]) if status[f"{b}_lsn"] else "–" for a, b in pairs}
    tables = {
        each["name"]: [
            f"{PHASES[each['phase']]} ({each['phase']})",
            f"{each['rows_copied']:,}",
            "–" if each["lag_seconds"] is None else f"{each['lag_seconds']:.1f} s",
            size(each["bytes"]),
            size(each["written_bytes_per_hour"]),
            str(each["rejects"]),
        ]
        for each in status["tables"]
    }
    return {**lsns, "hops": hops, "tables": tables}


def shows(browser: Browser, status: dict[str, Any]) -> bool:
    """Whether the page shows this status: positions, hops, tables, and what the slot and the disks hold."""
    found, wanted = shown(browser), expected(status)
    facts = found.pop("facts")
    slot = status["slot"]
    use = "active" if slot["active"] else "not active"
    some = [f"keeps {size(slot['retained_bytes'])} of WAL", f"slot {use}, {slot['wal_status']}"]
    some.append(f"change log {size(status['disk']['log_bytes'])}")
    if status["disk"]["lake_bytes"] is not None:
        some.append(f"lake {size(status['disk']['lake_bytes'])}")
    return found == wanted and {*some} <= {*facts}


def wait_for_status(browser: Browser, file: Path) -> dict[str, Any]:
    """Wait until the page shows what `walmere status --json` says. Returns it."""
    last: list[Any] = [{}]

    def same() -> bool:
        said = walmere("status", "-c", file, "--json")
        assert said.returncode == 0, said.stderr
        last[0] = json.loads(said.stdout)
        deadline = time.monotonic() + 2.5  # a reading may be a second old, and the source may write WAL of its own
        while time.monotonic() < deadline:
            if shows(browser, last[0]):
                return True
            time.sleep(0.1)
        return False

    eventually(same, 40, lambda: f"shown {shown(browser)}, expected {expected(last[0])}")
    found: dict[str, Any] = last[0]
    return found


def test_the_page_shows_what_status_says_and_follows_it(browser: Browser, database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path / "state")
    file = write_config(config, tmp_path / "walmere.toml")
    file.write_text(f"{file.read_text()}[target]\npath = 'lake'\n")
    database18.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE orders")
    with Background(config), served(Subscription(file)) as page:
        eventually(database18.streaming)
        browser.open(page.origin)
        wait_for_status(browser, file)
        assert browser.text("#name") == "test"
        assert browser.text("#summary") == "receiving only"
        assert "walmere run -c" in browser.text("#findings")
        database18.execute("INSERT INTO orders SELECT generate_series(1, 7)")
        eventually(lambda: "orders +7" in browser.text("#transactions"))
        assert set(browser.texts("svg .label")) >= {"−1 min", "−30 s", "now"}
        hosts = browser.run(
            "return [...new Set(performance.getEntriesByType('resource').map((each) => new URL(each.name).origin))]"
        )
        assert hosts == [page.origin], "every file comes from the page's own host"
        assert not browser.errors()

        browser.open(f"http://evil.example:{page.port}/")
        assert "not a name of this server" in browser.run("return document.body.textContent")


@contextlib.contextmanager
def other_site(target: Served) -> Iterator[str]:
    """A web page of somebody else, that presses a button of ours as well as it can."""
    script = f"""<script>
      document.title = "trying";
      const form = {{ method: "POST", mode: "no-cors", credentials: "include", body: "{{}}" }};
      Promise.allSettled([
        fetch("{target.origin}/api/0/pause", form),
        fetch("{target.origin}/api/0/pause", {{ ...form, mode: "cors", headers: {{ "X-Walmere-Page": "guess" }} }}),
        fetch("{target.origin}/events", {{ credentials: "include" }}).then((answer) => answer.text()),
      ]).then((all) => {{
        document.title = all.map((each) => each.status).join(", ");
      }});
    </script>"""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(script.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://evil.example:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.long
def test_another_web_page_can_neither_read_nor_press_a_button(
    browser: Browser, database18: Database, tmp_path: Path
) -> None:
    subscription = Subscription(write_config(database18.config(tmp_path / "state"), tmp_path / "walmere.toml"))
    with served(subscription) as page, other_site(page) as evil:
        browser.open(evil)
        eventually(lambda: browser.run("return document.title") not in ("", "trying"), 10)
        assert browser.run("return document.title") == "rejected, rejected, rejected"
        browser.run(
            "const form = document.createElement('form'); form.method = 'post'; form.action = arguments[0];"
            "document.body.append(form); form.submit()",
            f"{page.origin}/api/0/pause",
        )
        eventually(lambda: "is refused: it is another origin" in browser.run("return document.body.textContent"), 10)
        assert not subscription.paused


@pytest.mark.long
def test_the_page_asks_for_its_token(browser: Browser, database18: Database, tmp_path: Path) -> None:
    subscription = Subscription(write_config(database18.config(tmp_path / "state"), tmp_path / "walmere.toml"))
    with served(subscription, token="0123456789abcdef") as page:
        browser.open(page.origin)
        assert "a token is needed" in browser.run("return document.body.textContent")
        browser.open(f"{page.origin}/?token=0123456789abcdef")
        assert browser.run("return location.href") == f"{page.origin}/", "the token is not left in the address"
        eventually(lambda: browser.text("#name") == "test")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_it_follows_a_run_and_its_buttons_pause_resume_and_copy_again(
    browser: Browser, database18: Database, tmp_path: Path
) -> None:
    database18.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "CREATE TABLE lines (id int PRIMARY KEY)",
        "INSERT INTO orders SELECT i FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR TABLE orders, lines",
    )
    mirror = Mirror(database18, tmp_path / "shop")
    subscription = Subscription(mirror.file)
    with mirror.following(), served(subscription) as page:
        browser.open(page.origin)
        eventually(lambda: browser.texts("#tables .pill") == ["ready (r)", "ready (r)"], 120)
        for number in range(3):
            database18.execute(f"INSERT INTO lines SELECT generate_series({number}00, {number}09)")
            eventually(lambda: browser.text("#transactions li .changed") == "lines +10", 30)
            eventually(lambda: browser.run("return !!document.querySelector('#transactions li.applied')"), 30)
        status = wait_for_status(browser, mirror.file)
        assert [each["rows_copied"] for each in status["tables"]] == [0, 1000]
        eventually(lambda: browser.text("#summary") == "caught up")
        assert browser.run("return document.querySelectorAll('#rate_chart path.line').length") == 2
        mirror.assert_equal("orders", "lines")

        browser.click("#pause")
        assert browser.text("#ask h2") == f"Pause {database18.name}?"
        browser.click("#ask button[value=no]")
        assert browser.text("#pause") == "Pause"
        browser.click("#pause")
        browser.click("#ask button[value=yes]")
        eventually(lambda: browser.text("#summary") == "paused")
        assert subscription.paused
        database18.execute("INSERT INTO orders SELECT i FROM generate_series(2001, 2010) i")
        eventually(lambda: browser.text("#transactions li .changed") == "orders +10", 30)
        assert not browser.run("return document.querySelector('#transactions li').classList.contains('applied')")
        assert browser.text("#pause") == "Resume"

        browser.click("#pause")
        browser.click("#ask button[value=yes]")
        eventually(
            lambda: browser.run("return document.querySelector('#transactions li').classList.contains('applied')")
        )
        eventually(lambda: browser.text("#summary") == "caught up", 30)
        mirror.assert_equal("orders", "lines")

        def orders() -> TableState:
            return next(each for each in mirror.tables() if each.name == "public.orders")

        before = orders().snapshot_lsn
        browser.click("tr[data-key='public.orders'] button")
        assert browser.text("#ask h2") == "Copy public.orders again?"
        browser.click("#ask button[value=yes]")
        eventually(lambda: orders().snapshot_lsn > before and orders().phase == "r", 60)
        eventually(lambda: browser.text("tr[data-key='public.orders'] .n") == "1,010", 30)
        wait_for_status(browser, mirror.file)


@pytest.mark.long
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_a_phone_and_a_desk_in_light_and_dark(
    browser: Browser, database18: Database, tmp_path: Path, width: int
) -> None:
    long_name = "a_table_with_a_name_as_long_as_postgresql_allows_it_to_be_for_63"
    database18.execute(
        f"CREATE TABLE {long_name} (id int PRIMARY KEY)",
        *(f"CREATE TABLE t{i} (id int PRIMARY KEY)" for i in range(15)),
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    config = database18.config(tmp_path / "state")
    subscription = Subscription(write_config(config, tmp_path / "walmere.toml"))
    with Background(config), served(subscription) as page:
        eventually(database18.streaming)
        database18.execute("BEGIN", *(f"INSERT INTO t{i} VALUES (1)" for i in range(15)), "COMMIT")
        try:
            browser.size(width, 800, phone=width < 700)
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                browser.open(page.origin)
                eventually(lambda: len(browser.texts("#tables tbody tr")) == 16)
                eventually(lambda: browser.text("#transactions .changed"))
                assert browser.run("return document.documentElement.scrollWidth") <= width
                dark = browser.run("return getComputedStyle(document.documentElement).getPropertyValue('--dark')")
                assert dark.strip() == ("1" if scheme == "dark" else "0")
                browser.run("document.getElementById('theme').click()")
                changed = browser.run("return getComputedStyle(document.documentElement).getPropertyValue('--dark')")
                assert changed != dark
                browser.run("localStorage.clear()")
        finally:
            browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.long
def test_several_subscriptions_are_in_one_page(browser: Browser, database18: Database, tmp_path: Path) -> None:
    found = []
    for name in ("orders", "stock"):
        config = database18.config(tmp_path / name)
        file = write_config(config, tmp_path / f"{name}.toml")
        file.write_text(file.read_text().replace("name = 'test'", f"name = '{name}'"))
        database18.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
        found.append(Subscription(file))
    database18.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with served(*found) as page:
        browser.open(page.origin)
        eventually(lambda: browser.texts("nav strong") == ["orders", "stock"])
        assert browser.text("#name") == "orders"
        browser.click("nav a:nth-child(2)")
        eventually(lambda: browser.text("#name") == "stock")
        assert browser.run("return location.hash") == "#stock"
