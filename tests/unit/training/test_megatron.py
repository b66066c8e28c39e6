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
from polyturn.training.megatron_weights import entries, require_split, source_rows
from polyturn.training.options import LoraSettings
from polyturn.training.shards import box_of
from support.megatron_ranks import SHORT
from support.models import tiny_model
from support.ranks import results_of_ranks

CALL = "support.megatron_ranks:measure"
CLOSE = 1e-5
pytestmark = pytest.mark.timeout(900)  # processes on a busy machine
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (the extra megatron)"
)
ONE = ["dense", "moe", "qwen2", "llama"]
TWO = ["tensor", "expert", "pipeline", "context", "tensor_qwen2", "lora_moe", "lora_context", *SHORT]
FOUR = [
    *("rows_of_tensor", "rows_of_stages", "rows_of_context", "context_tensor", "context_tensor_moe", "context_stages"),
    "context_of_four",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_ranks(CALL, 2, tmp_path_factory.mktemp("ranks") / "found.json")


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    every = {}
    for count in (1, 2, 4):
        every |= results_of_ranks(CALL, count, folder / f"{count}.json", "long")
    return every


def judge(results, name):
    """Names of two ranks say what is split over them; `data` shares samples alone."""
    for rank, found in enumerate(results[name]):
        sizes = {what: found.pop(what) for what in list(found) if what.endswith("/largest")}
        assert all(size > 1e-3 for size in sizes.values()), "the gradient is one that differences would show in"
        share = found.pop("read/share")
        assert share < 0.8 or not set(name.split("_")) & {"tensor", "pipeline", "expert", "stages"}, "it reads its own part"
        # AdamW divides a gradient by its own size, so that rounding of the smallest ones shows in a step.
        bounds = {what: 10 * CLOSE if what.endswith(("/state", "/weights")) else CLOSE for what in found}
        assert {what: value for what, value in found.items() if not value <= bounds[what]} == {}, f"rank {rank}"
        exact = ("round_trip", "read", "moved/back", "taken")
        assert rank > 0 or [found[what] for what in exact] == [0.0] * 4, "weights come back bit for bit"


@needs_megatron
@pytest.mark.parametrize("name", SHORT)
def test_a_model_of_megatron_core_is_the_model_of_one_process(results, name):
    judge(results, name)


@needs_megatron
@pytest.mark.parametrize("name", ["values_tensor", "values_pipeline", "values_context"])
def test_a_critic_of_megatron_core_is_the_critic_of_one_process(results, name):
    judge_values(results, name)


def judge_values(results, name):
    for rank, found in enumerate(results[name]):
        sizes = {what: found.pop(what) for what in list(found) if what.endswith("/largest")}
        assert all(size > 1e-3 for size in sizes.values())
        bounds = {what: 10 * CLOSE if what.endswith("/state") else CLOSE for what in found} | {"low/state": 0.05}
        assert {what: value for what, value in found.items() if not value <= bounds[what]} == {}, f"rank {rank}"
        exact = ("of_policy", "of_model", "first/loaded", "second/loaded")
        assert rank > 0 or [found[what] for what in exact] == [0.0] * 4, "weights and states travel bit for bit"


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE, *TWO, *FOUR])
def test_so_it_is_on_one_rank_and_on_four_and_with_states_that_travel_after_every_step(long_results, name):
    judge(long_results, name)


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", ["values_context_tensor", "values_context_stages"])
def test_so_is_a_critic_on_four_ranks(long_results, name):
    judge_values(long_results, name)


@needs_megatron
@pytest.mark.parametrize("count", [1, 2])
def test_so_it_is_on_gpus_with_nothing_answered_for_them(tmp_path, count):
    """Without `support.megatron_cpu`; sums of float32 come out otherwise in other kernels."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    for name, ranks in results_of_ranks(CALL, count, tmp_path / "found.json", "cuda").items():
        wrong = {what: value for what, value in ranks[0].items() if "largest" not in what and not value <= 100 * CLOSE}
        assert wrong == {}, name


def shape_of(entry, whole, *, num_parts):
    """The shape of a part of a weight, from those of its sources."""
    shapes = [whole[name].shape[entry.expert is not None :] for name in entry.sources]
    rows, rest = sum(shape[0] for shape in shapes), list(shapes[0][1:])
    if entry.layout == "columns":
        return [rows, rest[0] // num_parts]
    return [rows if entry.layout == "whole" else rows // num_parts, *rest]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_row_of_a_weight_has_one_place_in_the_tensors_that_it_is_made_of(kind, num_parts):
    model = tiny_model(32, kind=kind, hidden=16, heads=4, kv_heads=2)
    whole = model.state_dict()
    seen = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for entry in entries(model.config):
        for part in range(1 if entry.layout == "whole" else num_parts):
            shape = shape_of(entry, whole, num_parts=num_parts)
            found = source_rows(entry, shape, part=part, num_groups=2 // num_parts, head_dim=4)
            rows = [row for box in found for row in range(box.rows.start, box.rows.stop)]
            assert rows == list(range(shape[0])), "each row has a place, in order"
            for box in found:
                size = (1,) * (entry.expert is not None) + (box.rows.stop - box.rows.start, *shape[1:])
                box_of(seen[entry.sources[box.source]], box.place, size).add_(1)
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
        (
            "qwen3_moe",
            Degrees(pipeline_parallel=2, expert_parallel=4, context_parallel=2),
            "context_parallel 2; stages with",
        ),
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
        (
            "qwen3_moe",
            ["gate_proj", "up_proj", "down_proj"],
            r"model.lora adapts model.layers.0.mlp.experts.* and train.backend is megatron",
        ),
        ("qwen3", r".*layers\.0\..*q_proj", "model.lora adapts no layer of 1 of 2 stages"),
    ],
)
def test_an_adapter_that_has_no_place_there_is_refused(kind, targets, sentence):
    from polyturn.training.megatron import Megatron

    model = tiny_model(32, kind=kind)
    add_lora(model, LoraSettings(target_modules=targets))
    with pytest.raises(ConfigError, match=sentence):
        Megatron.check(model, Degrees(pipeline_parallel=2))


@needs_megatron
@pytest.mark.parametrize(
    ("kind", "degrees", "why"),
    [
        ("qwen3", Degrees(tensor_parallel=2), "train.distributed.tensor_parallel is 2"),
        ("qwen3", Degrees(pipeline_parallel=2), "train.distributed.pipeline_parallel is 2"),
        ("qwen3_moe", Degrees(), "the model has experts"),
    ],
)
def test_what_asks_for_a_gpu_is_refused_where_there_is_none(kind, degrees, why):
    from polyturn.training.megatron import Megatron

    with pytest.raises(ConfigError, match=f"{why} and there is no GPU"):
        Megatron.of(degrees, torch.device("cpu")).policy(tiny_model(32, kind, heads=2, kv_heads=2))


def test_a_config_that_the_mapping_does_not_know_is_refused():
    config = tiny_model(32, kind="llama").config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="rope_type 'yarn'"):
        require_split(config, Degrees())
