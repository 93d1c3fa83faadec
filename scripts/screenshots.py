"""Makes the pictures of the dashboard for README and docs: `make screenshots`. Needs Java and Chromium.

It starts a PostgreSQL server with the shop of `walmere demo`, `walmere run --dashboard`, and the writers of the demo.
Then it takes the pictures in light, in dark, and as a phone shows it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from PIL import Image

from browser import Browser, chromium
from walmere.demo import shop
from walmere.demo.place import Place
from walmere.demo.workload import Writers
from walmere.publisher.connect import connect
from walmere.testing.server import LOGICAL, Server, binaries, free_port

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
ROWS = 8_000_000
FLOW_SECONDS = 75
MAX_BYTES = 300_000


def wait(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.2)


def take(browser: Browser, name: str, height: int) -> None:
    """Take a picture, and keep it small: the page has few colours."""
    picture = Image.open(io.BytesIO(browser.screenshot(height))).convert("RGB")
    path = IMAGES / f"{name}.png"
    picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is too large")


def pictures(browser: Browser, url: str, writers: Callable[[], Writers]) -> None:
    """Take all pictures while the shop is copied and followed."""
    browser.size(1280, 900)
    browser.scheme("dark")
    wait(lambda: _answers(browser, url), "the page")
    wait(
        lambda: bool(
            browser.run(
                "return [...document.querySelectorAll('progress')].some((p) => p.max > 1e5 && p.value > p.max / 4)"
            )
        ),
        "a copy",
    )
    take(browser, "dashboard-copy", 1000)
    wait(lambda: set(browser.texts("#tables .pill")) == {"ready (r)"}, "all tables are ready")
    with writers():
        time.sleep(FLOW_SECONDS)
        take(browser, "dashboard-dark", 1220)
        browser.scheme("light")
        time.sleep(1)
        take(browser, "dashboard-light", 1220)
        browser.size(390, 844, phone=True, scale=2)
        browser.scheme("dark")
        time.sleep(2)
        take(browser, "dashboard-phone", 1150)


def _answers(browser: Browser, url: str) -> bool:
    try:
        browser.open(url)
    except Exception:
        return False
    return bool(browser.texts("#tables tbody tr"))


def main() -> None:
    """Start everything, take the pictures, stop everything."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    sizes = shop.Sizes.of(ROWS)
    server = Server(binaries()[18], {**LOGICAL, "fsync": "off", "max_wal_size": "4GB"})
    server.start()
    try:
        with tempfile.TemporaryDirectory() as directory, Place(Path(directory) / "demo") as place:
            with closing(connect(place.configure(server.dsn()).source, "screenshots")) as connection:
                connection.execute("CREATE DATABASE shop")
            config = place.configure(server.dsn("shop"))
            place.config_file.write_text(place.config_file.read_text().replace('name = "demo"', 'name = "shop"'))
            with closing(connect(config.source, "screenshots")) as connection:
                shop.create(connection, sizes)
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "walmere", "run", "-c", str(place.config_file)]
            with subprocess.Popen([*command, "--dashboard", "--listen", address], stdout=subprocess.DEVNULL) as run:
                try:
                    with chromium() as browser:
                        pictures(browser, f"http://{address}/", lambda: Writers(config.source, sizes, 1e9))
                finally:
                    run.terminate()
    finally:
        server.remove()


if __name__ == "__main__":
    main()
