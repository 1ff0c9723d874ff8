"""`python -m elastic_dp.cli`."""

from elastic_dp.cli.entry_point import main

main()
