"""A program for Harbor's interpreter: run tasks with Harbor's own runner, and print the rewards of each as JSON.

    python harbor_oracle.py '[["examples/harbor/tasks/fix-test", "oracle"], …]'     ->  [{"reward": 1.0}, …]
    python harbor_oracle.py --read '["task", …]'     ->  [its task.toml as Harbor reads it, null where Harbor refuses it, …]

Harbor's own environments need images and a registry. This one is a folder with bubblewrap around each command, so that it
runs wherever bubblewrap does, and shares no line with the library's sandboxes.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import TaskConfig as TaskFile
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

FOLDERS = ("app", "tests", "solution", "logs/verifier", "logs/agent", "logs/artifacts", "etc", "var", "root")


class Box(BaseEnvironment):
    """A folder that bubblewrap shows to each command as its root."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-box-"))
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.root / name).symlink_to(f"usr/{name}")
        shutil.copytree(self.environment_dir, self.root / "app", ignore=lambda *_: ["Dockerfile"], dirs_exist_ok=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def upload_file(self, source_path, target_path) -> None:
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        variables = [part for name, value in (self._merge_env(env) or {}).items() for part in ("--setenv", name, value)]
        argv = [
            *("bwrap", "--die-with-parent", "--unshare-net", "--unshare-pid", "--clearenv", "--bind", str(self.root), "/"),
            *("--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--ro-bind", "/usr", "/usr"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *variables, "--chdir", cwd or "/app"),
            *("bash", "-c", command),
        ]
        run = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=timeout_sec)
        return ExecResult(stdout=run.stdout, stderr=run.stderr, return_code=run.returncode)


async def rewards(folder: str, agent: str, trials: Path) -> dict[str, float]:
    """Return the rewards of one trial."""
    config = TrialConfig(
        task=TaskConfig(path=Path(folder)),
        trials_dir=trials,
        environment=EnvironmentConfig(import_path="harbor_oracle:Box"),
        agent=AgentConfig(name=agent),
    )
    result = await (await Trial.create(config)).run()
    if result.verifier_result is None:
        raise SystemExit(f"{folder}: {result.exception_info}")
    return {name: float(value) for name, value in (result.verifier_result.rewards or {}).items()}


def read(folder: str):
    """Return Harbor's own reading of a task.toml; None if Harbor refuses the file."""
    try:
        return json.loads(TaskFile.model_validate_toml((Path(folder) / "task.toml").read_text()).model_dump_json())
    except ValueError:
        return None


async def main() -> None:
    """Do what the command line says."""
    if sys.argv[1] == "--read":
        answer = [read(folder) for folder in json.loads(sys.argv[2])]
    else:
        with tempfile.TemporaryDirectory() as trials:
            answer = [await rewards(folder, agent, Path(trials)) for folder, agent in json.loads(sys.argv[1])]
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    asyncio.run(main())
