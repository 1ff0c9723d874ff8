"""The page is one file: it holds what it shows, and nothing of a run becomes markup or code."""

import json
import re

import pytest
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.report import report_page
from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from tests.report.journals import T0, explain, logged, night
from tests.report.test_report_reader import write

EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&quot;"


def page_of(lines, name="night"):
    builder = ReportBuilder(name)
    for line in lines:
        builder.line(line)
    return report_page.report_page(builder.build(T0 + 12))


def test_page_is_the_same_for_the_same_folder():
    assert page_of(night()) == page_of(night())


def test_page_holds_its_scripts_and_styles_and_names_no_other_file():
    page = page_of(night()).replace(plotly_script(), "")
    assert not re.findall(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?!data:,)[^\"> ]", page
    )
    assert "url(" not in page and "@import" not in page
    assert asset("page.js") in page and asset("page.css") in page


def test_text_of_a_run_never_becomes_markup_of_the_page():
    lines = [
        *night(),
        explain(13, EVIL),
        logged(13, 7, **{EVIL: 1.0}),
    ]
    page = page_of(lines, name=EVIL).replace(plotly_script(), "").replace(asset("page.js"), "")
    assert "<script>alert" not in page and "<img" not in page and page.count("<!--") == 0
    text = re.search(r'id="report">(.*?)</script>', page, re.S)[1]
    report = json.loads(text)
    assert report["name"] == EVIL and EVIL in report["curves"]
    assert report["decisions"][-1]["text"] == EVIL


def test_page_allows_its_own_scripts_alone():
    page = page_of(night())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script_src = policy.partition("script-src ")[2]
    assert policy.startswith("default-src 'none'")
    assert re.fullmatch(r"'sha256-[\w+/=]+' 'sha256-[\w+/=]+'", script_src)


def test_fill_page_takes_a_text_with_the_marks_of_the_template_as_it_is():
    page = fill_page(
        title="$scripts", words=(), policy="", style="", settings={}, report=None, scripts="S"
    )
    assert page.count("S\n") == 1 and "<h1>$scripts</h1>" in page


def test_report_without_plotly_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    plotly_script.cache_clear()
    with pytest.raises(report_page.SpecError, match=r"pip install 'elastic_dp\[ui\]'"):
        plotly_script()


@pytest.fixture
def stored(tmp_path):
    write(tmp_path / "night", night())
    (tmp_path / "night" / "run.json").write_text("{}")
    return ["--storage-path", str(tmp_path)]


def test_command_writes_the_page_and_prints_the_verdict(stored, tmp_path):
    words = ["report", "night", *stored, "-o", str(tmp_path / "x.html")]
    printed = CliRunner().invoke(app, words, catch_exceptions=False)
    assert printed.stdout.startswith("The run finished (enough) after 6 steps in 12 s")
    assert "<title>night</title>" in (tmp_path / "x.html").read_text()


def test_command_prints_the_report_as_json(stored):
    said = CliRunner().invoke(app, ["report", "night", "--json", *stored], catch_exceptions=False)
    assert json.loads(said.stdout)["phase"] == "finished"


def test_command_names_what_is_wrong(stored, tmp_path):
    where = ["-o", str(tmp_path / "no" / "x.html")]
    said = CliRunner().invoke(app, ["report", "night", *stored, *where])
    assert said.exit_code == 2 and "--output" in said.stderr
    for name in ("nobody", "*", "n?ght"):  # a name is no pattern
        said = CliRunner().invoke(app, ["report", name, *stored])
        assert said.exit_code == 2 and f"no run named '{name}'" in said.stderr
