"""What test_memory.py measures: a process that trains 200 MB of weights, the most memory that took, and what was planned.

python planned_rank.py OUT     writes JSON: what it had above its imports, and the plan by what it is, in bytes
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from streaming_ranks import bytes_of

from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes
from polyturn.training.options import OptimSettings
from polyturn.training.policy import local_policy
from support.models import tiny_model

TOKENS = 512


def sample(number):
    zeros = np.zeros(TOKENS, np.float32)
    weights = np.ones(TOKENS, np.float32)
    weights[0] = 0
    return TrainSample(
        id=SampleId("g", str(number), 0),
        token_ids=np.full(TOKENS, number, np.int32),
        loss_weights=weights,
        turn_ids=np.zeros(TOKENS, np.int32),
        old_logprobs=zeros - 6,
        advantages=zeros + 1,
    )


def main(out):
    before = bytes_of("VmRSS")
    model = tiny_model(512, hidden=512, layers=20, heads=8, kv_heads=8)
    load = RankLoad(tokens=TOKENS, on_gpu=False)
    planned = rank_bytes(ModelSize.of(model), load)
    policy = local_policy(model, optim=OptimSettings(), layout=LayoutSettings(max_tokens_per_batch=TOKENS))
    for _ in range(2):  # the second one with moments
        policy.forward_backward([sample(number) for number in range(2)])
        policy.optim_step()
    out.write_text(json.dumps({"most": bytes_of("VmHWM") - before, "planned": planned}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
