"""Weights as handles: another process opens the memory that they lie in, and nothing is left of it afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from polyturn.engines.serve_commands import SERVER_SIDE
from polyturn.engines.weight_handles import SharedBucket

OPENS = """
import base64, json, pickle, sys
from polyturn_weights import checksums, cut, open_shared
said = json.load(sys.stdin)
opened = cut(open_shared(said["handle"]), said["places"])
pickled = dict(pickle.loads(base64.b64decode(said["pickled"])))
print(json.dumps([checksums(opened.items()), checksums(pickled.items()), pickled["steps"].tolist()]))
del opened, pickled
"""


def test_another_process_opens_them_by_plain_values_and_by_the_pickle_of_a_servers_format():
    from polyturn.engines.server_side.polyturn_weights import checksums

    tensors = {"q": torch.randn(3, 5), "k": torch.randn(7).bfloat16(), "steps": torch.arange(4)}
    shared = SharedBucket(tensors)
    said = {"handle": shared.handle(), "places": shared.places, "pickled": shared.pickled()}
    assert len(said["pickled"]) < 2000  # a handle, not the data
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
