"""A real headless Chromium for tests and screenshots, by its driver. Nothing of an earlier one is left in it."""

from __future__ import annotations

import base64
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "Chromium and chromedriver are not on this machine: scripts/chromium installs them"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--lang=en"),
)


class Browser:
    """What the tests do with a page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of an element, as it is in the page; empty if there is no such element."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        assert isinstance(found, str)
        return found.strip()

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent.trim())"
        found = self.run(script, selector)
        assert isinstance(found, list)
        return found

    def click(self, selector: str) -> None:
        """Click as a person does: the element must be visible and not covered."""
        self.driver.find_element("css selector", selector).click()

    def errors(self) -> list[str]:
        """What the console says is wrong."""
        lines: Any = self.driver.get_log("browser")  # type: ignore[no-untyped-call,unused-ignore]
        return [each["message"] for each in lines if each["level"] == "SEVERE"]

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def screenshot(self, height: int | None = None) -> bytes:
        """A PNG of the page, from its top."""
        options: dict[str, Any] = {"format": "png"}
        if height is not None:
            width = self.run("return window.innerWidth")
            options |= {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
            options["captureBeyondViewport"] = True
        return base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"])


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser with an empty profile. It ends with the context."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(DRIVER))
        try:
            driver.set_page_load_timeout(30)
            yield Browser(driver)
        finally:
            driver.quit()
