"""Settings of all tests: time limits, hypothesis, and how xdist shares the files out.

A file's tests run in one process, because they share fixtures. All tests that use one real engine's servers run in one
process too, so that each server starts once and the two engines run side by side. The longest files start first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  (it cannot be imported after distutils of the standard library, which some packages import)

TIME_LIMITS = {"contract": 900, "e2e": 600, "golden": 300, "property": 300, "unit": 300}
"""Seconds after which a hanging test fails, by folder, in the order in which the folders start: the longest first.

The limits are there to end a hang, so they are far above what a test takes: beside eight busy processes, the first test of a
process has taken more than 60 s to import torch and Megatron.
"""

LONGEST = ("unit/training/test_megatron.py", "unit/training/test_fsdp.py")
"""Files that start before all others, so that no core waits for one of them at the end."""

SERVERS = ("vllm", "sglang")

# `make test` draws the same examples each time, so that a failure belongs to the tested change; `make verify` draws others.
for profile, examples, random in (("short", 25, False), ("long", 200, True)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=not random,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("short")

# Under `nohup`, SIGHUP is ignored, and every process under test would inherit that.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread per process: the processes already use all cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def share_of(nodeid: str) -> str:
    """Return the key of the tests that run in one process.

    ```
    tests/contract/test_engine_contract.py::test_abort[vllm]  ->  tests/contract vllm
    tests/contract/test_engine_contract.py::test_abort[pool]  ->  tests/contract/test_engine_contract.py
    ```
    """
    path, _, test = nodeid.partition("::")
    server = next((server for server in SERVERS if path.startswith("tests/contract/") and server in test), None)
    return path if server is None else f"tests/contract {server}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the million objects of imports and collected tests from the garbage collector, which takes 0.5 s to walk them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = list(TIME_LIMITS)

    def order(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.relative_to(item.config.rootpath / "tests")
        return path.as_posix() not in LONGEST, folders.index(path.parts[0])

    items.sort(key=order)
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMITS[folders[order(item)[1]]]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Leave the number of warnings in the cache, beside the failed tests, for the report of .ci/run."""
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set("polyturn/warnings", len(terminalreporter.stats.get("warnings", [])))


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> Iterator[None]:
    """Run finalizers at the end of the file that left them, so that a warning from one names the right file."""
    yield
    gc.collect()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    return ByShare(config, log)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a distribution for a test: its modules and its entry points."""

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
