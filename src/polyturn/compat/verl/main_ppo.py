"""The program `python -m verl.trainer.main_ppo` under `polyturn run-as verl`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from polyturn.cli.end_process import end_process
from polyturn.cli.main import guarded, prepare_process
from polyturn.compat.not_offered import refuse


def __getattr__(name: str) -> Any:
    """Return `create_rl_sampler`, which users' files also import from this module."""
    if name == "create_rl_sampler":
        from polyturn.compat.verl.sampler import create_rl_sampler

        return create_rl_sampler
    return refuse(name)


def main() -> None:
    """Train with verl's keys from the command line."""
    prepare_process()
    from polyturn.cli import run_as  # the imported modules read the environment
    from polyturn.compat.verl_config import command

    overrides = json.loads(os.environ.get(run_as.OVERRIDES, "[]"))
    dry_run = run_as.DRY_RUN in os.environ
    guarded(lambda: command.run_main_ppo([*sys.argv[1:], *overrides], dry_run=dry_run))


if __name__ == "__main__":
    end_process(main)
