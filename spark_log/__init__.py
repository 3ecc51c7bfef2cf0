"""Spark's view of the log: `format("log")` for batch and streaming, reads and writes."""
