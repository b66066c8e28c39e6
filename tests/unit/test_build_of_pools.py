"""From the `engine` section to a pool of servers: how many, where, in which order; nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyturn import build
from polyturn.build import parts
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.order import Fifo, LongestFirst
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.vllm import VllmEngine
from support.runs import write_tiny_run

LAUNCH = ("engine.kind=vllm", "engine.num_slots=null", f"engine.launch.python={sys.executable}")


def build_pool(folder: Path, *overrides: str) -> EnginePool:
    loaded = load_config(RunConfig, write_tiny_run(folder), overrides)
    engine = build.build_parts(build.ConfigSource(config=loaded.config, base=folder)).engine
    assert isinstance(engine, EnginePool)
    return engine


def clients(pool: EnginePool) -> Iterator[RemoteEngine]:
    for replica in pool.replicas:
        assert isinstance(replica.engine, RemoteEngine)
        yield replica.engine


async def test_each_url_is_a_server_of_the_pool(tmp_path: Path) -> None:
    pool = build_pool(tmp_path, *LAUNCH[:2], "engine.urls=[http://a:1, http://b:2/]")
    assert [engine.url for engine in clients(pool)] == ["http://a:1", "http://b:2"]
    assert all(isinstance(engine, VllmEngine) for engine in clients(pool))
    assert isinstance(pool._policy, LongestFirst)
    await pool.close()


async def test_replicas_are_started_each_with_its_own_devices_and_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    pool = build_pool(
        tmp_path,
        *LAUNCH,
        "engine.launch.replicas=2",
        "engine.launch.devices=['0,1', '2,3']",
        f"engine.launch.log={log}",
        "engine.launch.max_restarts=5",
        "engine.order=fifo",
    )
    supervisors = [engine._supervisor for engine in clients(pool)]
    specs = [supervisor._spec for supervisor in supervisors if supervisor is not None]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2,3"]
    assert [spec.log for spec in specs] == [log, Path(f"{log}.1")]
    assert [supervisor._max_restarts for supervisor in supervisors if supervisor is not None] == [5, 5]
    assert isinstance(pool._policy, Fifo)
    await pool.close()


async def test_the_ageing_of_the_order_is_an_option(tmp_path: Path) -> None:
    pool = build_pool(tmp_path, *LAUNCH, "engine.order_kwargs.age=1.5")
    assert isinstance(pool._policy, LongestFirst) and pool._policy._age == 1.5
    await pool.close()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("engine.urls=[a:1]",), "write it with its scheme"),
        (("engine.urls=[http://a:1, http://a:1/]",), "names a server twice"),
        (("engine.urls=[http://192.0.2.7:1]", "engine.weights=shared_memory"), "192.0.2.7:1 is another machine"),
        (("engine.weights=disk",), "disk needs a folder"),
        (("engine.weights=disk", "engine.weights_folder=nowhere"), "which is no folder"),
        (("engine.in_process=true",), "leave it out: engine.kind: sglang starts a server beside the trainer"),
        (("engine.launch.replicas=3", "engine.launch.devices=['0']"), "3 replicas and names GPUs for 1"),
        (("engine.order=longest",), "longest_first"),
        (("engine.order_kwargs.age=3",), "more than 3 times its fair share"),
        (("engine.order=fifo", "engine.order_kwargs.age=1"), "does not take {'age': 1}"),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    launch = LAUNCH if not any("urls" in override for override in overrides) else LAUNCH[:2]
    with pytest.raises(ConfigError, match=says.replace("{", r"\{").replace("}", r"\}")):
        build_pool(tmp_path, *launch, *overrides)


@pytest.mark.parametrize("replica", ["", ".1"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_log_that_is_no_file_is_refused_before_weights_are_loaded(
    tmp_path: Path, kind: str, replica: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody reads holds the server up once it is full."""
    log = Path(f"{tmp_path}/server.log{replica}")
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "device":
        log.symlink_to("/dev/full")
    else:
        log.mkdir()
    launched = (*LAUNCH, "engine.launch.replicas=2", f"engine.launch.log={tmp_path / 'server.log'}")
    monkeypatch.setattr(parts, "build_model", pytest.fail)
    with pytest.raises(ConfigError, match=r"server\.log.* is (no regular file|a folder).*name another engine\.launch\.log"):
        build_pool(tmp_path, *launched)
