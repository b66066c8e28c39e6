"""Measures the time to start a sandbox, run a command, write and read a file, and close; and many at once. One JSON line.

    python benchmarks/sandbox_latency.py [--backends bubblewrap podman] [--image NAME] [--repeats 50] [--alive 64]

Each back-end starts sandboxes one after another and runs `true` five times in each. Then `--alive` sandboxes are started at
once, run one command together, and are closed. Sandboxes that still exist at the end count as leaked. Podman and docker need
an image; the default is a file system of empty folders with this machine's /usr, created in a second. A back-end that does
not start is left out with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from polyturn.sandbox import BaseSandbox, SandboxError, SandboxSpec, open_sandbox

IMAGE = "localhost/polyturn-thin:1"
BACKENDS = ("bubblewrap", "podman", "docker")
EXECS = 5


def thin_image(program: str, folder: Path) -> tuple[str, ...]:
    """Import an image of empty folders; return the arguments that show this machine's /usr in it."""
    root = folder / "root"
    for name in ("usr", "etc", "tmp", "root", "proc", "sys", "dev", "run", "app"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "ld.so.cache"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    with tarfile.open(folder / "root.tar", "w") as archive:
        archive.add(root, arcname=".")
    subprocess.run([program, "import", str(folder / "root.tar"), IMAGE], check=True, stdout=subprocess.DEVNULL)
    return ("-v", "/usr:/usr:ro")


async def timed(seconds: list[float], call: Awaitable[Any]) -> Any:
    """Await `call` and record its time."""
    began = perf_counter()
    value = await call
    seconds.append(perf_counter() - began)
    return value


def alive(backend: str) -> int:
    """Return the number of running sandboxes: containers on this machine, or bubblewraps that this process started."""
    if backend == "bubblewrap":
        return sum(child.name() == "bwrap" for child in psutil.Process().children(recursive=True))
    return len(subprocess.run([backend, "ps", "-aq"], capture_output=True, text=True).stdout.split())


def figures(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    return {f"p{share}_ms": round(1000 * float(np.percentile(seconds, share)), 1) for share in (50, 99)}


async def measure(spec: SandboxSpec, *, repeats: int, num_alive: int) -> dict[str, Any]:
    """Return the figures of one back-end."""
    before = alive(spec.backend)
    took: dict[str, list[float]] = {name: [] for name in ("start", "exec", "write", "read", "close")}
    for _ in range(repeats):
        box = await timed(took["start"], open_sandbox(spec))
        for _ in range(EXECS):
            await timed(took["exec"], box.exec("true"))
        await timed(took["write"], box.write("/tmp/file", b"x" * 4096))
        await timed(took["read"], box.read("/tmp/file"))
        await timed(took["close"], box.close())
    began = perf_counter()
    boxes: list[BaseSandbox] = await asyncio.gather(*(open_sandbox(spec) for _ in range(num_alive)))
    started = perf_counter() - began
    ends = await asyncio.gather(*(box.exec("echo $((6 * 7))") for box in boxes))
    assert [end.stdout for end in ends] == ["42\n"] * num_alive, ends
    await asyncio.gather(*(box.close() for box in boxes))
    together = {"alive": num_alive, "started_in_s": round(started, 2), "all_gone_in_s": round(perf_counter() - began, 2)}
    return {
        **{name: figures(each) for name, each in took.items()},
        "together": together,
        "leaked": alive(spec.backend) - before,
    }


def main() -> None:
    """Measure each back-end and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--image", help="of podman and docker")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--alive", type=int, default=64)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for backend in args.backends:
            image, run_args = args.image, ()
            try:
                if backend != "bubblewrap" and image is None:
                    image, run_args = IMAGE, thin_image(backend, Path(tempfile.mkdtemp(dir=scratch)))
                spec = SandboxSpec(backend=backend, image=None if backend == "bubblewrap" else image, run_args=run_args)
                results[backend] = asyncio.run(measure(spec, repeats=args.repeats, num_alive=args.alive))
            except (SandboxError, FileNotFoundError, subprocess.CalledProcessError) as problem:
                print(f"{backend} is left out: {problem}", file=sys.stderr)
    print(json.dumps({"benchmark": "sandbox_latency", **results}))


if __name__ == "__main__":
    main()
