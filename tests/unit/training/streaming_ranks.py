"""Runs on each of two ranks for test_streamed_weights.py: streams 250 MB of weights into a folder, and measures the cost.

python streaming_ranks.py OUT     with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set     OUT/<rank>.json
"""

import ctypes
import datetime
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from polyturn.engines.weights.folder import WeightFolder
from polyturn.training.fsdp import Sharded
from polyturn.training.optim import OptimSettings
from polyturn.training.options import Degrees
from polyturn.training.policy import policy_backend
from polyturn.training.rank_group import RankWorker
from polyturn.training.ranked import RankedBackend
from support.models import tiny_model
from support.ranks import LeadingRank, bytes_of, follow

BUCKET = 16 * 2**20
CPU = torch.device("cpu")


def make_model():
    return tiny_model(512, hidden=512, layers=18, heads=8, kv_heads=8)


class Measured(RankWorker):
    """Records the peak memory of gathering, above the memory before it."""

    before = most = 0

    def run(self, command, share):
        if command == "policy.kinds":
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak restarts here
            self.before = bytes_of("VmRSS")
        return super().run(command, share)


def main(out):
    def make(spec, held):
        return policy_backend(make_model(), placement=Sharded(Degrees(), CPU), optim=OptimSettings())

    rank = Measured({"policy": make})
    number, found = dist.get_rank(), {}
    if number:
        follow(rank)
    else:
        backend = RankedBackend(LeadingRank(rank), "policy", bucket_bytes=BUCKET)
        (out / "config").mkdir()
        (out / "config" / "config.json").write_text("{}")
        with WeightFolder(out / "config", root=out) as files:
            streamed = backend.weights()
            found["bytes"] = sum(kind.nbytes for kind in streamed.kinds.values())
            written = files.write(streamed)
            found["most"] = bytes_of("VmHWM") - rank.before
            whole = dict(make_model().named_parameters())
            files_written = list(written.folder.glob("*.safetensors"))
            stored = {name: tensor for file in files_written for name, tensor in load_file(file).items()}
            found["is_same"] = all(torch.equal(whole[name], tensor) for name, tensor in stored.items())
            found["num_files"] = len(files_written)
            found["num_tensors"] = len(stored) - len(whole)
        backend.close()
    found.setdefault("most", bytes_of("VmHWM") - rank.before)
    (out / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    main(Path(sys.argv[1]))
