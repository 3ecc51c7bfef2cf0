"""`python -m broker.cli` is `spark-log`."""

from broker.cli.app import main

main()
