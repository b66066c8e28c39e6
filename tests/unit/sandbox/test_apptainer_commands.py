"""ApptainerSandbox: the command lines of apptainer, recorded by a stand-in, and its failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.sandbox import SandboxGoneError, SandboxSetupError, SandboxSpec, check_spec, open_sandbox, read_spec
from polyturn.sandbox.base import BaseSandbox
from support.refusals import refuses, refuses_later
from support.sandboxes import StandIn, stand_in, wait_until

CONTAIN = [
    *("--cleanenv", "--containall", "--no-mount", "hostfs,bind-paths", "--no-eval", "--fakeroot", "--writable-tmpfs"),
]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch, tmp_path, "apptainer")


async def opened(engine: StandIn, **options: Any) -> BaseSandbox:
    workdir = str(engine.folder / "work")
    return await open_sandbox(SandboxSpec(backend="apptainer", workdir=workdir, **{"image": "python:3.12", **options}))


def instance_calls(engine: StandIn, action: str) -> list[list[str]]:
    return [call[2:] for call in engine.calls("instance") if call[1] == action]


async def test_start_contains_limits_and_no_network(engine: StandIn):
    async with await opened(engine, cpus=1.5, memory_mb=100, processes=7, run_args=("--nv",)):
        (start,) = instance_calls(engine, "start")
    limits = ["--memory", "100M", "--pids-limit", "7", "--cpus", "1.5"]
    assert start[:-1] == [*CONTAIN, "--net", "--network", "none", *limits, "--nv", "docker://python:3.12"]
    assert start[-1].startswith("polyturn-")


async def test_network_and_limits_are_left_out_where_asked(engine: StandIn):
    async with await opened(engine, network=True, memory_mb=None, processes=None):
        (start,) = instance_calls(engine, "start")
    assert start[:-1] == [*CONTAIN, "docker://python:3.12"]


async def test_exec_has_folder_and_variables(engine: StandIn):
    async with await opened(engine, env={"A": "1,2"}) as box:
        result = await box.exec("echo $A$B; exit 4", cwd="/tmp", env={"B": "3"}, timeout_s=60)
    assert (result.exit_code, result.stdout) == (4, "1,23\n")
    last, (start,) = engine.calls("exec")[-1], instance_calls(engine, "start")
    head = ["exec", "--cleanenv", "--no-eval", "--cwd", "/tmp", f"instance://{start[-1]}", "env", "A=1,2", "B=3"]
    assert last[: len(head)] == head and last[-1] == "echo $A$B; exit 4"


async def test_files_travel_as_commands(engine: StandIn):
    async with await opened(engine) as box:
        await box.write("sub/file", bytes(range(256)))
        assert await box.read("sub/file") == bytes(range(256))


async def test_instance_is_stopped_once(engine: StandIn):
    box = await opened(engine)
    assert await box.is_alive() and await box.pid() > 0
    await box.close()
    await box.close()
    assert instance_calls(engine, "stop") == [["--force", instance_calls(engine, "start")[0][-1]]]


@pytest.mark.parametrize("image", ["docker://ghcr.io/a/b", "library://a/b", "docker-archive:image.tar"])
async def test_image_with_an_address_stays(engine: StandIn, image: str):
    async with await opened(engine, image=image):
        assert instance_calls(engine, "start")[0][-2] == image


def test_image_file_starts_from_the_configs_folder(tmp_path: Path):
    (tmp_path / "image.sif").touch()
    spec = read_spec({"backend": "apptainer", "image": "image.sif"}, where="sandbox", base=tmp_path)
    assert spec.image == str(tmp_path / "image.sif")


async def test_instance_that_does_not_start_is_a_setup_error(engine: StandIn):
    engine.set("no-run")
    await refuses_later(lambda: opened(engine), SandboxSetupError, "no such image")


async def test_dead_instance_is_an_error(engine: StandIn):
    async with await opened(engine) as box:
        engine.set("dead")
        with pytest.raises(SandboxGoneError):
            await box.exec("true")


@pytest.mark.parametrize(
    ("options", "word"),
    [({}, "image"), ({"image": "i", "user": "me"}, "user"), ({"build": "."}, "docker-archive")],
)
def test_option_that_apptainer_cannot_take_is_refused(engine: StandIn, options: Any, word: str):
    with pytest.raises(ConfigError, match=word):
        check_spec(SandboxSpec(backend="apptainer", **options))


def test_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses(
        lambda: check_spec(SandboxSpec(backend="apptainer", image="i")), ConfigError, "'apptainer', which is not installed"
    )


@pytest.mark.kill
def test_killed_run_stops_its_instances(engine: StandIn):
    with engine.killed_run():
        assert not instance_calls(engine, "stop")
    wait_until(lambda: bool(instance_calls(engine, "stop")))
    force, pattern = instance_calls(engine, "stop")[0]
    assert force == "--force" and pattern.endswith("*")
    assert instance_calls(engine, "start")[0][-1].startswith(pattern.removesuffix("*"))
