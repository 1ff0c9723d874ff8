"""The commands reach a store whose address and credentials are told by --storage-option alone."""

import json

import pytest
from typer.testing import CliRunner

from elastic_dp import cli
from tests.storage.servers import azure_connection_string, azure_options, s3_options


def run(*words):
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_commands_with_storage_options_read_and_write_on_s3(bucket, tmp_path):
    endpoint, name = bucket
    given = {**s3_options(endpoint)}
    words = [
        *("--storage-option", f"aws_access_key_id={given['key']}"),
        *("--storage-option", f"secret_key={given['secret']}"),
        *("--storage-option", f"endpoint={endpoint}"),
    ]
    write_and_inspect(f"s3://{name}/shards", words, tmp_path)
    assert run("checkpoints", "list", f"s3://{name}/none", "--json", *words) == "[]\n"


def test_commands_with_a_connection_string_read_and_write_on_azure(container, tmp_path):
    endpoint, name = container
    words = ["--storage-option", f"connection_string={azure_connection_string(endpoint)}"]
    write_and_inspect(f"az://{name}/shards", words, tmp_path)
    assert run("checkpoints", "list", f"az://{name}/none", "--json", *words) == "[]\n"


def test_commands_with_an_account_key_and_an_endpoint_read_and_write_on_azure(container, tmp_path):
    """Only obstore knows of an endpoint; adlfs would ask the account's public host."""
    endpoint, name = container
    given = azure_options(endpoint).items()
    words = [word for key, value in given for word in ("--storage-option", f"{key}={value}")]
    write_and_inspect(f"az://{name}/shards", words, tmp_path)


def write_and_inspect(url, words, folder):
    (folder / "rows.csv").write_text("id,x\n1,0.5\n2,1.5\n3,2.5\n")
    wrote = run("data", "convert", str(folder / "rows.csv"), url, "--json", *words)
    assert json.loads(wrote)["rows"] == 3
    assert json.loads(run("data", "inspect", url, "--json", *words))["rows"] == 3


@pytest.mark.parametrize("command", [("data", "inspect"), ("checkpoints", "list")])
def test_a_command_with_an_option_of_an_unknown_name_says_the_right_one(command):
    words = [*command, "s3://bucket/x", "--storage-option", "secrte=canary"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "did you mean 'secret'?" in done.output and "canary" not in done.output
