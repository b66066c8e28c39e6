"""The benchmark of an optimizer step on a GPU takes its steps on a CPU too, with tiny models."""

from __future__ import annotations

import pytest

from support.benchmark import load_benchmark

BENCHMARK = load_benchmark("gpu_train_step")


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_tiny_model_takes_the_steps_of_the_benchmark(model: str) -> None:
    result = BENCHMARK.measure(model, tokens=256, length=64, trained=0.5, steps=1, warm_up=0, checkpointing=False)
    assert result["model"] == model and result["tokens"] == 256 and result["seconds"]["step"] > 0


def test_idle_experts_count_no_flops() -> None:
    samples = BENCHMARK.make_samples(tokens=64, length=32, vocab=512, trained=0.5)
    flops = []
    for taken in (8, 64):
        fields = BENCHMARK.MODELS["tiny-moe"] | {"num_experts_per_tok": taken}
        model = BENCHMARK.build_model({"tie_word_embeddings": True, **fields}, seed=0)
        flops.append(BENCHMARK.model_flops(model, samples, fields))
    experts = 2 * 64 * 3 * 64 * 32  # layers, experts, matrices, and their sizes
    assert flops[1] - flops[0] == pytest.approx(6 * 64 * experts * (1 - 8 / 64))
