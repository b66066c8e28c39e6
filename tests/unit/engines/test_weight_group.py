"""The trainer's end of a process group with a server's workers: a group beside all others, between processors or GPUs."""

import asyncio
import json
import os
import sys

import pytest
import torch

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.serve_commands import SERVER_SIDE
from polyturn.engines.weight_group import WeightGroup

URL = "http://127.0.0.1:8000"
WORKER = """
import json, sys
from polyturn_vllm_worker import WeightLoader
host, port, size, name, backend = sys.argv[1:]
if backend == "nccl":
    import torch
    torch.cuda.set_device(1)
worker = WeightLoader()
worker.rank = 0
worker.polyturn_join(host, int(port), int(size), name, backend)
print("joined", flush=True)
worker.polyturn_receive(name, [["matrix", "float32", [3, 2]], ["one", "float32", [1]]])
print(json.dumps({name: tensor.tolist() for name, tensor in worker._polyturn_held.items()}))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the group is made")
def test_nccl_without_a_gpu_is_one_sentence():
    with pytest.raises(EngineError, match=r"over nccl needs a GPU .* set engine\.weights to gloo or http"):
        WeightGroup(URL, name="g", backend="nccl", num_workers=1)


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"))],
)
async def test_a_worker_joins_and_receives_and_no_other_group_is_touched(backend):
    group = WeightGroup(URL, name="polyturn-one", backend=backend, num_workers=1)
    where = ["127.0.0.1", str(group.port), str(group.size), group.name, backend]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, *where),
        env={**os.environ, "PYTHONPATH": str(SERVER_SIDE)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdout is not None
    await group.join(worker.stdout.readline())
    matrix = torch.arange(6.0).view(2, 3).t()  # not contiguous
    await group.broadcast([matrix, torch.tensor([7.0])], worker.wait())
    came = json.loads(await worker.stdout.read())
    assert came == {"matrix": matrix.tolist(), "one": [7.0]}
    assert not torch.distributed.is_initialized()
    group.close()


async def test_a_server_that_does_not_join_ends_the_wait_at_once():
    async def refuses():
        raise EngineLostError("it has died")

    group = WeightGroup(URL, name="polyturn-two", backend="gloo", num_workers=1)
    with pytest.raises(EngineLostError, match="it has died"):
        await group.join(refuses())
    group.close()
