"""Builds separate interpreters for packages that are used with polyturn but cannot share its environment.

    python scripts/environments/build.py                 verifiers and OpenEnv: `env.kwargs.python` in a config
    python scripts/environments/build.py verifiers_v1    verifiers 0.4 and newer
    python scripts/environments/build.py agents          mini-swe-agent, and from npm Claude Code and Codex
    python scripts/environments/build.py openhands       OpenHands' SDK, on Python 3.12
    python scripts/environments/build.py harbor          Harbor's own runner, on Python 3.12
    python scripts/environments/build.py trl             TRL, for the comparison in `benchmarks/trl_comparison.py`
    python scripts/environments/build.py ms_swift        ms-swift, for the same comparison
    python scripts/environments/build.py trl --where     only prints the path of its interpreter, built or not

Each has a file of pins in this folder and is built once, in about a minute. Packages for comparisons have torch and other
shared dependencies in the versions of the project's constraints, so that differences in speed come from the packages
themselves. The folders are in the user's cache and named after a hash of all pins.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import venv_cache  # noqa: E402

CONSTRAINTS = HERE.parents[1] / "constraints.txt"
SHARED = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface-hub", "accelerate", "jinja2")
COMPARED = ("trl", "ms_swift")
NAMES = ("environments", "verifiers_v1", "agents", "openhands", "harbor", *COMPARED)
PYTHONS = {"openhands": "python3.12", "harbor": "python3.12"}
"""Environment -> its Python, if it needs another version than this one; on PATH or installed by pyenv."""


def requirements(name: str) -> Path:
    """Return the path of an environment's pins."""
    return HERE / f"{name}.txt"


def npm_packages(name: str) -> list[str]:
    """Return the npm packages of an environment."""
    pins = HERE / f"{name}.npm.txt"
    return pins.read_text(encoding="utf-8").split() if pins.exists() else []


def shared_pins(name: str) -> str:
    """Return the lines of the project's constraints that an environment must share, without packages that it pins itself."""
    if name not in COMPARED:
        return ""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    own = {line.partition("==")[0] for line in requirements(name).read_text(encoding="utf-8").splitlines()}
    return "\n".join(line for line in lines if line.partition("==")[0] in {*SHARED} - own)


def folder(name: str) -> Path:
    """Return the folder of an environment, built or not."""
    pins = shared_pins(name)
    parts = [requirements(name).read_bytes(), *([pins.encode()] if pins else []), PYTHONS.get(name, sys.version).encode()]
    parts += [package.encode() for package in npm_packages(name)]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "polyturn" / name / hashlib.sha256(b"\x00".join(parts)).hexdigest()[:12]


def build(name: str) -> Path:
    """Build an environment unless it exists; return its interpreter."""
    python = _find_python(PYTHONS[name]) if name in PYTHONS else sys.executable
    if python is None:
        sys.exit(f"{name} needs {PYTHONS[name]}, which is neither on PATH nor installed by pyenv; install it")
    return venv_cache.built(folder(name), functools.partial(_fill, name), python=python)


def _find_python(program: str) -> str | None:
    """Return an interpreter that works: pyenv puts programs on PATH that fail unless their version is selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (shutil.which(program), *sorted(map(str, pyenv.glob(f"versions/*/bin/{program}")))):
        if candidate and subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
            return candidate
    return None


def interpreter(name: str) -> Path | None:
    """Return the interpreter of an environment; None if the environment is not complete."""
    return venv_cache.interpreter(folder(name))


def _fill(name: str, python: Path) -> None:
    """Install the pinned packages."""
    pins = python.parents[1] / "pins.txt"
    pins.write_text(shared_pins(name) + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(pins)]
    if shared_pins(name):
        subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "-r", str(requirements(name))], check=True)
    if packages := npm_packages(name):
        there = str(python.parents[1])
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", there, *packages], check=True)
        for program in Path(there, "node_modules", ".bin").iterdir():
            (python.parent / program.name).symlink_to(Path("..", "node_modules", ".bin", program.name))


def main() -> None:
    """Build the environment if it is missing, and print its interpreter."""
    parser = argparse.ArgumentParser(description="Build the interpreter of packages that run beside this library.")
    parser.add_argument("name", nargs="?", default=NAMES[0], choices=NAMES, help=f"which one; {NAMES[0]} if none is named")
    parser.add_argument("--where", action="store_true", help="only print the interpreter's path, build nothing")
    arguments = parser.parse_args()
    print(folder(arguments.name) / "bin" / "python" if arguments.where else build(arguments.name))


if __name__ == "__main__":
    main()
