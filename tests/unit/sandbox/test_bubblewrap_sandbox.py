"""BubblewrapSandbox: its commands, files and limits, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.sandbox import (
    BaseSandbox,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxSetupError,
    SandboxSpec,
    open_sandbox,
    read_spec,
)
from polyturn.sandbox.python import cgroup
from support.refusals import refuses_later
from support.sandboxes import needs_bubblewrap, needs_root, processes_with, wait_until

pytestmark = needs_bubblewrap


@pytest.fixture
async def box() -> AsyncIterator[BaseSandbox]:
    async with await open_sandbox(SandboxSpec(memory_mb=256, processes=64)) as sandbox:
        yield sandbox


async def test_command_returns_its_output_and_exit_code(box: BaseSandbox):
    result = await box.exec("echo out; echo err >&2; pwd; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n/app\n", "err\n")


async def test_command_reads_input_variables_and_folder(box: BaseSandbox):
    result = await box.exec('cat; echo "$WORD"; pwd', stdin=b"in ", env={"WORD": "x"}, cwd="/tmp")
    assert result.stdout == "in x\n/tmp\n"


async def test_late_command_is_a_result(box: BaseSandbox):
    result = await box.exec("echo begun; sleep 1000", timeout_s=0.5)
    assert result.is_timeout and result.exit_code == 124
    assert result.stdout in ("begun\n", "")  # nothing where a busy machine took so long to start the shell
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_child_in_background_holds_no_command_up(box: BaseSandbox):
    result = await box.exec("sleep 1000 & echo begun", timeout_s=60)
    assert result.stdout == "begun\n" and not result.is_timeout


async def test_long_output_keeps_its_first_and_last_bytes(box: BaseSandbox):
    result = await box.exec("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", max_bytes=1000)
    assert result.is_truncated and len(result.stdout) < 1100
    assert result.stdout.startswith("first") and result.stdout.endswith("last\n")


async def test_variables_of_this_process_are_not_inside(box: BaseSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYTURN_SECRET", "x")
    assert "POLYTURN_SECRET" not in (await box.exec("env")).stdout


async def test_network_is_not_reachable(box: BaseSandbox):
    assert (await box.exec("cat /proc/net/dev")).stdout.count(":") == 1  # the loopback device


async def test_capabilities_that_lead_out_are_dropped(box: BaseSandbox):
    result = await box.exec("grep CapEff /proc/self/status; mount -t tmpfs none /tmp; echo $?")
    assert int(result.stdout.split()[1], 16) & (1 << 21 | 1 << 12 | 1 << 16 | 1 << 27) == 0  # admin, net, module, mknod
    assert result.stdout.split()[-1] != "0"


async def test_unknown_folder_is_a_result(box: BaseSandbox):
    result = await box.exec("pwd", cwd="/missing")
    assert result.exit_code == 126 and "/missing" in result.stderr


async def test_files_travel_both_ways(box: BaseSandbox, tmp_path: Path):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/a.bin").write_bytes(bytes(range(256)))
    await box.upload(tmp_path / "in", "/data")
    assert await box.read("/data/deep/a.bin") == bytes(range(256))
    await box.write("new/b.txt", b"hello")
    assert (await box.exec("cat new/b.txt")).stdout == "hello"
    await box.download("/data", tmp_path / "out")
    assert (tmp_path / "out/deep/a.bin").read_bytes() == bytes(range(256))


async def test_missing_file_names_its_path(box: BaseSandbox):
    await refuses_later(lambda: box.read("nothing.txt"), SandboxFileError, "nothing")


async def test_long_file_is_refused(box: BaseSandbox):
    await box.write("long", b"x" * 100)
    await refuses_later(lambda: box.read("long", max_bytes=99), SandboxFileError, "99")


async def test_link_that_leads_out_reads_nothing_of_this_machine(box: BaseSandbox, tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    await box.exec(["ln", "-s", str(tmp_path / "secret"), "/app/link"])
    await refuses_later(lambda: box.read("link"), SandboxFileError, "link")
    await refuses_later(lambda: box.download("/app", tmp_path / "out"), SandboxFileError, "link")


async def test_kill_all_ends_what_commands_left(box: BaseSandbox):
    await box.exec("sleep 4242 & sleep 4242 &")
    await box.kill_all()
    assert "4242" not in (await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
    assert await box.is_alive()


@needs_root
async def test_command_runs_as_a_named_user(box: BaseSandbox):
    assert (await box.exec("id -un", user="nobody")).stdout == "nobody\n"
    result = await box.exec("id", user="ghost")
    assert result.exit_code == 126 and "ghost" in result.stderr


@needs_root
async def test_memory_limit_kills_the_command_alone(box: BaseSandbox):
    result = await box.exec(["python3", "-c", "x = b'1' * (1 << 30)"])
    assert result.exit_code != 0
    assert (await box.exec("echo alive")).stdout == "alive\n"


@needs_root
async def test_fork_bomb_ends_with_kill_all(box: BaseSandbox):
    await box.exec(":(){ :|:& };:", timeout_s=5)
    await box.kill_all()
    while (await box.exec("echo alive")).stdout != "alive\n":  # the dead are counted for a while
        await box.kill_all()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_root
async def test_first_process_survives_while_it_cannot_fork():
    async with await open_sandbox(SandboxSpec(processes=8)) as box:
        # A process enters the sandbox beyond its limit of processes; only a fork inside is refused.
        commands = [asyncio.create_task(box._run(["sleep", "31340"], timeout_s=600)) for _ in range(12)]
        while len(processes_with("31340")) < 24:  # noqa: ASYNC110 (each with the program that enters)
            await asyncio.sleep(0.01)
        first = await box.pid()
        (own,) = children_of(first)
        os.kill(own, signal.SIGKILL)
        while own in children_of(first):  # noqa: ASYNC110 (until the first process has reaped it)
            await asyncio.sleep(0.01)
        await box.kill_all()
        assert [output.exit_code for output in await asyncio.gather(*commands)] == [137] * 12
        while (await box.exec("echo alive")).stdout != "alive\n":
            pass
        assert await box.is_alive()


async def test_dead_sandbox_is_an_error(box: BaseSandbox):
    os.kill(await box.pid(), signal.SIGKILL)
    while await box.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(SandboxGoneError):
        await box.exec("true")


async def test_close_leaves_no_process_and_counts_once():
    sandbox = await open_sandbox(SandboxSpec())
    await sandbox.exec("sleep 31337 &")
    assert processes_with("31337")
    await asyncio.gather(sandbox.close(), sandbox.close())
    assert not processes_with("31337")
    with pytest.raises(SandboxError):
        await sandbox.exec("true")


async def test_cancelled_command_ends_at_close():
    sandbox = await open_sandbox(SandboxSpec())
    task = asyncio.create_task(sandbox.exec("echo begun > /tmp/begun; sleep 31338", timeout_s=1000))
    while (await sandbox.exec("cat /tmp/begun")).exit_code != 0:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sandbox.close()
    assert not processes_with("31338")


async def test_sandbox_that_starts_too_late_leaves_nothing():
    await refuses_later(lambda: open_sandbox(SandboxSpec(start_timeout_s=0.0001)), SandboxSetupError, "0.0001 s")


@needs_root
async def test_snapshot_starts_further_sandboxes(box: BaseSandbox):
    await box.write("/app/kept", b"old")
    image = await box.snapshot()
    async with await open_sandbox(dataclasses.replace(box.spec, image=image)) as other:
        assert (await other.exec("cat kept; echo new > kept; cat kept")).stdout == "oldnew\n"
    async with await open_sandbox(dataclasses.replace(box.spec, image=image)) as other:
        assert await other.read("kept") == b"old"


@pytest.mark.parametrize(
    ("options", "key", "hint"),
    [
        ({"backnd": "podman"}, "backnd", "backend"),
        ({"backend": "dokcer"}, "backend", "docker"),
        ({"memory_mb": "much"}, "memory_mb", "much"),
        ({"memory_mb": 0}, "memory_mb", "0"),
        ({"memory_mb": True}, "memory_mb", "number"),
        ({"warm": True}, "warm", "256"),
        ({"warm": 100000}, "warm", "256"),
        ({"warm": -1}, "warm", "256"),
        ({"max_alive": 0}, "max_alive", "1 or more"),
        ({"max_alive": 2, "warm": 2}, "max_alive", "warm"),
        ({"run_args": "--shm-size"}, "run_args", "list"),
        ({"env": {"A": 1}}, "env.A", "mapping"),
    ],
)
def test_wrong_option_is_refused_by_name(options: dict[str, object], key: str, hint: str):
    with pytest.raises(ConfigError, match=key) as error:
        read_spec(options, where="sandbox")
    assert hint in str(error.value)


_PROGRAM = """
import asyncio, sys
from polyturn.sandbox import SandboxSpec, open_sandbox

async def main():
    sandbox = await open_sandbox(SandboxSpec())
    await sandbox.exec("sleep 31339 & sleep 31339 &")
    print("ready", flush=True)
    await sandbox.exec("sleep 31339", timeout_s=1000)

asyncio.run(main())
"""


@pytest.mark.kill
def test_killed_run_leaves_no_process_and_no_mount():
    before = Path("/proc/mounts").read_text()
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        assert processes_with("31339")
        run.kill()
    wait_until(lambda: not processes_with("31339"))
    assert Path("/proc/mounts").read_text() == before
    cgroup.sweep()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/polyturn-sandbox-{run.pid}-*"))
