"""The page of a report in Chromium: drawn, accessible, usable by keyboard, and alone."""

import pytest

from tests.patience import eventually
from tests.report.chromium import Watched, chromium
from tests.report.journals import explain, logged, night
from tests.report.test_report_page import EVIL, page_of


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "night.html"
    lines = [*night(), explain(13, f"{EVIL}<b>bold</b>"), logged(13, 7, **{EVIL: 1.0})]
    path.write_text(page_of(lines, name=f"night {EVIL}"), "utf-8")
    return path.as_uri()


# Dark in CI is the served page: tests/ui/test_page_in_browser.py.
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_report_in_chromium_is_drawn_accessible_and_asks_for_nothing(scheme, browser, file):
    watched = Watched(browser, scheme)
    watched.page.goto(file)
    watched.page.wait_for_selector("#band-chart .scatterlayer")
    assert watched.requests == [file]
    assert watched.faults() == []
    assert watched.fits()
    back = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 23, 30)"}[scheme]
    # Each kind of event of the journal is a mark of its own in the chart.
    assert watched.page.locator("#band-chart .scatterlayer .points path").count() == 13
    watched.page.select_option("#metric", EVIL)
    assert watched.page.locator("#loss-chart .ytitle").text_content() == EVIL
    assert watched.page.locator("img, b, iframe").count() == 0
    assert watched.complaints == []


def test_report_in_chromium_is_used_by_keyboard(browser, file):
    page = Watched(browser).page
    page.goto(file)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Tab")  # the first kind of event
    rows = page.locator("#events tbody tr").count()
    page.keyboard.press("Space")
    assert page.locator("#events tbody tr").count() == rows - 1
    assert page.evaluate("document.activeElement.dataset.key") == "kind start"  # it stays there


def test_charts_in_chromium_have_the_colors_that_the_screen_has_now(browser, file):
    page = Watched(browser).page
    page.goto(file)
    drawn = "document.getElementById('loss-chart').layout.font.color"
    assert page.evaluate(drawn) == "#1b2430"
    page.emulate_media(color_scheme="dark")
    eventually(lambda: page.evaluate(drawn) == "#e6ebf1")
