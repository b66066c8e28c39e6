"""The program that `python -m verl.trainer.main_ppo` runs under `polyturn run-as verl`."""

from __future__ import annotations

import sys

from polyturn.cli.end_process import end_process
from polyturn.cli.main import guarded, prepare_process


def main() -> None:
    """Train the run that the command line describes in verl's keys."""
    prepare_process()
    from polyturn.cli import verl  # what it imports reads the environment

    guarded(lambda: verl.run_main_ppo(sys.argv[1:]))


if __name__ == "__main__":
    end_process(main)
