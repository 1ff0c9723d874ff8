"""A headless Chromium for tests of the page; without it they are skipped."""

import contextlib
import os
import shutil

import pytest

from tests.imported_when_used import ImportedWhenUsed
from tests.patience import PATIENCE_S

axe = ImportedWhenUsed("axe_playwright_python.sync_playwright")
playwright = ImportedWhenUsed("playwright.sync_api")

SIZES = {"light": (1280, 1150), "dark": (390, 844)}  # a wide screen, and a phone


@contextlib.contextmanager
def chromium():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


class Watched:
    """A page, what it asked for, and what it complained about."""

    def __init__(self, browser, scheme="light"):
        width, height = SIZES[scheme]
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": height}
        )
        context.set_default_timeout(1000 * PATIENCE_S)
        self.page = context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: said.type in ("error", "warning") and self.complaints.append(said.text),
        )

    def faults(self):
        """The accessibility faults that axe finds."""
        found = axe.Axe().run(self.page).response["violations"]
        return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]

    def fits(self):
        """Whether nothing is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def shoot(self, name):
        """Take a screenshot for the docs, if SCREENSHOTS names a folder: docs/assets."""
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            self.page.screenshot(path=f"{folder}/{name}.png")
