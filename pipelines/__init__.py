"""Jobs on top of the log: files into a topic, and orders from raw lines to totals in a table."""
