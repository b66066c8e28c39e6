"""torchrun under `polyturn run-as verl`: checks that the program is available and then runs torch's torchrun.

Without the check each process that torch starts would fail separately, and torch would report all of them.
"""

from __future__ import annotations

import importlib.util
import itertools
import runpy
import sys

from polyturn.cli.main import guarded
from polyturn.core.errors import ConfigError


def main() -> None:
    """Run torch's torchrun, after one error message if it would start a program of verl that is not available."""
    guarded(_check_program)
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def _check_program() -> None:
    for option, name in itertools.pairwise(sys.argv[1:]):
        if option == "-m" and name.startswith("verl."):
            try:
                importlib.util.find_spec(name)
            except ModuleNotFoundError as problem:
                raise ConfigError(str(problem)) from problem


if __name__ == "__main__":
    main()
