"""The served API against its own description, by schemathesis: no 500, no answer that is not
described, no write without the token."""

import subprocess
import sys

import pytest

from tests.report.journals import night
from tests.report.test_report_reader import write
from tests.ui.serving import TOKEN, Recorded, served

RIGHT, WRONG = f"Bearer {TOKEN}", "Bearer wrong"
SHORT = "examples,fuzzing"
ALL = "examples,coverage,fuzzing,stateful"


@pytest.mark.parametrize(
    ("authorization", "examples", "phases"),
    [
        (RIGHT, 5, SHORT),
        pytest.param(RIGHT, 60, ALL, marks=pytest.mark.slow),
        pytest.param(WRONG, 30, ALL, marks=pytest.mark.slow),
    ],
)
def test_api_answers_generated_requests_as_it_describes(authorization, examples, phases, tmp_path):
    write(tmp_path / "mine", night())
    (tmp_path / "mine" / "run.json").write_text("{}")
    controls = Recorded()
    # Without the token even a wrong method is refused for that reason.
    spared = "ignored_auth" if authorization == RIGHT else "ignored_auth,unsupported_method"
    with served(tmp_path, token=TOKEN, controls=controls) as server:
        words = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/api/openapi.json"),
            *("--max-examples", str(examples), "--workers", "1", "--seed", "1", "--no-color"),
            *("--header", f"Authorization: {authorization}", "--exclude-checks", spared),
            *("--generation-database", "none", "--phases", phases),
        ]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert bool(controls.asked) == (authorization == RIGHT)
