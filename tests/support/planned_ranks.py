"""What test_memory.py measures on each rank: the most memory that training a few hundred MB of weights took, and the plan.

Ranks read their parts of a folder, as those of a run do; one rank alone has the model whole.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from polyturn.batching.layout import LayoutSettings
from polyturn.training.fsdp import Sharded
from polyturn.training.hf import load_model, load_unread
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes
from polyturn.training.options import Degrees, OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy, policy_backend
from polyturn.training.rank_group import RankWorker
from polyturn.training.ranked import RankedBackend
from support import megatron_cpu
from support.ranks import LeadingRank, bytes_of, follow
from support.samples import sample_of

TOKENS = 512
CPU = torch.device("cpu")


def sample(number):
    zeros = np.zeros(TOKENS, np.float32)
    weights = np.ones(TOKENS, np.float32)
    weights[0] = 0
    return sample_of(
        ("g", str(number), 0), np.full(TOKENS, number, np.int32), weights, old_logprobs=zeros - 6, advantages=zeros + 1
    )


def train(policy, count):
    for _ in range(2):  # the second one with moments
        policy.forward_backward([sample(number) for number in range(count)])
        policy.optim_step()


def measure(out, folder, *tensor_parallel):
    """Write what each rank had above its imports, beside `out`, and there the plan by what it is, in bytes; where
    `tensor_parallel` is said, of megatron-core's ranks."""
    rank, ranks, layout = dist.get_rank(), dist.get_world_size(), LayoutSettings(max_tokens_per_batch=TOKENS)
    split = Degrees(tensor_parallel=int(tensor_parallel[0])) if tensor_parallel else None
    if split is not None:
        megatron_cpu.pretend()
        from polyturn.training.megatron.placement import Megatron
    Path("/proc/self/clear_refs").write_text("5")  # the most starts again from here
    before = bytes_of("VmRSS")
    if split is not None:
        backend = policy_backend(load_unread(folder), placement=Megatron(split, CPU), optim=OptimSettings(), layout=layout)
        train(ModelPolicy(backend), 2)
    elif ranks == 1:
        train(local_policy(load_model(folder), optim=OptimSettings(), layout=layout), 2)
    else:

        def make(spec, held):
            placement = Sharded(Degrees(), CPU)
            return policy_backend(load_unread(folder), placement=placement, optim=OptimSettings(), layout=layout)

        worker = RankWorker({"policy": make})
        if rank:
            follow(worker)
        else:
            backend = RankedBackend(LeadingRank(worker), "policy", layout=layout)
            train(ModelPolicy(backend), 2 * ranks)
            backend.close()
    out.with_name(f"{rank}.json").write_text(json.dumps(bytes_of("VmHWM") - before))
    if rank == 0:
        load = RankLoad(ranks=ranks, megatron=split, tokens=TOKENS, on_gpu=False)
        planned = rank_bytes(ModelSize.of(load_unread(folder)), load)
        out.write_text(json.dumps(planned))
