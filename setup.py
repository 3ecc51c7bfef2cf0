"""Metadata, dependencies and extras; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

REQUIREMENTS = [
    # Columnar record batches, and the Parquet files of sealed records.
    "pyarrow>=26",
    # Offsets, lengths and key hashes computed for a whole batch at once.
    "numpy>=2",
    # The checksum of every extent, at hardware speed.
    "google-crc32c>=1.5",
    # One interface to file systems other than the local disk.
    "fsspec",
    # The command line: parsing, help and exit codes.
    "click>=8",
    # Tables and progress bars on a terminal.
    "rich>=13",
    # Metrics in Prometheus' form, served when a client asks for it.
    "prometheus-client>=0.20",
    # Wakes a waiting consumer when a commit appears, instead of polling.
    'inotify-simple>=1.3; sys_platform == "linux"',
]

EXTRAS = {
    "spark": [
        # The newest Spark that delta-spark accepts.
        "pyspark==4.2.0",
        # Spark's Python data sources need pandas, and not yet its version 3.
        "pandas<3",
    ],
    "connect": [
        # What Spark's client for a remote server needs.
        "pyspark[connect]==4.2.0",
    ],
    "table": [
        # Writes the Delta log of a topic's table; without it all else works, and no table is kept.
        "deltalake==1.6.*",
    ],
    "delta": [
        # The newest version whose jar is published as well.
        "delta-spark==4.4.0",
    ],
    "hdfs": [
        # HDFS without Java.
        "hdfs-native==0.14.*",
    ],
    "s3": [
        # S3 and what speaks its language; its conditional puts decide who commits.
        "s3fs>=2026.9",
    ],
    "notebooks": [
        # Markdown cells as HTML.
        "markdown-it-py>=3",
        # Code cells in colour.
        "pygments>=2.18",
        # Plots.
        "matplotlib>=3.10",
        # What a %pip cell asks for, compared with what is there.
        "packaging",
    ],
    "test": [
        # Runs the tests.
        "pytest>=8",
        # Random operations, compared with a plain model.
        "hypothesis",
        # A test that hangs fails instead.
        "pytest-timeout",
        # Spreads the tests over several cores.
        "pytest-xdist",
        # A real S3 server to test against, in a process of its own.
        "moto[server]>=5.2",
    ],
    "bench": [
        # Draws the plot of `python -m benchmarks simulate`.
        "matplotlib>=3.10",
    ],
    "dev": [
        # Formats and lints.
        "ruff",
        # Checks the types.
        "mypy",
    ],
}

setup(
    name="spark-log",
    version="0.1.0",
    description="A partitioned, transactional log on plain storage, read and written by Spark",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(
        include=["broker", "broker.*", "pipelines", "pipelines.*", "spark_log", "spark_log.*"]
    ),
    # By this name Spark finds `format("log")` with nothing registered.
    py_modules=["pyspark_log", "spark_log_command"],
    package_data={"spark_log": ["log4j2.properties"]},
    python_requires=">=3.11",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["spark-log = spark_log_command:main"]},
    keywords=["log", "streaming", "spark", "kafka", "delta"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: System :: Distributed Computing",
    ],
)
