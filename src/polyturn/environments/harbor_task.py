"""A Harbor task: a folder with an instruction, an environment and a verifier, read and checked before an episode starts.

    my-task/instruction.md          the prompt
            task.toml               limits, deadlines, users, steps: every field below
            environment/Dockerfile  the sandbox; alternatively `docker_image`, or files only
            tests/test.sh           the verifier, which writes /logs/verifier/reward.txt or reward.json
            steps/NAME/…            instruction.md, tests/ and workdir/ of each step, if a task has several steps

An unknown field is refused with the closest known one. A field that needs something unsupported, such as a GPU, is refused
by name.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from polyturn.core.errors import DataError, did_you_mean, one_line
from polyturn.sandbox import SandboxSpec

NetworkMode = Literal["no-network", "public", "allowlist"]
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_UNITS = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HarborHealthCheck(_Part):
    """A command that must succeed before the agent begins."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class HarborArtifact(_Part):
    """A path that Harbor copies out of the sandbox; polyturn does not copy it."""

    source: str
    destination: str = ""
    exclude: list[str] = []
    service: str = "main"


class HarborPhase(_Part):
    """The common settings of agent and verifier."""

    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []


class HarborAgent(HarborPhase):
    """The section `agent`."""

    timeout_sec: float | None = Field(None, gt=0)


class HarborEnvironment(_Part):
    """The section `environment`."""

    build_timeout_sec: float = Field(600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    skills_dir: str | None = None
    mcp_servers: list[dict[str, Any]] = []
    healthcheck: HarborHealthCheck | None = None
    memory: str | None = None
    storage: str | None = None
    allow_internet: bool | None = None


class HarborCollect(_Part):
    """A command between the agent and the verifier."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class HarborVerifier(HarborPhase):
    """The section `verifier`."""

    timeout_sec: float = Field(600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: HarborEnvironment | None = None
    collect: list[HarborCollect] = []


class HarborAbout(_Part):
    """The section `task`: a description without effect."""

    name: str | None = None
    version: str | None = None
    description: str = ""
    authors: list[dict[str, str]] = []
    keywords: list[str] = []


class HarborSolution(_Part):
    """The section `solution`, for an oracle agent."""

    env: dict[str, str] = {}


class HarborStepEntry(_Part):
    """One of `steps`."""

    name: str = Field(pattern="^[^/]+$")
    min_reward: float | dict[str, float] | None = None
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    healthcheck: HarborHealthCheck | None = None
    artifacts: list[str | HarborArtifact] = []


class HarborFile(_Part):
    """A task.toml."""

    schema_version: str = Field("1.0", validation_alias=AliasChoices("schema_version", "version"))
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: list[str | HarborArtifact] = []
    source: str | None = None
    task: HarborAbout = HarborAbout()
    metadata: dict[str, Any] = {}
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    environment: HarborEnvironment = HarborEnvironment()
    solution: HarborSolution = HarborSolution()
    steps: list[HarborStepEntry] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborStep:
    """An instruction and its verifier; a task without a steps section has one step."""

    instruction: str
    tests: Path
    workdir: Path | None
    """A folder whose files are copied into the sandbox before the step."""
    agent: HarborAgent
    verifier: HarborVerifier
    healthcheck: HarborHealthCheck | None
    min_reward: Mapping[str, float]
    """Reward name -> smallest value with which the following steps are run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task, read."""

    folder: Path
    file: HarborFile
    steps: tuple[HarborStep, ...]

    @property
    def name(self) -> str:
        """The name of the task's folder."""
        return self.folder.name

    def spec(self, base: SandboxSpec, *, host_programs: bool = False) -> SandboxSpec:
        """Return the sandbox of an episode.

        Args:
            base: The run's sandbox. Its image, if set, replaces the task's; the task's limits replace its limits.
            host_programs: Whether to use this machine's programs instead of the task's image.

        Raises:
            DataError: the task needs an environment variable that is not set.
        """
        wanted, own_image = self.file.environment, base.image is None and not host_programs
        is_built = own_image and wanted.docker_image is None and (self.folder / "environment/Dockerfile").exists()
        disk_mb = wanted.storage_mb or _megabytes(wanted.storage)
        user = self.steps[0].agent.user
        return dataclasses.replace(
            base,
            image=(None if host_programs else wanted.docker_image) if base.image is None else base.image,
            build=str(self.folder.resolve() / "environment") if is_built else None,
            build_timeout_s=wanted.build_timeout_sec,
            workdir=wanted.workdir or base.workdir,
            env={**base.env, **self.variables(wanted.env)},
            user=base.user if user is None else str(user),
            cpus=wanted.cpus or base.cpus,
            memory_mb=wanted.memory_mb or _megabytes(wanted.memory) or base.memory_mb,
            disk_mb=disk_mb or base.disk_mb,
            network=self._has_network(base),
        )

    def _has_network(self, base: SandboxSpec) -> bool:
        wanted = self.file.environment
        return base.network and wanted.network_mode != "no-network" and wanted.allow_internet is not False

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables with `${NAME}` and `${NAME:-default}` replaced from this machine's environment.

        Raises:
            DataError: a variable is not set and has no default.
        """

        def value(match: re.Match[str]) -> str:
            environment_value = os.environ.get(match[1], match[2])
            if environment_value is None:
                raise DataError(f"{self.folder}/task.toml needs the variable {match[1]!r}, which is not set")
            return environment_value

        return {name: _VARIABLE.sub(value, text) for name, text in env.items()}

    def refusals(self, spec: SandboxSpec, *, host_programs: bool = False) -> Iterator[str]:
        """Yield the reasons, by field, why a run with the sandbox `spec` does not support this task."""
        wanted = self.file.environment
        if wanted.os == "windows":
            yield "environment.os is 'windows'; sandboxes are Linux"
        for name in ("gpus", "gpu_types", "tpu"):
            if value := getattr(wanted, name):
                yield f"environment.{name} is {value!r}; sandboxes have no accelerators"
        for name in ("mcp_servers", "skills_dir"):
            if value := getattr(wanted, name):
                yield f"environment.{name} is {value!r:.80}; the agent has only the sandbox's tools"
        for name in _COMPOSE:
            if (self.folder / "environment" / name).exists():
                yield f"environment/{name} describes several containers; a sandbox is a single one"
        if (wanted.network_mode == "public" or wanted.allow_internet) and not spec.network:
            yield "environment needs the network (network_mode, allow_internet); set network: true in the run's sandbox"
        for env in (wanted.env, *(step.verifier.env for step in self.steps)):
            try:
                self.variables(env)
            except DataError as problem:
                yield str(problem)
        has_network = self._has_network(spec)
        phases: list[tuple[str, HarborEnvironment | HarborPhase]] = [("environment", wanted)]
        for i, step in enumerate(self.steps):
            phases += [(f"steps[{i}].agent", step.agent), (f"steps[{i}].verifier", step.verifier)]
        for where, phase in phases:
            if phase.network_mode == "allowlist" or phase.allowed_hosts:
                yield f"{where} limits the network to some hosts (allowed_hosts); a sandbox has the whole network or none"
            elif phase is not wanted and phase.network_mode not in (None, "public" if has_network else "no-network"):
                yield f"{where}.network_mode is {phase.network_mode!r}, which differs from the environment's"
        for i, step in enumerate(self.steps):
            if step.verifier.environment_mode == "separate" or step.verifier.environment is not None:
                yield f"steps[{i}].verifier has a separate environment; verifiers run in the agent's sandbox only"
            if step.agent.user != self.steps[0].agent.user:
                yield f"steps[{i}].agent.user is {step.agent.user!r}; all steps run as one user"
            if any(one.service != "main" for one in step.verifier.collect):
                yield f"steps[{i}].verifier.collect names another service than 'main'"
            if not (step.tests / "test.sh").is_file():
                yield f"there is no {(step.tests / 'test.sh').relative_to(self.folder)}"
        for path in sorted(self.folder.rglob("trajectory.json")):
            if (path.parent / "instruction.md").exists():
                yield f"{path.relative_to(self.folder)} has an earlier conversation; an episode begins with the instruction"
        has_dockerfile = (self.folder / "environment/Dockerfile").exists()
        if spec.backend == "bubblewrap" and spec.image is None and not host_programs:
            if wanted.docker_image is not None or has_dockerfile:
                image = wanted.docker_image or "environment/Dockerfile"
                yield (
                    f"the task needs the image of {image}, which bubblewrap cannot run; "
                    "use backend: podman or docker, or set host_programs: true to use this machine's programs"
                )
        elif spec.backend != "bubblewrap" and spec.image is None and wanted.docker_image is None and not has_dockerfile:
            yield "the task has neither environment.docker_image nor environment/Dockerfile; set image in the run's sandbox"
        elif spec.backend in ("apptainer", "e2b") and spec.image is None and wanted.docker_image is None:
            yield (
                f"{spec.backend} builds no image from environment/Dockerfile; build it with podman or docker, and set image "
                "in the run's sandbox"
            )

    def notes(self, spec: SandboxSpec) -> Iterator[str]:
        """Yield the fields of the task that have no effect here."""
        if self.file.artifacts or any(step.artifacts for step in self.file.steps):
            yield "artifacts: not copied out"
        if spec.backend != "bubblewrap" and (self.file.environment.storage_mb or self.file.environment.storage):
            yield "environment.storage_mb: not limited in containers"


def read_tasks(folder: Path) -> list[HarborTask]:
    """Return the tasks of a folder.

    Raises:
        DataError: the folder has no task, or a task is invalid.
    """
    return [read_task(one) for one in task_folders(folder)]


def task_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is a task, else the task folders in it, ordered by name.

    Raises:
        DataError: there is no task.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name a Harbor task, or a folder of them")
    if (folder / "task.toml").exists():
        return [folder]
    folders = [one for one in sorted(folder.iterdir()) if (one / "task.toml").exists()]
    if not folders:
        raise DataError(f"{folder} has no Harbor task (a folder with task.toml, instruction.md and tests/test.sh)")
    return folders


def read_task(folder: Path) -> HarborTask:
    """Read a task's folder.

    Raises:
        DataError: a part is missing, unknown or invalid.
    """
    path = folder / "task.toml"
    try:
        file = HarborFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as problem:
        raise DataError(f"{path}: {_worded(problem)}") from problem
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: {one_line(problem)}") from problem
    if not (folder / "environment").is_dir() and file.environment.docker_image is None:
        raise DataError(f"{folder} has neither a folder environment/ nor environment.docker_image in task.toml")
    for size in (file.environment.memory, file.environment.storage):
        _megabytes(size)
    for inside in folder.rglob("*"):
        if inside.is_symlink() and not inside.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{inside} is a link to a path outside the task")
    if not file.steps:
        return HarborTask(folder=folder, file=file, steps=(_step(folder, folder, file, HarborStepEntry(name=folder.name)),))
    steps = tuple(_step(folder, folder / "steps" / one.name, file, one) for one in file.steps)
    return HarborTask(folder=folder, file=file, steps=steps)


def _step(task: Path, folder: Path, file: HarborFile, entry: HarborStepEntry) -> HarborStep:
    try:
        lines = (folder / "instruction.md").read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{folder / 'instruction.md'}: {one_line(problem)}") from problem
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    if not lines:
        raise DataError(f"{folder / 'instruction.md'} is empty; write the instruction for the model")
    agent, verifier = entry.agent, entry.verifier
    least = entry.min_reward
    return HarborStep(
        instruction="".join(lines).strip(),
        tests=folder / "tests" if (folder / "tests").is_dir() else task / "tests",
        workdir=folder / "workdir" if (folder / "workdir").is_dir() and folder != task else None,
        agent=file.agent.model_copy(update={name: getattr(agent, name) for name in agent.model_fields_set}),
        verifier=file.verifier.model_copy(update={name: getattr(verifier, name) for name in verifier.model_fields_set}),
        healthcheck=entry.healthcheck,
        min_reward={} if least is None else least if isinstance(least, dict) else {"reward": least},
    )


def _megabytes(size: str | None) -> int | None:
    """Return a size such as "2G" in megabytes.

    Raises:
        DataError: the text is not a size.
    """
    if size is None:
        return None
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", size.strip(), re.IGNORECASE)) is None:
        raise DataError(f"environment.memory or storage is {size!r}; write a size such as '2G'")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def _worded(problem: ValidationError) -> str:
    """Return the first error of a task.toml as text, with the closest known field for an unknown one."""
    first = problem.errors()[0]
    key, at = ".".join(map(str, first["loc"])), HarborFile
    if first["type"] != "extra_forbidden":
        return f"{key} is {first['input']!r:.100}: {first['msg']}"
    for part in first["loc"][:-1]:
        field = at.model_fields.get(str(part))
        at = at if field is None else next(_models(field.annotation), at)
    return f"unknown field {key!r}.{did_you_mean(str(first['loc'][-1]), at.model_fields)}"


def _models(annotation: Any) -> Iterator[Any]:
    """Yield the pydantic models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)
