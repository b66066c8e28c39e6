"""The formulas of memory, on a published model's config."""

import json

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyturn.training.backend import Degrees
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes, server_bytes, sync_seconds
from support.models import tiny_model
from support.ranks import results_of_ranks

GB = 10**9


def qwen3_8b():
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return ModelSize.of(Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16))


def test_a_published_model_takes_what_the_formulas_say():
    size = qwen3_8b()
    held = rank_bytes(size, RankLoad(ranks=4, num_frozen=1))
    assert size.parameters == 8_190_735_360 and size.layer * 36 + size.outside == size.parameters
    assert [round(num / size.parameters * 4, 3) for num in list(held.values())[:5]] == [2, 4, 6, 8, 2]
    assert held["gathered blocks"] == 2 * (2 * size.outside + 3 * size.layer)
    assert server_bytes(size, tensor_parallel=2, tokens=1000) == {
        "weights": size.parameters,
        "KV cache": 1000 * 36 * 2 * 1024,
    }
    assert sync_seconds(size, link=50 * GB) == pytest.approx(0.3276, abs=1e-4)


def test_ranks_that_share_experts_hold_the_rest_as_often():
    size = ModelSize.of(tiny_model(64, "qwen3_moe"))
    assert size.experts == 2 * size.layer_experts == 2 * 8 * 3 * 32 * 32
    loads = [RankLoad(ranks=ranks, expert_parallel=min(ranks, 2), num_frozen=1) for ranks in (1, 2, 4)]
    alone, row, rows = (rank_bytes(size, load) for load in loads)
    of_one = size.parameters * size.element
    assert row["parameters"] == of_one - size.experts * size.element // 2 and row["frozen models"] == of_one
    assert rows["moments of AdamW"] == row["moments of AdamW"] // 2 and rows["frozen models"] == of_one // 2
    layer = size.layer - size.layer_experts // 2
    assert alone["gathered blocks"] == 0 and row["gathered blocks"] == (2 * size.outside + 3 * layer) * size.element


def test_a_row_of_megatron_splits_one_copy_and_gathers_nothing():
    size = ModelSize.of(tiny_model(64, "qwen3_moe"))
    dense, embedding = size.parameters - size.experts, 64 * size.hidden
    splits = [Degrees(), Degrees(tensor_parallel=2, expert_parallel=2), Degrees(pipeline_parallel=2)]
    alone, row, stages = (rank_bytes(size, RankLoad(ranks=8, tokens=10, num_frozen=1, megatron=split)) for split in splits)
    assert alone["parameters"] == alone["frozen models"] == size.parameters * size.element
    assert row["parameters"] == row["frozen models"] == (dense // 2 + size.experts // 2) * size.element
    layers = dense - size.outside
    assert stages["parameters"] == (layers // 2 + embedding + size.experts // 2) * size.element
    named = "activations of a micro-batch of 10 tokens"
    assert (
        alone[named] == 2 * row[named] == 2 * stages[named] == 10 * 2 * (size.kept * 6 // 5)
        and alone["logits"] == 2 * row["logits"]
    )
    assert alone["gathered blocks"] == row["gathered blocks"] == stages["gathered blocks"] == 0
    assert rank_bytes(size, RankLoad(ranks=2, megatron=splits[1])) == rank_bytes(size, RankLoad(ranks=8, megatron=splits[1]))


def test_one_rank_gathers_nothing_and_float32_has_no_masters():
    held = rank_bytes(ModelSize.of(tiny_model(64)), RankLoad())
    assert held["gathered blocks"] == held["float32 masters"] == 0 < held["gradients"] == held["parameters"]


def test_a_critic_is_a_second_model_that_is_trained():
    size = ModelSize.of(tiny_model(64))
    one, two = (rank_bytes(size, RankLoad(num_trained=num)) for num in (1, 2))
    of_models = ("parameters", "gradients", "moments of AdamW")
    assert {name for name in one if one[name] != two[name]} == set(of_models)
    assert all(two[name] == 2 * one[name] for name in of_models)


def kept_by(model, tokens):
    """Return the bytes that autograd keeps of a pass beside the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def note(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        out = model.base_model(input_ids=torch.arange(tokens)[None], use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(storage.nbytes() for at, storage in held.items() if at not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_what_is_planned_for_a_layer_is_what_autograd_keeps(kind, dtype):
    def model(layers):
        sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 384}
        return tiny_model(64, kind, layers=layers, **sizes).to(dtype).train()

    of_a_layer = (kept_by(model(3), 64) - kept_by(model(2), 64)) / 64
    assert ModelSize.of(model(2)).kept == pytest.approx(of_a_layer, rel=0.03)


def test_a_layer_that_is_computed_again_is_kept_once_and_a_gpu_has_no_heap():
    size = ModelSize.of(tiny_model(64, layers=8))
    whole, again = (rank_bytes(size, RankLoad(tokens=10, recomputes=recomputes)) for recomputes in (False, True))
    named = "activations of a micro-batch of 10 tokens"
    assert whole[named] == 10 * 8 * size.kept and again[named] == 10 * (8 * 4 * size.hidden + size.kept)
    assert whole["gaps in the heap"] == 0 < rank_bytes(size, RankLoad(tokens=10, on_gpu=False))["gaps in the heap"]


@pytest.mark.slow  # it trains a model of a quarter of a GB
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_takes_as_much_memory_as_is_planned(ranks, tmp_path):
    tiny_model(512, hidden=512, layers=20, heads=8, kv_heads=8).save_pretrained(tmp_path / "model")
    planned = results_of_ranks("support.planned_ranks:measure", ranks, tmp_path / "plan.json", str(tmp_path / "model"))
    most = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert planned["parameters"] * ranks > 200e6
    assert most == pytest.approx([sum(planned.values())] * ranks, rel=0.15), planned
