"""A model that megatron-core holds is the model of one process: scores, loss, gradient, step and state (float32 1e-5).

Real processes with gloo compare where the tensors are (`support/rank_matrix.py`). The mapping of weights needs no
megatron-core.
"""

import importlib.util

import pytest
import torch

from polyturn.core.errors import ConfigError
from polyturn.training.lora import add_lora
from polyturn.training.megatron.weights import entries, require_split, source_rows
from polyturn.training.options import Degrees, LoraSettings
from polyturn.training.shards import box_of
from support.models import tiny_model
from support.rank_matrix import judge, names_of
from support.ranks import results_of_ranks
from support.refusals import refuses

CLOSE = 1e-5
pytestmark = pytest.mark.timeout(900)  # processes on a busy machine
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (the extra megatron)"
)


def of_matrix(folder, ranks, *how):
    return results_of_ranks("support.rank_matrix:measure", ranks, folder / f"{ranks}.json", "megatron", *how)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return of_matrix(tmp_path_factory.mktemp("ranks"), 2, "short")


@pytest.fixture(scope="module")
def long_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {name: found for ranks in (1, 2, 4) for name, found in of_matrix(folder, ranks, "long").items()}


@needs_megatron
@pytest.mark.cluster
@pytest.mark.parametrize("name", names_of("megatron", is_short=True))
def test_megatron_trains_as_one_process(results, name):
    judge("megatron", name, results[name])


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", names_of("megatron", is_short=False))
def test_megatron_trains_as_one_process_in_other_cases(long_results, name):
    judge("megatron", name, long_results[name])


@needs_megatron
@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_trains_as_one_process_on_gpus(tmp_path, ranks):
    """Without `support.megatron_cpu`; sums of float32 come out otherwise in other kernels."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for name, found in of_matrix(tmp_path, ranks, "cuda", "short", "long").items():
        kept = {
            what: value for what, value in found[0].items() if not what.endswith(("largest", "share", "written", "calls"))
        }
        assert {what: value for what, value in kept.items() if not value <= 100 * CLOSE} == {}, name


def shape_of(entry, whole, *, num_parts):
    """The shape of a part of a weight, from those of its sources."""
    shapes = [whole[name].shape[entry.expert is not None :] for name in entry.sources]
    rows, rest = sum(shape[0] for shape in shapes), list(shapes[0][1:])
    if entry.layout == "columns":
        return [rows, rest[0] // num_parts]
    return [rows if entry.layout == "whole" else rows // num_parts, *rest]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_row_of_a_weight_has_one_source(kind, num_parts):
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
                box_of(seen[entry.sources[box.source]], box.at, size).add_(1)
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
        ("qwen3_moe", Degrees(pipeline_parallel=2, expert_parallel=2), "need the latter two to be equal"),
        (
            "qwen3_moe",
            Degrees(pipeline_parallel=2, expert_parallel=4, context_parallel=2),
            "context_parallel 2; stages with",
        ),
        ("mixtral", Degrees(), "the model is a mixtral, whose weights have no mapping"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(kind, degrees, sentence):
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
def test_adapter_of_unsupported_layers_is_refused(kind, targets, sentence):
    from polyturn.training.megatron.placement import Megatron

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
def test_degrees_that_need_a_gpu_are_refused_without_one(kind, degrees, why):
    from polyturn.training.megatron.placement import Megatron

    with pytest.raises(ConfigError, match=f"{why}, for which megatron-core needs a GPU, and there is none"):
        Megatron.of(degrees, torch.device("cpu")).policy(tiny_model(32, kind, heads=2, kv_heads=2))


def test_unknown_rope_type_is_refused():
    config = tiny_model(32, kind="llama").config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", "factor": 4.0}
    refuses(lambda: require_split(config, Degrees()), ConfigError, "'yarn'", "rope_type")
