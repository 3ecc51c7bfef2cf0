"""Real servers to try the log against: HDFS and S3, for tests, benchmarks and people.

`make hdfs` starts the first one by hand. No part of the installed packages.
"""

from servers.children import Children, ServerError
from servers.hdfs import HdfsCluster
from servers.s3 import S3Server

__all__ = ["Children", "HdfsCluster", "S3Server", "ServerError"]
