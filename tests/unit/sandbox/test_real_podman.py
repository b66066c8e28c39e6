"""ContainerSandbox against podman itself, with an image that is made here out of the machine's own /usr."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyturn.sandbox import BaseSandbox, SandboxSetupError, SandboxSpec, open_sandbox
from polyturn.sandbox.reach import reach
from support.refusals import refuses_later
from support.sandboxes import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

IMAGE = "localhost/polyturn-thin:1"
USR = ("-v", "/usr:/usr:ro")
CONF = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=32768:32768"]
[engine]
{runtime}
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def podman(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["podman", *arguments], input=stdin, capture_output=True, timeout=120, check=False)


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the image, with settings that need fewer rights than podman's defaults."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed (`apt-get install --no-install-recommends podman runc`)")
    folder = tmp_path_factory.mktemp("podman")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    (folder / "containers.conf").write_text(CONF.format(files=files, runtime=runtime))
    os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    root = folder / "root"
    for name in ("usr", "etc", "tmp", "root", "proc", "sys", "dev", "run", "var/tmp", "app"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "ld.so.cache"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    with tarfile.open(folder / "root.tar", "w") as archive:
        archive.add(root, arcname=".")
    podman("import", str(folder / "root.tar"), IMAGE)
    tried = podman("run", "--rm", "--network", "none", *USR, IMAGE, "true")
    if tried.returncode != 0:
        pytest.skip(f"podman runs no container here: {tried.stderr.decode()[-300:]}")
    yield
    podman("rmi", "-f", IMAGE)
    del os.environ["CONTAINERS_CONF"]


async def opened(**options: object) -> BaseSandbox:
    spec = {"image": IMAGE, "workdir": "/app", "run_args": USR, **options}
    return await open_sandbox(SandboxSpec(backend="podman", **spec))  # type: ignore[arg-type]


async def test_commands_and_files_work(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"1")
    async with await opened() as box:
        await box.upload(tmp_path, "/up")
        await box.write("b", b"2")
        result = await box.exec("cat /up/a b; id -un; exit 5", user="nobody")
        assert (result.exit_code, result.stdout) == (5, "12nobody\n")
        late = await box.exec("sleep 1000", timeout_s=0.5)
        assert late.is_timeout
        assert await box.read("b") == b"2"


async def test_memory_limit_is_a_result():
    async with await opened(memory_mb=64) as box:
        assert (await box.exec(["python3", "-c", "x = b'1' * (1 << 30)"])).exit_code != 0
        assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_network_is_not_there():
    async with await opened() as box:
        assert (await box.exec("cat /proc/net/dev")).stdout.count(":") == 1


async def test_box_without_network_reaches_one_address():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, await opened() as box:
        async with reach(box, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as inside:
            ask = f"exec 3<> /dev/tcp/{inside.removeprefix('http://').replace(':', '/')}; echo word >&3; cat <&3"
            assert (await box.exec(["bash", "-c", ask])).stdout == "WORD\n"
        assert (await box.exec(["bash", "-c", ask])).exit_code != 0


async def test_dockerfile_is_built(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo built > /made\nWORKDIR /app\n")
    build = {"image": None, "build": str(tmp_path), "build_args": (*USR, "--network", "none"), "workdir": None}
    async with await opened(**build) as box:
        assert (await box.exec("cat /made; pwd")).stdout == "built\n/app\n"


async def test_image_that_is_missing_is_named():
    await refuses_later(lambda: opened(image="localhost/nothing:1"), SandboxSetupError, "localhost/nothing")


async def test_snapshot_is_an_image():
    async with await opened() as box:
        await box.write("/app/kept", b"old")
        image = await box.snapshot()
    async with await opened(image=image) as other:
        assert await other.read("kept") == b"old"
    podman("rmi", "-f", image)


_PROGRAM = """
import asyncio
from polyturn.sandbox import SandboxSpec, open_sandbox

async def main():
    await open_sandbox(SandboxSpec(backend="podman", image="localhost/polyturn-thin:1", run_args=("-v", "/usr:/usr:ro")))
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_killed_run_leaves_no_container():
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        names = podman("ps", "-a", "--format", "{{.Names}}").stdout.decode()
        assert f"polyturn-{run.pid}-" in names
        run.kill()
    wait_until(lambda: f"polyturn-{run.pid}-" not in podman("ps", "-a", "--format", "{{.Names}}").stdout.decode())
