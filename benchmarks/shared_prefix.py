"""Compares forward and backward passes that compute common prefixes once with padded and with packed rows. One JSON line.

    python benchmarks/shared_prefix.py [--threads 1] [--repeats 5] [--tokens 640] [--common 0.8] [--members 8] [--groups 2]

In groups of 8 members, 80 % of a member's tokens are common (prompt, tools, first turns); the rest differs and is trained.
All three variants use `ModelPolicy.forward_backward` and must end with the same gradient. `ratio` is the time with shared
prefixes relative to the faster of the others, `ideal` the share of tokens that remain. Figures are CPU seconds of this
process, the best of alternating repeats, so a busy machine has little effect.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.hf import build_model, count_parameters
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy

VOCAB = 640
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
TARGET = 0.4


def make_samples(*, groups: int, members: int, tokens: int, common: float, seed: int = 0) -> list[TrainSample]:
    """Return the members of some groups, each with `tokens` tokens."""
    rng = np.random.default_rng(seed)
    num_common = round(tokens * common)
    samples = []
    for group in range(groups):
        prefix = rng.integers(0, VOCAB, num_common)
        for member in range(members):
            weights = (np.arange(tokens) >= num_common).astype(np.float32)
            samples.append(
                TrainSample(
                    id=SampleId(str(group), str(member), 0),
                    token_ids=np.concatenate([prefix, rng.integers(0, VOCAB, tokens - num_common)]),
                    loss_weights=weights,
                    turn_ids=np.zeros(tokens, np.int32),
                    old_logprobs=-6.46 * weights,
                    advantages=weights * float(rng.normal()),
                )
            )
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--common", type=float, default=0.8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--budget", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    samples = make_samples(groups=args.groups, members=args.members, tokens=args.tokens, common=args.common)
    model = build_model(MODEL, seed=0).train()
    layouts = {
        "rows": LayoutSettings(max_tokens_per_batch=args.budget),
        "packed": LayoutSettings(max_tokens_per_batch=args.budget, packed=True),
        "shared": LayoutSettings(max_tokens_per_batch=args.budget, shared_prefix=True),
    }
    policies = {name: local_policy(model, optim=OptimSettings(), layout=layout) for name, layout in layouts.items()}
    best = dict.fromkeys(layouts, float("inf"))
    gradients, computed = {}, {}
    for _ in range(args.repeats):
        for name, policy in policies.items():
            policy.backend.optimizer.zero_grad()
            start = time.process_time()
            metrics = policy.forward_backward(samples).metrics
            best[name] = min(best[name], time.process_time() - start)
            gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            computed[name] = metrics["tokens/processed"].value
    for name, gradient in gradients.items():
        if not torch.allclose(gradient, gradients["rows"], atol=1e-5):
            raise SystemExit(f"{name} computes another gradient than rows; the comparison means nothing")
    result = {
        "benchmark": "shared_prefix",
        "parameters": count_parameters(model),
        "samples": len(samples),
        "tokens": args.tokens,
        "common": args.common,
        "threads": args.threads,
        "cpu_s": {name: round(seconds, 3) for name, seconds in best.items()},
        "ratio": round(best["shared"] / min(best["rows"], best["packed"]), 3),
        "ideal": round(computed["shared"] / computed["packed"], 3),
        "target": TARGET,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
