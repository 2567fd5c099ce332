"""The ``fp8graph`` command. One file per command: ``add`` says what it takes, ``run`` does it.

Exit codes: 0 success, 1 failure, 2 cannot run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from fp8graph.cli import bench, completion, demo, doctor, explain, export, inspect, plan, tune
from fp8graph.cli.extras import install
from fp8graph.version import __version__

# in the order of their use: look, choose, write and read checkpoints, measure
COMMANDS: Final = (demo, explain, plan, tune, export, inspect, doctor, bench, completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    from fp8graph.errors import Fp8GraphError  # torch is imported only once the arguments are right

    try:
        return options.run(options)
    except Fp8GraphError as error:
        print(f"fp8graph: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (command := install(error.name or "")) is None:
            raise
        print(f"fp8graph: {error.name} is missing. Run: {command}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfp8graph: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fp8graph explain llama | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # a file that cannot be read or written
        print(f"fp8graph: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """All commands and what they take; imports neither torch nor rich."""
    found = argparse.ArgumentParser(prog="fp8graph", description="FP8 for unmodified PyTorch models.")
    found.add_argument("--version", action="version", version=f"fp8graph {__version__}")
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return found
