"""What the benchmarks share with the tests: the modules of `tests/support`, under this name."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "tests" / "support")]
