"""ContainerSandbox: the command lines of podman and docker, recorded by a stand-in, and their failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.sandbox import SandboxGoneError, SandboxSetupError, SandboxSpec, check_spec, open_sandbox
from polyturn.sandbox.base import BaseSandbox
from support.refusals import refuses, refuses_later
from support.sandboxes import StandIn, stand_in, wait_until


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch, tmp_path, request.param)


async def opened(engine: StandIn, **options: object) -> BaseSandbox:
    workdir = str(engine.folder / "work")
    return await open_sandbox(SandboxSpec(backend=engine.name, workdir=workdir, **{"image": "i", **options}))  # type: ignore[arg-type]


async def test_run_has_limits_and_no_network(engine: StandIn):
    async with await opened(engine, cpus=1.5, memory_mb=100, processes=7, run_args=("--read-only",)):
        (run,) = engine.calls("run")
    for option, value in (("--network", "none"), ("--memory", "100m"), ("--pids-limit", "7"), ("--cpus", "1.5")):
        assert run[run.index(option) + 1] == value
    assert run[run.index("--label") + 1].startswith("polyturn.run=")
    assert run.index("--read-only") < run.index("i")


async def test_network_is_the_engines_where_it_is_asked_for(engine: StandIn):
    async with await opened(engine, network=True):
        assert "--network" not in engine.calls("run")[0]


async def test_exec_has_user_folder_and_variables(engine: StandIn):
    async with await opened(engine, env={"A": "1"}) as box:
        result = await box.exec("echo said; exit 4", user="me", cwd="/tmp", env={"B": "2"}, timeout_s=60)
    assert (result.exit_code, result.stdout) == (4, "said\n")
    last = engine.calls("exec")[-1]
    assert last[:10] == ["exec", "-i", "-u", "me", "-w", "/tmp", "-e", "A=1", "-e", "B=2"]
    assert last[-6:-3] == ["60.000", "bash", "-c"] or last[-4:-1] == ["60.000", "bash", "-c"]


async def test_container_is_removed_once(engine: StandIn):
    box = await opened(engine)
    await box.close()
    await box.close()
    (removed,) = engine.calls("rm")
    assert removed[-1] == engine.calls("run")[0][engine.calls("run")[0].index("--name") + 1]


async def test_dockerfile_is_built_once(engine: StandIn, tmp_path: Path):
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch")
    for _ in range(2):
        async with await opened(engine, image=None, build=str(folder), build_args=("--pull=never",)):
            pass
    (build,) = engine.calls("build")
    assert "--pull=never" in build and build[-1] == str(folder)
    assert build[build.index("-t") + 1] in engine.calls("run")[0]


async def test_failed_build_is_a_setup_error(engine: StandIn, tmp_path: Path):
    engine.set("no-build")
    (tmp_path / "Dockerfile").write_text("FROM scratch")
    await refuses_later(lambda: opened(engine, image=None, build=str(tmp_path)), SandboxSetupError, "no space left")


async def test_container_that_does_not_start_is_a_setup_error(engine: StandIn):
    engine.set("no-run")
    await refuses_later(lambda: opened(engine), SandboxSetupError, "no such image")


@pytest.mark.parametrize(("state", "command"), [("dead", "true"), ("dying", "exit 137")])
async def test_container_that_is_dead_or_dies_with_its_command_is_an_error(engine: StandIn, state: str, command: str):
    async with await opened(engine) as box:
        engine.set(state)
        with pytest.raises(SandboxGoneError):
            await box.exec(command)


async def test_killed_command_of_a_live_container_is_a_result(engine: StandIn):
    async with await opened(engine) as box:
        assert (await box.exec("exit 137")).exit_code == 137
    assert len(engine.calls("inspect")) <= 3, "each look starts a program"


async def test_snapshot_is_an_image(engine: StandIn):
    async with await opened(engine) as box:
        assert await box.snapshot() == engine.calls("commit")[0][-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"backend": "docker", "image": "i"}, "docker"), ({"backend": "podman", "image": "i"}, "podman")],
)
def test_missing_engine_is_named(options: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=named):
        check_spec(SandboxSpec(**options))  # type: ignore[arg-type]


def test_container_without_an_image_is_refused(engine: StandIn):
    refuses(lambda: check_spec(SandboxSpec(backend=engine.name)), ConfigError, "image")  # type: ignore[arg-type]


@pytest.mark.kill
def test_killed_run_removes_what_has_its_label(engine: StandIn, tmp_path: Path):
    (tmp_path / "running").write_text("abc\ndef\n")
    with engine.killed_run():
        assert not engine.calls("rm")
    wait_until(lambda: bool(engine.calls("rm")))
    assert engine.calls("rm")[0][-2:] == ["abc", "def"]
    (run_call,) = engine.calls("run")
    assert f"label={run_call[run_call.index('--label') + 1]}" in engine.calls("ps")[0]
