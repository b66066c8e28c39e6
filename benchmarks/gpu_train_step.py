"""Measures the model FLOPs utilisation of an optimizer step on one GPU, for a bfloat16 model. Prints one JSON line.

    python benchmarks/gpu_train_step.py --model 0.5b|1.5b|moe [--tokens 32768] [--length 2048] [--checkpointing] [--steps 5]
    python benchmarks/gpu_train_step.py --tiny                  the same steps with a tiny model, also without a GPU

Weights are random, which does not change the time. A step is `ModelPolicy.forward_backward` and `optim_step` as in training.
FLOPs are those of the model, without recomputation: 6 per weight of the layers and token (of the experts, only those that
the token takes), 6 per weight of the output embedding and target, and 6 * length^2 * width per layer and sample for
attention.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.hf import build_model, checkpoint_activations, count_parameters
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy

PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
"""Dense bfloat16 FLOP/s, from the manufacturer's data sheets."""
MODELS: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "moe": {  # 2.5 B parameters, of which a token takes 0.5 B
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
MODELS["tiny-moe"] = {**MODELS["moe"], **MODELS["tiny"], "head_dim": 16, "moe_intermediate_size": 32}
TARGET = 0.4


def make_samples(*, tokens: int, length: int, vocab: int, trained: float, seed: int = 0) -> list[TrainSample]:
    """Return samples of about `length` tokens, `tokens` in total; the last share `trained` of each is trained."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    left = tokens
    while left > 1:
        size = min(left, int(rng.integers(length // 2, length * 3 // 2)))
        weights = (np.arange(size) >= size * (1 - trained)).astype(np.float32)
        weights[0] = 0
        samples.append(
            TrainSample(
                id=SampleId(str(len(samples)), "0", 0),
                token_ids=rng.integers(0, vocab, size),
                loss_weights=weights,
                turn_ids=np.zeros(size, np.int32),
                advantages=weights * float(rng.normal()),
            )
        )
        left -= size
    return samples


def model_flops(model: torch.nn.Module, samples: list[TrainSample], config: dict[str, Any]) -> float:
    """Return the FLOPs of one forward and backward pass."""
    embedding = config["vocab_size"] * config["hidden_size"]
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * (1 - config["num_experts_per_tok"] / config["num_experts"]) if experts else 0
    in_layers = count_parameters(model) - embedding - idle
    lengths = np.array([len(s) for s in samples], np.float64)
    attention = 6 * config["num_hidden_layers"] * config["hidden_size"] * float((lengths**2).sum())
    return 6 * in_layers * lengths.sum() + 6 * embedding * sum(s.num_weighted for s in samples) + attention


def measure(
    name: str, *, tokens: int, length: int, trained: float, steps: int, warm_up: int, checkpointing: bool
) -> dict[str, Any]:
    """Take optimizer steps and return their figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields = MODELS[name]
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 65536, **fields}
    model: Any = build_model(config, seed=0, dtype=torch.bfloat16).to(device)
    if checkpointing:
        checkpoint_activations(model)
    samples = make_samples(tokens=tokens, length=length, vocab=fields["vocab_size"], trained=trained)
    policy = local_policy(model, optim=OptimSettings(), layout=LayoutSettings(max_tokens_per_batch=tokens, packed=True))
    seconds: list[dict[str, float]] = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        metrics = policy.forward_backward(samples).metrics
        _wait(device)
        between = time.perf_counter()
        policy.optim_step()
        _wait(device)
        ended = time.perf_counter()
        seconds.append({"step": ended - began, "forward_backward": between - began, "optimizer": ended - between})
    parts = {part: median(s[part] for s in seconds[warm_up:]) for part in seconds[0]}
    flops = model_flops(model, samples, fields)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    peak = PEAK.get(gpu) if gpu is not None else None
    return {
        "benchmark": "gpu_train_step",
        "device": gpu or "cpu",
        "model": name,
        "parameters": count_parameters(model),
        "tokens": sum(len(s) for s in samples),
        "targets": sum(s.num_weighted for s in samples),
        "samples": len(samples),
        "is_packed": metrics["tokens/padding_share"].value == 0,
        "checkpointing": checkpointing,
        "seconds": {part: round(value, 4) for part, value in parts.items()},
        "tokens_per_s": round(tokens / parts["step"]),
        "tflop_per_s": float(f"{flops / parts['step'] / 1e12:.3g}"),
        "mfu": None if peak is None else round(flops / parts["step"] / peak, 3),
        "mfu_forward_backward": None if peak is None else round(flops / parts["forward_backward"] / peak, 3),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if gpu is not None else None,
        "target": TARGET,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["0.5b", "1.5b", "moe"], default="0.5b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--trained", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    is_tiny = args.tiny or not torch.cuda.is_available()
    if is_tiny:
        args.tokens, args.length, args.steps, args.warm_up = 512, 64, 2, 1
    result = measure(
        {"moe": "tiny-moe"}.get(args.model, "tiny") if is_tiny else args.model,
        tokens=args.tokens,
        length=args.length,
        trained=args.trained,
        steps=args.steps,
        warm_up=args.warm_up,
        checkpointing=args.checkpointing,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
