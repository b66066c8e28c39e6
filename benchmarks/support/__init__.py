"""Makes the modules of `tests/support` importable for benchmarks as `support`."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "tests" / "support")]
