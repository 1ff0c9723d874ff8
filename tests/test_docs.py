"""README.md and docs/: the commands, names, messages, links and numbers on them are those of the
code and of the results."""

import ast
import builtins
import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

import elastic_dp
import elastic_dp.data
from benchmarks import results_page
from docs import tables
from elastic_dp import cli, errors
from tests.source_trees import tree_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*TOP, *ROOT.glob("docs/**/*.md")])
}


def every_page(check):
    """One test for all pages, which says the page that it fails on."""

    def test():
        for page in PAGES:
            try:
                check(page)
            except Exception as error:
                error.add_note(f"on {page}")
                raise

    test.__doc__ = check.__doc__
    return test


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text: str) -> list[str]:
    """Return the commands of shell blocks and of `code` in the text, without comments."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += re.findall(r"`((?:elastic-dp|make|python -m) [^`\n]*)`", text)
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def slug(title: str) -> str:
    return re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", title).lower()).strip().replace(" ", "-")


# ------------------------------------------------------------------------------------------ the
# first page


def test_job_of_the_quickstart_trains(tmp_path, monkeypatch, capsys):
    (job,) = blocks(PAGES["docs/quickstart.md"], "python")
    fit = elastic_dp.ElasticTrainer.fit

    def here(trainer):
        trainer.storage_path = str(tmp_path)
        return fit(trainer, local=True)

    monkeypatch.setattr(elastic_dp.ElasticTrainer, "fit", here)
    script = tmp_path / "mine.py"
    script.write_text(job)
    exec(compile(job, script, "exec"), {"__name__": "__main__"})
    step, digest = capsys.readouterr().out.split()
    assert step == "200" and len(digest) == 64
    logged = [json.loads(x) for x in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["loss"] < 0.01
    monkeypatch.chdir(tmp_path)
    looks = [x for x in commands(PAGES["docs/quickstart.md"]) if "~/elastic_dp_runs" in x]
    assert looks
    for line in looks:
        words = shlex.split(line.replace("~/elastic_dp_runs", str(tmp_path)))
        if "--live" not in words:  # which serves until Ctrl-C
            said = CliRunner().invoke(cli.app, words[1:])
            assert said.exit_code == 0 and said.stdout, said.output
    assert (tmp_path / "mine.html").exists()


# ------------------------------------------------------------------------------------- names on all
# pages


@every_page
def test_links_lead_to_pages_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = map(slug, re.findall(r"^#+ (.*)", path.read_text(), re.M))
            assert anchor in titles, target


@every_page
def test_paths_in_the_text_exist(page):
    named = re.findall(r"`((?:elastic_dp|tests|benchmarks|jobs|k8s|docs)/[\w./*-]*)`", PAGES[page])
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), path


@functools.cache
def command_line():
    return typer.main.get_command(cli.app)


@every_page
def test_commands_exist_with_their_options(page):
    app = command_line()
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(PAGES[page]):
        words = shlex.split(command.replace("…", "X"))
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[0] == "make":
            assert all(f"\n{target}:" in makefile for target in words[1:] if "=" not in target)
        elif words[0] == "elastic-dp":
            verb, rest = app, words[1:]
            while rest and rest[0] in getattr(verb, "commands", {}):
                verb, rest = verb.commands[rest[0]], rest[1:]
            assert verb is not app, command
            options = {name for param in verb.params for name in param.opts}
            rest = rest[: rest.index("--")] if "--" in rest else rest
            assert {word for word in rest if word.startswith("--")} <= options, command
        elif words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks", "tests")):
            path = ROOT / words[2].replace(".", "/")
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            source = path.read_text()
            assert all(word in source for word in words[3:] if word.startswith("--")), command


@every_page
def test_python_on_the_page_can_be_parsed(page):
    for block in blocks(PAGES[page], "python"):
        ast.parse(block)


@every_page
def test_fields_methods_and_errors_on_the_page_exist(page):
    text = PAGES[page]
    configs = "DataConfig|MapStyleData|ScalingConfig|CheckpointConfig|FailureConfig|Result|Run|Step"
    for owner, name in re.findall(rf"\b({configs})\.(\w+)", text):
        kind = getattr(elastic_dp, owner)
        fields = (
            {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
        )
        properties = vars(kind).get("__init__").__code__.co_names if owner == "Step" else ()
        assert name in fields or name in properties or hasattr(kind, name), f"{owner}.{name}"
    for name in re.findall(r"\bctx\.([a-z]\w*)", text):
        assert hasattr(elastic_dp.TrainContext, name), f"ctx.{name}"
    for name in re.findall(r"`(\w+Error|RunMismatch|LeaseLost|BadShard)`", text):
        assert hasattr(errors, name) or hasattr(builtins, name), name


# -----------------------------------------------------------------------------------------
# troubleshooting


def texts_of_the_source() -> set[str]:
    """Every string of the package, with … for what is put in."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
        if isinstance(node, ast.BinOp):
            return text(node.left) + text(node.right)
        return ""

    trees = [tree_of(path) for path in ROOT.glob("elastic_dp/**/*.py")]
    kinds = ast.Constant | ast.JoinedStr | ast.BinOp
    return {text(n) for tree in trees for n in ast.walk(tree) if isinstance(n, kinds)}


def test_messages_of_the_page_of_troubleshooting_are_in_the_source():
    rows = re.findall(r"^\| `([^`]+)` \|", PAGES["docs/troubleshooting.md"], re.M)
    assert len(rows) > 40
    source = texts_of_the_source()
    for message in rows:
        parts = [part for part in re.split(r"\s*…\s*", message) if part]
        assert any(all(part in text for part in parts) for text in source), message


# --------------------------------------------------------------------------------------------- the
# site


def test_api_page_has_every_public_name():
    described = set(re.findall(r"^::: elastic_dp\.([\w.]+)$", PAGES["docs/api.md"], re.M))
    assert {
        *elastic_dp.__all__,
        "errors",
        "dataprep.convert.convert",
        "dataprep.inspect",
    } <= described


def test_generated_tables_are_current():
    """`python -m docs.tables` writes them."""
    assert PAGES["docs/reference.md"] == tables.page()
    assert PAGES["docs/benchmarks.md"] == results_page.page()
    assert results_page.readme() == README
    assert results_page.kubernetes() == results_page.KUBERNETES.read_text()


def test_docs_build_strictly_and_ask_no_other_host(tmp_path):
    """Links, headings and references are checked by the build."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    for page in pages:
        asked = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)", page)
        assert not asked
    assert "heartbeat_timeout_s" in (tmp_path / "site/api.html").read_text()
