"""The command line, `elastic-dp`. What takes long to import is imported by the command that needs
it."""

from elastic_dp.cli.entry_point import app as app
from elastic_dp.cli.entry_point import main as main
