"""Which log a command works on: `--log` before or after the sub-command, or the environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import click

from broker.log import Log, open_log

Function = Callable[..., Any]

VARIABLE = "SPARK_LOG_ROOT"


def _remember(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.find_root().obj = value


def _option(variable: str | None) -> Callable[[Function], Function]:
    return click.option(
        "--log",
        metavar="ROOT",
        envvar=variable,
        expose_value=False,
        callback=_remember,
        help=f"The log's directory; {VARIABLE} in the environment says the same.",
    )


root_log_option = _option(VARIABLE)
# Without the variable: it must not win over what was given before the sub-command.
log_option = _option(None)


metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(min=0, max=65_535),
    metavar="PORT",
    help="Serve metrics in Prometheus' form on this port.",
)


def open_chosen(*, create: bool = False) -> Log:
    """Open the log that the user chose."""
    root = click.get_current_context().find_root().obj
    if not root:
        raise click.UsageError(f"which log? Give --log ROOT or set {VARIABLE}.")
    if root.startswith("memory:"):
        raise click.UsageError(f"{root} would be gone with this command; give a directory.")
    return open_log(root, create=create)


def pass_log(function: Function) -> Function:
    """Give the command the opened log as its first argument, and the option `--log`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(open_chosen(), *args, **kwargs)

    return log_option(update_wrapper(call, function))
