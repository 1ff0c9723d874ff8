"""The served page in Chromium, of a run with kills and joins that goes on; buttons steer it."""

import time

import pytest

from elastic_dp.coordinator.messages import (
    CheckpointRequested,
    DrainNoticed,
    SizeRequested,
    StopRequested,
)
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing import ProcessRun
from elastic_dp.urls import StorageURL
from tests.patience import eventually
from tests.report.chromium import Watched, chromium
from tests.report.journals import night
from tests.report.test_report_reader import members, two_train, write
from tests.runs import ENDLESS, spec_of
from tests.train.jobs import plain
from tests.ui.serving import TOKEN, served


class Controlled:
    """The run of this process, asked as `Run` is asked."""

    def __init__(self, run):
        self._post = run.controller.post

    def live(self):
        return self

    def scale(self, size=None):
        self._post(SizeRequested(size, None))

    def drain(self, worker):
        self._post(DrainNoticed(worker, None))

    def checkpoint(self):
        self._post(CheckpointRequested())

    def stop(self, reason=""):
        self._post(StopRequested(reason))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def live(tmp_path):
    """A run on processes, served with its controls."""
    path = str(tmp_path / "night")
    spec = spec_of(steps=ENDLESS, workers=2, virtual=4, config={"body_s": 0.05})
    with (
        ProcessRun(spec, plain, journal=Journal(path), url=path) as run,
        served(path, token=TOKEN, find_live=Controlled(run).live) as server,
    ):
        yield run, server, path


def wait_for(page, kind, worker=""):
    row = page.locator("#events tbody tr", has_text=worker).filter(
        has=page.get_by_role("cell", name=kind, exact=True)
    )
    row.first.wait_for()


def test_each_event_of_a_run_is_seen_and_buttons_steer_it(browser, live):
    run, server, path = live
    watched = Watched(browser)
    page = watched.page
    page.goto(f"{server.url}/#token={TOKEN}")
    page.wait_for_selector("#band-chart .scatterlayer")
    assert TOKEN not in page.url and not any(TOKEN in url for url in watched.requests)
    eventually(lambda: two_train(run), run.controller.status)
    wait_for(page, "join")

    killed = members(run)[-1]
    run.worker_group.kill(killed)
    wait_for(page, "loss", killed)
    eventually(lambda: len(members(run)) == 2 and killed not in members(run))

    page.fill("#size", "3")
    page.click("#scale")
    wait_for(page, "scale")
    assert page.locator("#told").text_content() == "3 workers asked for"
    eventually(lambda: len(members(run)) == 3, run.controller.status)
    page.click("#checkpoint-now")
    wait_for(page, "checkpoint")
    drained = members(run)[0]
    page.get_by_role("button", name=f"Drain {drained}", exact=True).click()
    wait_for(page, "notice", drained)
    eventually(lambda: drained not in members(run), run.controller.status)
    wait_for(page, "leave", drained)
    assert watched.faults() == [] and watched.fits()
    watched.shoot("page-light")

    told = page.locator("#told").text_content()
    page.once("dialog", lambda question: question.dismiss())
    page.click("#stop")
    assert page.locator("#told").text_content() == told
    page.once("dialog", lambda question: question.accept())
    page.click("#stop")
    outcome = run.wait()
    wait_for(page, "end")
    page.locator("#phase", has_text="finished").wait_for()
    assert page.locator("#tile-workers-lost").text_content() == "1"
    assert page.locator("#tile-step").text_content() == str(outcome.step)

    events = RunFolder("night", StorageURL(path)).report(time.time()).events
    assert page.locator("#events tbody tr").count() == len(events)
    assert watched.complaints == []


def test_page_of_an_ended_run_is_dark_and_narrow_where_the_screen_is(browser, tmp_path):
    write(tmp_path / "night", night())
    with served(tmp_path / "night") as server:
        watched = Watched(browser, "dark")
        page = watched.page
        page.goto(f"{server.url}/#token={TOKEN}")
        page.wait_for_selector("#band-chart .scatterlayer")
        assert watched.faults() == [] and watched.fits()
        assert page.locator("#control, [data-key^=drain]").count() == 0  # nobody steers here
        assert page.locator("#tile-workers").text_content() == "none"
        page.evaluate("report.band = report.band.map(([at]) => [at, 1, 1]); drawBand()")
        assert page.locator("#band-chart .ytick text").all_text_contents() == ["0", "1"]
        for _ in range(2):  # when it asks the second time, it has shown the first answer
            with page.expect_response(lambda response: "report" in response.url):
                pass
        assert page.locator("#phase").text_content() == "finished"
        assert page.locator("#status").text_content() == ""
        watched.shoot("page-dark")
        assert all(url.startswith((server.url, "data:")) for url in watched.requests)
        assert watched.complaints == []
