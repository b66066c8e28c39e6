"""Weights as handles: another process opens the memory that they lie in, and nothing is left of it afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyturn.engines.serve_commands import SERVER_SIDE
from polyturn.engines.weight_handles import SharedBucket

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))]
OPENS = """
import base64, io, json, pickle, sys
from polyturn_weights import _device, checksums, cut, open_shared
from torch.multiprocessing import reductions

class Opens(pickle.Unpickler):  # as the server's own does, a GPU is named by what it is, not by its number
    def find_class(self, module, name):
        found = super().find_class(module, name)
        if found is not reductions.rebuild_cuda_tensor:
            return found
        return lambda *said: found(*said[:6], _device(said[6]), *said[7:])

said = json.load(sys.stdin)
opened = cut(open_shared(said["handle"]), said["places"])
pickled = dict(Opens(io.BytesIO(base64.b64decode(said["pickled"]))).load())
print(json.dumps([checksums(opened.items()), checksums(pickled.items()), pickled["steps"].tolist()]))
del opened, pickled
"""


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_opens_them_by_plain_values_and_by_the_pickle_of_a_servers_format(device):
    from polyturn.engines.server_side.polyturn_weights import checksums

    tensors = {"q": torch.randn(3, 5), "k": torch.randn(7).bfloat16(), "steps": torch.arange(4)}
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    shared = SharedBucket(tensors)
    said = {"handle": shared.handle(), "places": shared.places, "pickled": shared.pickled()}
    assert len(said["pickled"]) < 4000  # handles, not the data
    called = subprocess.run(
        [sys.executable, "-c", OPENS],
        input=json.dumps(said),
        env={**os.environ, "PYTHONPATH": str(SERVER_SIDE)},
        capture_output=True,
        text=True,
        check=True,
    )
    shared.close()
    assert json.loads(called.stdout) == [checksums(tensors.items())] * 2 + [[0, 1, 2, 3]]
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def test_the_trainers_own_tensors_stay_where_they_are():
    tensor = torch.randn(4)
    before = tensor.data_ptr()
    shared = SharedBucket({"w": tensor})
    shared.close()
    assert tensor.data_ptr() == before
    assert not tensor.is_shared()
