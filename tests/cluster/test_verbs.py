"""What all verbs of the command line for runs have in common."""

import typer

from elastic_dp.cli import app

VERBS = {
    *("run", "submit", "list", "status", "events", "logs", "scale", "drain", "checkpoint"),
    *("stop", "restart"),
}


def test_every_verb_prints_json_where_it_is_asked_to():
    verbs = typer.main.get_command(app).commands
    assert set(verbs) >= VERBS
    for name in VERBS:
        assert any("--json" in parameter.opts for parameter in verbs[name].params), name
