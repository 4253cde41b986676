"""The command line, `python -m jaxops`: one module a command, imported when it is asked for.

A command's module has a one-line docstring, which is its help, `add_arguments(parser)`, and
`run(args)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import jaxops

COMMANDS = (
    "info",
    "check",
    "bench",
    "demo",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's own arguments) names.

    Returns the command's exit code, or 2 after printing the help when there is no command.

    Raises:
      SystemExit: argparse refused the arguments, or printed the help it was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m jaxops",
        description="Fast operators for JAX: what is here, and how it runs.",
    )
    parser.add_argument("--version", action="version", version=f"jaxops {jaxops.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command")
    # A command must not fail or wait on the imports of another: only help and errors list all.
    wanted = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    for name in wanted:
        module = importlib.import_module(f"jaxops._cli.{name}")
        summary = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    return args.run(args)
