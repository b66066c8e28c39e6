"""Measures the gap between engine and trainer on a mixture of experts, with and without replayed routes. One JSON line.

    python benchmarks/routing_replay.py [--completions 16] [--tokens 48] [--repeats 5]

A small Qwen3-MoE with random weights (8 layers of 16 experts, 4 per token) samples in an embedded engine whose weights are
rounded to bfloat16, as in a server, and in one whose router weights only are perturbed by a thousandth of their size. The
trainer has the float32 weights and scores the same tokens with its own choice of experts and with the engine's. Step times
are processor seconds of one thread; live and replayed steps alternate, and the figure is the median of `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from polyturn.batching.samples import to_samples
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.metrics import reduce
from polyturn.core.sample import TrainSample
from polyturn.core.serde import to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.routers import Routers
from polyturn.training.hf import build_model
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy

VOCAB = 512
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.15,
    "max_position_embeddings": 1024,
}
TASK = Task(id="t", prompt=())


async def sample(model: Any, *, completions: int, tokens: int) -> list[TrainSample]:
    """Return the samples of one group of an engine with `model`, two turns each."""
    engine = EmbeddedEngine(model, num_slots=completions, routes=True)
    builders = [TrajectoryBuilder() for _ in range(completions)]
    rng = np.random.default_rng(0)
    for builder in builders:
        builder.open(rng.integers(0, VOCAB, 32))
    for turn in range(2):
        requests = [
            GenerateRequest(
                request_id=f"{turn}.{i}",
                session_id=str(i),
                prompt_ids=b.context,
                sampling=SamplingParams(max_tokens=tokens, seed=i),
                routed_from=b.num_routed,
            )
            for i, b in enumerate(builders)
        ]
        for builder, answer in zip(builders, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            builder.sample(answer, turn=turn)
            if turn == 0:
                builder.observe(rng.integers(0, VOCAB, 16), turn=turn)
    await engine.close()
    trajectories = [
        Trajectory(id=str(i), task=TASK, segments=b.build(), turns=(), stop_reason=StopReason.STOP)
        for i, b in enumerate(builders)
    ]
    samples = to_samples(TrajectoryGroup(id="g", task=TASK, trajectories=tuple(trajectories)), temperature=1.0)
    return [s.replace(advantages=s.loss_weights * (1 if i % 2 else -1)) for i, s in enumerate(samples)]


def apart(policy: Any, samples: list[TrainSample]) -> dict[str, float]:
    """Return the differences between the trainer's logprobs and the engine's."""
    places = [s.loss_weights > 0 for s in samples]
    own = np.concatenate([lp[p] for lp, p in zip(policy.score(samples), places, strict=True)]).astype(np.float64)
    engine = np.concatenate([np.asarray(s.rollout_logprobs)[p] for s, p in zip(samples, places, strict=True)])
    log_ratio = own - engine
    return {
        "logprob_difference_max": round(float(np.abs(log_ratio).max()), 5),
        "logprob_difference_mean": round(float(np.abs(log_ratio).mean()), 6),
        "k3": float(f"{(np.expm1(log_ratio) - log_ratio).mean():.3g}"),
    }


def without(samples: list[TrainSample]) -> list[TrainSample]:
    """Return the samples without routes."""
    return [s.replace(routed_experts=None) for s in samples]


def step_ratio(policy: Any, samples: list[TrainSample], repeats: int) -> float:
    """Return the processor time of a replayed forward and backward pass as a multiple of a live one."""
    times: dict[str, list[float]] = {"live": [], "replayed": []}
    for _ in range(repeats + 1):
        for name, batch in (("live", without(samples)), ("replayed", samples)):
            began = time.process_time()
            policy.forward_backward(batch)
            times[name].append(time.process_time() - began)
            policy.backend.optimizer.zero_grad()
    return statistics.median(times["replayed"][1:]) / statistics.median(times["live"][1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(CONFIG, seed=0)
    rounded, disturbed = copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model)
    routers = Routers.of(disturbed)
    assert routers is not None
    torch.manual_seed(0)
    with torch.no_grad():
        for module in routers.modules:
            module.weight.mul_(1 + 1e-3 * torch.randn_like(module.weight))
    policy = local_policy(model, optim=OptimSettings(lr=0.0))
    results: dict[str, Any] = {}
    for name, engine in (("bfloat16 engine", rounded), ("disturbed routers", disturbed)):
        samples = asyncio.run(sample(engine, completions=options.completions, tokens=options.tokens))
        metrics = reduce(policy.forward_backward(samples).metrics)
        policy.backend.optimizer.zero_grad()
        results[name] = {
            "router_choices_that_differ": round(metrics["policy/router_changed"], 4),
            "tokens_with_a_layer_that_differs": round(metrics["policy/router_changed_tokens"], 4),
            "live": apart(policy, without(samples)),
            "replayed": apart(policy, samples),
        }
    shape = routers.shape
    written = len(json.dumps(to_json(samples[0].routed_experts))) / len(samples[0])
    results["step time, replayed as a multiple of live"] = round(step_ratio(policy, samples, options.repeats), 3)
    results["bytes a token"] = {"in memory": shape.bytes_per_token, "as JSON": round(written, 1)}
    print(json.dumps({"benchmark": "routing_replay", "samples": len(samples), "results": results}))


if __name__ == "__main__":
    main()
