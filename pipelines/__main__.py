"""`python -m pipelines etl CONFIG` is `spark-log etl CONFIG`, and so on."""

from broker.cli import main

main()
