"""The command line, `elastic-dp`. Each command imports what it needs, because that takes long."""

from elastic_dp.cli.entry_point import app as app
from elastic_dp.cli.entry_point import main as main
