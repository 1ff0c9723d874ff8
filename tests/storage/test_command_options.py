"""The commands reach a store whose address and credentials are told by --storage-option alone."""

import json

import pytest
from typer.testing import CliRunner

from elastic_dp import cli
from tests.storage.servers import azure_options, s3_options


def run(*words):
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_commands_with_storage_options_read_and_write_on_s3(bucket, tmp_path):
    endpoint, name = bucket
    given = s3_options(endpoint).items()
    words = [word for key, value in given for word in ("--storage-option", f"{key}={value}")]
    write_and_inspect(f"s3://{name}/shards", words, tmp_path)
    assert run("checkpoints", "list", f"s3://{name}/none", "--json", *words) == "[]\n"


def test_commands_with_an_account_key_and_an_endpoint_read_and_write_on_azure(container, tmp_path):
    endpoint, name = container
    given = azure_options(endpoint).items()
    words = [word for key, value in given for word in ("--storage-option", f"{key}={value}")]
    write_and_inspect(f"az://{name}/shards", words, tmp_path)


def write_and_inspect(url, words, folder):
    (folder / "rows.jsonl").write_text("".join(f'{{"id":{n},"x":{n - 0.5}}}\n' for n in (1, 2, 3)))
    wrote = run("data", "convert", str(folder / "rows.jsonl"), url, "--json", *words)
    assert json.loads(wrote)["rows"] == 3
    assert json.loads(run("data", "inspect", url, "--json", *words))["rows"] == 3


@pytest.mark.parametrize("command", [("data", "inspect"), ("checkpoints", "list")])
def test_a_command_with_an_option_of_another_library_names_the_right_one(command):
    words = [*command, "s3://bucket/x", "--storage-option", "secret=canary"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "write secret_access_key" in done.output and "canary" not in done.output
