"""Build the environment in which TRL runs beside this library, for the comparison in `benchmarks/trl_comparison.py`.

    python scripts/trl/build.py            builds it once (about a minute), prints its interpreter
    python scripts/trl/build.py --where    only prints where it lies, or would

TRL's pin is in `requirements.txt`; everything that both libraries stand on (torch, transformers, tokenizers, numpy) has the
version of the project's constraints, so that a difference in speed is a difference between the two. The folder is under the
user's cache, named after a hash of all pins, and counts once its marker is written.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
SHARED = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface-hub", "accelerate", "jinja2")
MARKER = ".complete"


def shared_pins() -> list[str]:
    """Return the lines of the project's constraints that the comparison must not differ in."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in SHARED]


def folder() -> Path:
    """Return where the environment lies, or will."""
    parts = [Path(__file__).read_bytes(), REQUIREMENTS.read_bytes(), "\n".join(shared_pins()).encode(), sys.version.encode()]
    key = hashlib.sha256(b"\x00".join(parts)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "polyturn" / "trl" / key


def interpreter() -> Path | None:
    """Return the environment's interpreter, or None where it was never built to the end."""
    return folder() / "bin" / "python" if (folder() / MARKER).exists() else None


def build() -> Path:
    """Build the environment unless it is there; return its interpreter."""
    if found := interpreter():
        return found
    target = folder()
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    python = target / "bin" / "python"
    pins = target / "pins.txt"
    pins.write_text("\n".join(shared_pins()) + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(pins), "torch"], check=True)
    subprocess.run([*pip, "-c", str(pins), "-r", str(REQUIREMENTS)], check=True)
    (target / MARKER).touch()
    return python


def main() -> None:
    """Build what is missing and print the interpreter."""
    parser = argparse.ArgumentParser(description="Build the environment that TRL is compared in.")
    parser.add_argument("--where", action="store_true", help="only print the interpreter's path, build nothing")
    arguments = parser.parse_args()
    print(folder() / "bin" / "python" if arguments.where else build())


if __name__ == "__main__":
    main()
