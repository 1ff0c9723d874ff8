"""The page of a run: one HTML file that holds everything it shows and asks no other host.

The page draws a report, which is JSON, with plotly's own bundle. Texts of the run reach the page as
JSON and become text nodes there, never markup. The page's content security policy allows its own
scripts alone, each by its digest.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources
from string import Template
from typing import Any

from elastic_dp.errors import SpecError
from elastic_dp.report.report_model import Report

# Plotly sets styles on its elements; everything else is refused unless it is named.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# What ends a script, or begins another one, in JSON that stands in HTML.
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def report_page(report: Report) -> str:
    """Return the page as one HTML file. Raises SpecError if plotly is not installed."""
    scripts = [plotly_script(), asset("page.js")]
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"{_POLICY}; script-src {digests}"
    return fill_page(
        title=report.name,
        words=report.verdict,
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{asset('page.css')}</style>",
        settings={"mode": "report"},
        report=report.to_json(),
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def fill_page(
    *,
    title: str,
    words: tuple[str, ...],
    policy: str,
    style: str,
    settings: dict[str, Any],
    report: dict[str, Any] | None,
    scripts: str,
) -> str:
    """Return the page. `title` and `words` are texts; `policy`, `style` and `scripts` are HTML."""
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        words="".join(f"<p>{html.escape(sentence)}</p>" for sentence in words),
        settings=_json_in_html(settings),
        report=_json_in_html(report),
        policy=policy,
        style=style,
        scripts=scripts,
    )


@functools.cache
def asset(name: str) -> str:
    """Return one of the files beside this module."""
    return (resources.files("elastic_dp.report") / "assets" / name).read_text("utf-8")


@functools.cache
def plotly_script() -> str:
    """Return plotly's bundle, which its package ships."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise SpecError("the page needs plotly: pip install 'elastic_dp[ui]'") from None
    script: str = get_plotlyjs()
    assert "</script" not in script.lower()
    return script


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json_in_html(value: Any) -> str:
    return json.dumps(value, allow_nan=False).translate(_ESCAPES)
