"""A model that megatron-core holds is the model of one process: scores, loss, gradient, step and state (float32 1e-5).

Real processes with gloo; each comparison is made where the tensors are (`support/megatron_ranks.py`) and judged here. Its
weights are mapped without megatron-core, and tested so.
"""

import importlib.util

import pytest
import torch

from polyturn.core.errors import ConfigError
from polyturn.training.backend import Degrees
from polyturn.training.lora import add_lora
from polyturn.training.megatron_weights import entries, pieces, region, require_split
from polyturn.training.options import LoraSettings
from support.megatron_ranks import SHORT
from support.models import tiny_model
from support.ranks import results_of_ranks

CALL = "support.megatron_ranks:measure"
CLOSE = 1e-5
pytestmark = pytest.mark.timeout(900)  # processes on a busy machine
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (the extra megatron)"
)
TWO = ["tensor", "expert", "pipeline", "tensor_qwen2", "lora_moe", *SHORT]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_ranks(CALL, 2, tmp_path_factory.mktemp("ranks") / "found.json")


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    one, two = (results_of_ranks(CALL, count, folder / f"{count}.json", "long") for count in (1, 2))
    return {**one, **two}


def judge(results, name):
    """Names of two ranks say what is split over them; `data` shares samples alone."""
    for rank, found in enumerate(results[name]):
        sizes = {what: found.pop(what) for what in list(found) if what.endswith("/largest")}
        assert all(size > 1e-3 for size in sizes.values()), "the gradient is one that differences would show in"
        # AdamW divides a gradient by its own size, so that rounding of the smallest ones shows in a step.
        bounds = {what: 10 * CLOSE if what.endswith(("/state", "/weights")) else CLOSE for what in found}
        assert {what: value for what, value in found.items() if not value <= bounds[what]} == {}, f"rank {rank}"
        exact = ("round_trip", "moved/back", "taken")
        assert rank > 0 or [found[what] for what in exact] == [0.0] * 3, "weights come back bit for bit"


@needs_megatron
@pytest.mark.parametrize("name", SHORT)
def test_a_model_of_megatron_core_is_the_model_of_one_process(results, name):
    judge(results, name)


@needs_megatron
@pytest.mark.parametrize("name", ["values_tensor", "values_pipeline"])
def test_a_critic_of_megatron_core_is_the_critic_of_one_process(results, name):
    for rank, found in enumerate(results[name]):
        sizes = {what: found.pop(what) for what in list(found) if what.endswith("/largest")}
        assert all(size > 1e-3 for size in sizes.values())
        bounds = {what: 10 * CLOSE if what.endswith("/state") else CLOSE for what in found} | {"low/state": 0.05}
        assert {what: value for what, value in found.items() if not value <= bounds[what]} == {}, f"rank {rank}"
        exact = ("of_policy", "of_model", "first/loaded", "second/loaded")
        assert rank > 0 or [found[what] for what in exact] == [0.0] * 4, "weights and states travel bit for bit"


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe", "qwen2", "llama", *TWO])
def test_so_it_is_on_one_rank_and_with_states_that_travel_after_every_step(long_results, name):
    judge(long_results, name)


@needs_megatron
@pytest.mark.parametrize("count", [1, 2])
def test_so_it_is_on_gpus_with_nothing_answered_for_them(tmp_path, count):
    """Without `support.megatron_cpu`; sums of float32 come out otherwise in other kernels."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    for name, ranks in results_of_ranks(CALL, count, tmp_path / "found.json", "cuda").items():
        wrong = {what: value for what, value in ranks[0].items() if "largest" not in what and not value <= 100 * CLOSE}
        assert wrong == {}, name


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_weight_has_one_place_and_comes_back_from_it(kind, num_parts):
    model = tiny_model(32, kind=kind, hidden=16, heads=4, kv_heads=2)
    whole = model.state_dict()
    seen = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for entry in entries(model.config):
        for part in range(1 if entry.layout == "whole" else num_parts):
            split = {"part": part, "num_parts": num_parts, "num_groups": 2}
            for name in entry.sources:
                region(entry, seen[name], **split).add_(1)
            given = [region(entry, whole[name], **split) for name in entry.sources]
            held = torch.cat(given, dim=1).flatten(0, 1) if entry.layout == "qkv" else torch.cat(given)
            found = pieces(entry, held, num_groups=2 // num_parts, head_dim=4)
            assert all(torch.equal(piece, tensor) for piece, tensor in zip(found, given, strict=True)), entry.name
    times = {"model.embed_tokens.weight": 2, "lm_head.weight": 0}  # the second is the first, where a model ties them
    assert all((count == times.get(name, 1)).all() for name, count in seen.items())


@pytest.mark.parametrize(
    ("kind", "degrees", "sentence"),
    [
        ("qwen3", Degrees(tensor_parallel=3), "tensor_parallel is 3 and the model has 4 attention heads"),
        ("qwen3", Degrees(tensor_parallel=4), "tensor_parallel is 4 and the model has 2 key and value heads"),
        ("qwen3", Degrees(pipeline_parallel=3), "pipeline_parallel is 3 and the model has 2 layers"),
        ("qwen3", Degrees(expert_parallel=2), "expert_parallel is 2 and the model has 0 experts"),
        ("qwen3_moe", Degrees(expert_parallel=3), "expert_parallel is 3 and the model has 8 experts"),
        ("qwen3_moe", Degrees(pipeline_parallel=2, expert_parallel=2), "only where the latter two are equal"),
        ("mixtral", Degrees(), "the model is a mixtral, whose weights have no mapping"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(kind, degrees, sentence):
    with pytest.raises(ConfigError, match=sentence):
        require_split(tiny_model(32, kind=kind, hidden=16, heads=4, kv_heads=2).config, degrees)


@needs_megatron
@pytest.mark.parametrize(
    ("kind", "targets", "sentence"),
    [
        ("llama", ["lm_head"], "model.lora adapts lm_head and train.backend is megatron"),
        ("qwen3_moe", "all-linear", r"model.lora adapts model.layers.0.mlp.experts.* and train.backend is megatron"),
        ("qwen3", r".*layers\.0\..*q_proj", "model.lora adapts no layer of 1 of 2 stages"),
    ],
)
def test_an_adapter_that_has_no_place_there_is_refused(kind, targets, sentence):
    from polyturn.training.megatron import Megatron

    model = tiny_model(32, kind=kind)
    add_lora(model, LoraSettings(target_modules=targets))
    with pytest.raises(ConfigError, match=sentence):
        Megatron.check(model, Degrees(pipeline_parallel=2))


def test_a_config_that_the_mapping_does_not_know_is_refused():
    config = tiny_model(32, kind="llama").config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="rope_type 'yarn'"):
        require_split(config, Degrees())
