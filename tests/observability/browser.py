"""Debian's Chromium, driven by its chromedriver: sizes, themes, console, screenshots."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from support.programs import program

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """A fresh Chromium; `profile` is a new empty directory."""
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(program("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def dress(driver: webdriver.Chrome, size: str, theme: str) -> None:
    """Show pages from now on at this size and in this theme."""
    width, height = SIZES[size]
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
    )
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def whole_page(driver: webdriver.Chrome, path: Path) -> None:
    """A screenshot of all that can be scrolled to."""
    size: Any = driver.execute_script("return [innerWidth, document.documentElement.scrollHeight]")
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot",
        {
            "captureBeyondViewport": True,
            "clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1},
        },
    )
    path.write_bytes(base64.b64decode(shot["data"]))


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the console has said since the last call: errors, warnings, CSP violations."""
    return [entry["message"] for entry in driver.get_log("browser")]
