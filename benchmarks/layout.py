"""Compares training tokens per second of the layout step with hand-written loops. Prints one JSON line.

    python benchmarks/layout.py [--threads 1] [--repeats 5]

All forms use the same samples (a multi-turn length distribution), the same model (Qwen3, 0.9 million parameters), the same
loss and one backward pass, and must end with the same gradient. `layout` is `ModelPolicy.forward_backward` as in training,
with coefficients, layout, entropy, metrics and checks. `sorted_rows` is a bare loop: rows sorted by length, padded, split
at the same token budget, logits only at the targets, without metrics and checks. `dense` is a naive version: unsorted rows,
an attention mask, logits at all positions. Figures are CPU seconds of this process, the best of alternating repeats, so a
busy machine has little effect.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.algorithms.losses import ppo_clip
from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.hf import build_model, count_parameters
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy

VOCAB = 640
BUDGET = 4096
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def make_samples(num: int, *, seed: int = 0) -> list[TrainSample]:
    """Return samples of one to four turns: a prompt of about 90 tokens, then completions and observations of about 20."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num):
        parts = [np.zeros(int(rng.integers(80, 110)))]
        for turn in range(int(rng.integers(1, 5))):
            if turn:
                parts.append(np.zeros(int(rng.integers(15, 30))))
            parts.append(np.ones(int(rng.integers(8, 48))))
        weights = np.concatenate(parts).astype(np.float32)
        samples.append(
            TrainSample(
                id=SampleId(str(i // 8), str(i), 0),
                token_ids=rng.integers(0, VOCAB, len(weights)),
                loss_weights=weights,
                turn_ids=np.zeros(len(weights), np.int32),
                old_logprobs=-6.46 * weights,
                advantages=weights * float(rng.normal()),
            )
        )
    return samples


def padded(samples: list[TrainSample], name: str) -> Tensor:
    longest = max(len(s) for s in samples)
    rows = np.zeros((len(samples), longest), dtype=np.int64 if name == "token_ids" else np.float32)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = getattr(sample, name)
    return torch.from_numpy(rows)


def sorted_rows(model: PreTrainedModel, samples: list[TrainSample]) -> None:
    """Accumulate the gradient over rows sorted by length."""
    total = sum(s.num_weighted for s in samples)
    batches: list[list[TrainSample]] = [[]]
    for sample in sorted(samples, key=len):
        if (len(batches[-1]) + 1) * len(sample) > BUDGET:
            batches.append([])
        batches[-1].append(sample)
    for batch in batches:
        ids, weights, old, advantages = (
            padded(batch, n) for n in ("token_ids", "loss_weights", "old_logprobs", "advantages")
        )
        chosen = weights[:, 1:] > 0
        hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[chosen]
        logprobs = torch.log_softmax(model.get_output_embeddings()(hidden), -1)
        logprobs = logprobs.gather(1, ids[:, 1:][chosen][:, None])[:, 0]
        loss = ppo_clip(logprobs, old[:, 1:][chosen], advantages[:, 1:][chosen]).loss_T.sum() / total
        loss.backward()


def dense(model: PreTrainedModel, samples: list[TrainSample]) -> None:
    """Accumulate the gradient over unsorted rows, with a mask and all logits."""
    total = sum(s.num_weighted for s in samples)
    for start in range(0, len(samples), 16):
        batch = samples[start : start + 16]
        ids, weights, old, advantages = (
            padded(batch, n) for n in ("token_ids", "loss_weights", "old_logprobs", "advantages")
        )
        lengths = torch.tensor([len(s) for s in batch])
        mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = (ppo_clip(logprobs, old[:, 1:], advantages[:, 1:]).loss_T * weights[:, 1:]).sum() / total
        loss.backward()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    samples = make_samples(args.samples)
    model = build_model(MODEL, seed=0).train()
    policy = local_policy(model, optim=OptimSettings(), layout=LayoutSettings(max_tokens_per_batch=BUDGET))
    variants: dict[str, Callable[[], object]] = {
        "layout": lambda: policy.forward_backward(samples),
        "sorted_rows": lambda: sorted_rows(model, samples),
        "dense": lambda: dense(model, samples),
    }
    gradients, best = {}, dict.fromkeys(variants, float("inf"))
    for _ in range(args.repeats):
        for name, run in variants.items():
            policy.backend.optimizer.zero_grad()
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
            gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for name, gradient in gradients.items():
        if not torch.allclose(gradient, gradients["layout"], atol=1e-5):
            raise SystemExit(f"{name} computes another gradient than layout; the comparison means nothing")
    tokens = sum(len(s) for s in samples)
    rates = {name: round(tokens / seconds) for name, seconds in best.items()}
    result = {
        "benchmark": "layout",
        "parameters": count_parameters(model),
        "tokens": tokens,
        "threads": args.threads,
        "tokens_per_cpu_s": rates,
        "layout_vs_sorted_rows": round(rates["layout"] / rates["sorted_rows"], 3),
        "layout_vs_dense": round(rates["layout"] / rates["dense"], 3),
        "target": 0.9,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
