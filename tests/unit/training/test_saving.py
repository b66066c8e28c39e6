"""Checkpoints are written beside training, some stay for good, and a full disk leaves the last good one."""

from __future__ import annotations

import re
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyturn.core.errors import CheckpointError
from polyturn.engines.weights.stream import TensorKind
from polyturn.training.checkpoint import Checkpoints, Saver
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.shards import Boxes, read_shards, stored_tensors, write_shards
from support.forked import Forked, run_program
from support.models import tiny_model
from support.refusals import refuses
from support.states import stored

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


def export(folder: Path) -> None:
    folder.mkdir()


def test_every_third_checkpoint_stays(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=3)
    for step in range(8):
        checkpoints.save(step, {}, export=export)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000006", "step-000007"]


def test_save_runs_beside_training_and_waits_for_the_last(tmp_path: Path):
    saver, go = Saver(Checkpoints(tmp_path)), threading.Event()

    def slow(folder: Path) -> None:
        assert go.wait(60)
        folder.mkdir()

    saver.save(1, {"step": 1}, export=slow)
    assert Checkpoints(tmp_path).latest() is None, "it is being written"
    go.set()
    saver.save(2, {"step": 2}, export=slow)
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("kind", [OSError, Exception])  # tokenizers raises the latter
def test_error_of_a_save_is_raised_by_the_next(kind: type[Exception], tmp_path: Path):
    saver = Saver(Checkpoints(tmp_path))

    def broken(folder: Path) -> None:
        raise kind("No space left on device (os error 28)")

    saver.save(1, {}, export=broken)
    refuses(lambda: saver.save(2, {}, export=export), CheckpointError, "step 1 cannot be written", "No space left")
    saver.save(2, {}, export=export)
    saver.wait()
    assert Checkpoints(tmp_path).latest() == tmp_path / "step-000002"


def test_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path):
    script = """
import sys, time
from pathlib import Path
from polyturn.training.checkpoint import Checkpoints, Saver
saver = Saver(Checkpoints(Path(sys.argv[1])))
saver.save(1, {"step": 1}, export=lambda folder: folder.mkdir())
saver.wait()
def stuck(folder):
    folder.mkdir()
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
saver.save(2, {"step": 2}, export=stuck)
time.sleep(60)
"""
    run = Forked(script, tmp_path, call="support.forked:run_code")
    try:
        run.wait_until(lambda: run.out == "writing\n")
    finally:
        run.kill()
    run.wait(60)
    checkpoints = Checkpoints(tmp_path)
    latest = checkpoints.latest()
    assert latest is not None and checkpoints.load(latest) == {"step": 1}


def test_kill_while_writing_shards_leaves_the_one_before(tmp_path: Path):
    """The state is written by torch in a thread of its own, and the process dies in the middle of a file."""
    script = """
import os, sys, signal
from pathlib import Path
from torch.distributed.checkpoint import FileSystemWriter
from support.models import tiny_model
from polyturn.training.checkpoint import Checkpoints, Saver
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
policy = local_policy(tiny_model(48), optim=OptimSettings())
saver = Saver(Checkpoints(Path(sys.argv[1])))
saver.save(1, {"step": 1}, export=Path.mkdir, stored={"policy": policy})
saver.wait()
def killed(self, *arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
FileSystemWriter.finish = killed
saver.save(2, {"step": 2}, export=Path.mkdir, stored={"policy": policy})
saver.wait()
"""
    done = run_program(script, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.err
    assert any((tmp_path / ".draft-000002" / "policy").glob("*.distcp")), "it was in the middle of it"
    checkpoints = Checkpoints(tmp_path)
    latest = checkpoints.latest()
    assert latest == tmp_path / "step-000001" and checkpoints.load(latest) == {"step": 1}
    again = local_policy(tiny_model(48, seed=1), optim=OptimSettings())
    again.load(latest / "policy")
    pairs = zip(again.weights().values(), tiny_model(48).state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    Saver(checkpoints).save(2, {"step": 2}, export=Path.mkdir, stored={"policy": again})


def test_checkpoint_without_shards_is_refused(tmp_path: Path):
    folder = Checkpoints(tmp_path).save(1, {"policy": {"model": {"w": torch.zeros(2)}}}, export=export)
    with pytest.raises(CheckpointError, match=r"holds whole tensors and cannot be resumed, but .*model\.path=.*/model"):
        local_policy(tiny_model(48), optim=OptimSettings()).load(folder / "policy")


def test_node_that_does_not_see_the_checkpoint_is_named(tmp_path: Path):
    folder = tmp_path / "checkpoints" / "step-000001"
    load = local_policy(tiny_model(48), optim=OptimSettings()).load
    refuses(lambda: load(folder / "policy"), CheckpointError, socket.gethostname(), str(folder), "`out`")


def test_damaged_shards_are_refused(tmp_path: Path):
    made = local_policy(tiny_model(48), optim=OptimSettings())
    (file,) = stored(made, tmp_path / "state").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    refuses(
        lambda: made.load(tmp_path / "state"), CheckpointError, "cannot be read ", "to resume from an earlier one, remove"
    )
    (tmp_path / "state" / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot be read \(FileNotFoundError.*\.metadata.*to resume from an earlier one"
    ):
        made.load(tmp_path / "state")


def test_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path):
    """In a process of its own, whose files cannot grow beyond 1 MB."""
    script = """
import resource, signal, sys
from pathlib import Path
import torch
from polyturn.core.errors import CheckpointError
from polyturn.training.checkpoint import Checkpoints, Saver
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder)
first = checkpoints.save(1, {"w": torch.zeros(1000)}, export=Path.mkdir)
saver = Saver(checkpoints)
saver.save(2, {"w": torch.zeros(2**20)}, export=Path.mkdir)
try:
    saver.wait()
except CheckpointError as problem:
    print(problem)
assert checkpoints.latest() == first and len(checkpoints.load(first)["w"]) == 1000
assert [p.name for p in folder.iterdir()] == ["step-000001"], "half a checkpoint was left behind"
checkpoints.save(3, {"w": torch.zeros(1000)}, export=Path.mkdir)
assert checkpoints.latest() == folder / "step-000003", "there is room for a smaller one"
"""
    done = run_program(script, tmp_path)
    assert done.returncode == 0, done.err
    assert re.search(r"step 2 .*MB are free .*step-000001", done.out)


def test_shard_behind_the_start_of_its_storage_is_written(tmp_path: Path):
    """All ranks but the first have such a shard of a model whose files are read in parts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        made, read = (DTensor.from_local(whole[4:], mesh, [Shard(0)]) for whole in (torch.arange(8.0), torch.zeros(8)))
        write_shards({"w": made}, tmp_path / "state").result()
        read_shards({"w": read}, tmp_path / "state")
        assert torch.equal(read.to_local(), torch.arange(4.0, 8.0))
    finally:
        dist.destroy_process_group()


def test_boxes_of_a_tensor_are_written_in_place(tmp_path: Path):
    """A rank of Megatron's has them in a weight that fuses several tensors; others read the whole, or split it
    differently."""
    whole, kind = torch.arange(24.0).view(6, 4), TensorKind((6, 4), torch.float32)
    held = {(0, 0): whole[:2].clone(), (2, 0): whole.clone()[2:4, :2], (2, 2): whole.clone()[2:4, 2:], (4, 0): whole[4:]}
    write_shards({"w": Boxes(kind, held)}, tmp_path / "state").result()
    assert torch.equal(stored_tensors(tmp_path / "state", prefix="")["w"], whole)
    into = torch.zeros(6, 4)
    read_shards({"w": Boxes(kind, {(1, 0): into[1:4], (5, 3): into[5:, 3:]})}, tmp_path / "state")
    assert torch.equal(into[1:4], whole[1:4]) and into[5, 3] == 23 and into[0].sum() == into[4].sum() == 0
