"""The trainer's end of a process group with a server's workers, beside all other groups."""

import asyncio
import json
import sys

import pytest
import torch

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.weight_group import WeightGroup
from support.refusals import refuses_later

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch

URLS = ["http://127.0.0.1:8000"]
WORKER = """
import json, sys
from datetime import timedelta
import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
host, port, size, name, backend = sys.argv[1:]
device = "cuda:1" if backend == "nccl" else "cpu"
if backend == "nccl":
    torch.cuda.set_device(1)
store = PrefixStore(name, TCPStore(host, int(port), int(size), is_master=False))
timeout = timedelta(seconds=60)
group, _ = _new_process_group_helper(int(size), 1, [], Backend(backend), store, group_name=name, timeout=timeout)
_world.pg_group_ranks[group] = {rank: rank for rank in range(int(size))}
print("joined", flush=True)
came = {"matrix": torch.empty(3, 2, device=device), "one": torch.empty(1, device=device)}
for tensor in came.values():
    group.broadcast([tensor], BroadcastOptions()).wait()
print(json.dumps({name: tensor.tolist() for name, tensor in came.items()}))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the group is made")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(EngineError, match=r"over nccl needs a GPU .* set engine\.weights to gloo"):
        WeightGroup(URLS, name="g", backend="nccl", size=2)


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"))],
)
async def test_worker_joins_and_receives_weights(backend):
    group = WeightGroup(URLS, name="polyturn-one", backend=backend, size=2)
    where = ["127.0.0.1", str(group.port), str(group.size), group.name, backend]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, *where),
        stdout=asyncio.subprocess.PIPE,
    )
    await group.join(worker.stdout.readline())
    matrix = torch.arange(6.0).view(2, 3).t()  # not contiguous
    await group.broadcast([matrix, torch.tensor([7.0])], worker.wait())
    came = json.loads(await worker.stdout.read())
    assert came == {"matrix": matrix.tolist(), "one": [7.0]}
    assert not torch.distributed.is_initialized()
    group.close()


async def test_server_that_does_not_join_ends_the_wait():
    async def refuses():
        raise EngineLostError("it has died")

    group = WeightGroup(URLS, name="polyturn-two", backend="gloo", size=2)
    await refuses_later(lambda: group.join(refuses()), EngineLostError, "it has died")
    group.close()
