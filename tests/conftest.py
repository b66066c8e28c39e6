"""What holds for all tests: none fails because the machine is busy, and how they are shared out among processes.

`make test` has one process for each core.
A file's tests stay together, for they share fixtures; all that use the servers of one real engine are one share, so that
each server starts once and the two engines are tested side by side. What takes longest begins first. The million objects of
all tests and their imports are kept from the garbage collector, which takes half a second to walk them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FOLDERS = ("contract", "e2e", "golden", "property", "unit")
"""By how long a file takes, the longest first."""

LONGEST = ("e2e/test_demo.py", "e2e/test_ray_cluster.py", "unit/training/test_megatron.py", "unit/training/test_fsdp.py")
"""Files that begin before all others, so that no core waits for one of them at the end."""

ENGINES = ("vllm", "sglang")

for profile, examples in (("short", 25), ("long", 200)):  # `make test`, where each run draws others, and `make verify`
    settings.register_profile(profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("short")

for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as under `nohup`; what is tested would ignore it, too
        signal.signal(number, handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # as many threads as cores in each of as many processes would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def share_of(nodeid: str) -> str:
    """Return what a test is run together with.

    ```
    tests/contract/test_engine_contract.py::test_abort[vllm]  ->  tests/contract vllm
    tests/contract/test_engine_contract.py::test_abort[pool]  ->  tests/contract/test_engine_contract.py
    ```
    """
    path, _, test = nodeid.partition("::")
    engine = next((engine for engine in ENGINES if path.startswith("tests/contract/") and engine in test), None)
    return path if engine is None else f"tests/contract {engine}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.relative_to(item.config.rootpath / "tests")
        return path.as_posix() not in LONGEST, FOLDERS.index(path.parts[0])

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    return ByShare(config, log)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what installs a distribution for a test: its modules, and what its metadata say of entry points."""

    def made(name: str, points: Mapping[str, Mapping[str, str]], *, version: str = "1.0", **modules: str) -> None:
        folder = tmp_path / f"site-{name}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in found.items()) for group, found in points.items()]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        for module in modules:
            monkeypatch.delitem(sys.modules, module, raising=False)

    return made
