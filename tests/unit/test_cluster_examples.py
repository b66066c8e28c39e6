"""examples/cluster: the Slurm script runs with stand-ins for Slurm, Ray and polyturn; the RayJob is of KubeRay's form, and
asks for what its run needs. Neither has met a real scheduler here."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from polyturn.build.memory_plan import layout_of
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig

pytestmark = pytest.mark.timeout(300)  # it waits for processes

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"

STAND_INS = {
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": """
echo "ray $*" >> "$LOG"
if [[ $1 == start ]]; then exec sleep 600; fi
grep -q "ray start --head" "$LOG" """,
    "hostname": "echo 10.0.0.7 10.0.0.8",
    "scontrol": 'echo "scontrol $*" >> "$LOG"',
    "polyturn": """
until grep -q "ray start --address" "$LOG"; do sleep 0.02; done
echo "polyturn $*" >> "$LOG"
trap "exit 143" TERM
mkdir -p runs/slurm-12345/checkpoints/step-000001
while [[ $* == *waits* ]]; do sleep 0.05; done""",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins first in the path, and return the file in which they record their calls."""
    for name, body in STAND_INS.items():
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f"#!/bin/bash\n{body}\n")
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    settings = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1", "LOG": str(tmp_path / "log")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").touch()
    return tmp_path / "log"


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", CLUSTER / "slurm.sh", *arguments], start_new_session=True)


def ended(job: subprocess.Popen[bytes]) -> int:
    """Wait until the script has ended, and end the rest of its job, as Slurm does."""
    try:
        return job.wait(240)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(job.pid, signal.SIGKILL)


def test_slurm_job_starts_ray_on_its_nodes(slurm: Path):
    assert ended(started("run.yaml", "train.steps=3")) == 0
    said = slurm.read_text()
    assert "srun --nodes=1 --ntasks=1 --nodelist=n1 ray start --head --node-ip-address=10.0.0.7 --port=22345 --block" in said
    assert "srun --nodes=3 --ntasks=3 --exclude=n1 ray start --address=10.0.0.7:22345 --block" in said
    assert "polyturn train run.yaml train.steps=3 name=slurm-12345 out=runs --ray 10.0.0.7:22345\n" in said
    assert "scontrol" not in said


def test_slurm_job_that_ends_early_is_requeued(slurm: Path):
    job = started("waits.yaml")
    deadline = time.monotonic() + 240
    while not Path("runs/slurm-12345/checkpoints/step-000001").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert ended(job) == 143
    assert "scontrol requeue 12345" in slurm.read_text()
    assert ended(started("run.yaml")) == 0
    assert "--ray 10.0.0.7:22345 --resume\n" in slurm.read_text(), "behind the checkpoint that it left"


def test_slurm_job_without_ray_ends(slurm: Path):
    (slurm.parent / "bin" / "ray").write_text("#!/bin/bash\nexit 1\n")
    assert ended(started("run.yaml")) != 0
    assert "polyturn" not in slurm.read_text()


def of(required: str, optional: str = "", **kinds: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    names = {*required.split(), *optional.split(), *kinds}
    properties: dict[str, Any] = {name: kinds.get(name, {}) for name in names}
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
"""Of Ray's options and of resources: a number there is refused by Kubernetes, or has two meanings."""
CONTAINER = of("name image resources", "volumeMounts env", name=TEXT, image=TEXT, resources=of("limits", limits=TEXTS))
POD = of("spec", spec=of("containers", "volumes", containers={"type": "array", "items": CONTAINER, "minItems": 1}))
COUNTS = {"replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
WORKERS = of("groupName rayStartParams template", groupName=TEXT, rayStartParams=TEXTS, template=POD, **COUNTS)
RAY_CLUSTER = of(
    "rayVersion headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    headGroupSpec=of("rayStartParams template", rayStartParams=TEXTS, template=POD),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_JOB = of(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=of("name", name=TEXT),
    spec=of(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=RAY_CLUSTER,
    ),
)
"""The part of KubeRay's RayJob (ray.io/v1) that the example uses; the whole of the operator's own schema took it, too."""


def test_ray_job_is_valid_and_has_the_gpus_of_its_run():
    job = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    assert [e.message for e in Draft202012Validator(RAY_JOB).iter_errors(job)] == []
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    program, command, *words = shlex.split(spec["entrypoint"])
    assert (program, command, words[-2:]) == ("polyturn", "train", ["--ray", "auto"])
    recipes = [ROOT / "examples" / word.removeprefix("/work/") for word in words if word.endswith(".yaml")]
    config = load_config(RunConfig, recipes[0], [*map(str, recipes[1:]), *(w for w in words[:-2] if "=" in w)]).config
    (workers,) = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert layout_of(config).gpus == workers["replicas"] * int(limits["nvidia.com/gpu"])
    asked = config.cluster.rank_resources["CPU"] * config.train.distributed.ranks
    asked += sum(kind.count * kind.resources["CPU"] for kind in (config.cluster.engines, config.cluster.workers))
    assert asked <= workers["replicas"] * int(limits["cpu"])
    assert f"uv pip install --python {config.engine.launch.python} " in (ROOT / "docker" / "Dockerfile").read_text()
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and cluster["rayVersion"] == pinned[1], "as the image installs it"
