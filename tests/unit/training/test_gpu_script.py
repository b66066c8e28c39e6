"""The script that measures a GPU takes the same steps on a CPU, so that it works on the day that a GPU is there."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu_train_step.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_train_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tiny_model_takes_packed_steps(script, checkpointing):
    found = script.measure("tiny", tokens=96, length=32, trained=0.5, steps=1, warm_up=0, checkpointing=checkpointing)
    assert found["is_packed"] and found["tokens"] == 96 and found["targets"] < 96
    assert found["tflop_per_s"] > 0


def test_flops_are_those_of_the_weights_and_of_causal_attention(script):
    samples = script.make_samples(tokens=64, length=16, vocab=512, trained=0.5)
    fields = script.MODELS["tiny"]
    model = script.build_model({"model_type": "qwen2", "tie_word_embeddings": True, **fields}, seed=0)
    layers = script.count_parameters(model) - 512 * 64
    targets = sum(s.num_weighted for s in samples)
    expected = 6 * 64 * layers + 6 * targets * 512 * 64 + 6 * 2 * 64 * sum(len(s) ** 2 for s in samples)
    assert script.model_flops(model, samples, fields) == expected
