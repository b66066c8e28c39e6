"""The formulas of memory, on a published model's config."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from polyturn.engines.weights.stream import BUCKET_BYTES
from polyturn.training.memory import ModelSize, RankLoad, rank_bytes, server_bytes, shared_bytes, sync_seconds
from polyturn.training.options import Degrees
from support.models import tiny_model
from support.ranks import results_of_ranks

GB = 10**9
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


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


def test_published_model_takes_what_the_formulas_say():
    size = qwen3_8b()
    held = rank_bytes(size, RankLoad(ranks=4, num_frozen=1))
    assert size.parameters == 8_190_735_360 and size.layer * 36 + size.outside == size.parameters
    assert [round(num / size.parameters * 4, 3) for num in list(held.values())[:5]] == [2, 4, 6, 8, 2]
    assert held["gathered blocks"] == 2 * (2 * size.outside + 3 * size.layer)
    assert server_bytes(size, tensor_parallel=2, tokens=1000) == {
        "weights": size.parameters,
        "KV cache": 1000 * 36 * 2 * 1024,
    }
    assert server_bytes(size, tensor_parallel=16, tokens=1000)["KV cache"] == 1000 * 36 * 2 * 2 * 128, "one of 8 heads"
    assert sync_seconds(size, link=50 * GB) == pytest.approx(0.3276, abs=1e-4)
    small = dataclasses.replace(size, trained=size.parameters // 200)
    assert sync_seconds(small, link=50 * GB, adapter_only=True) == pytest.approx(0.3276 / 200, abs=1e-6)


def test_latent_attention_caches_one_latent_a_token():
    model, tokens = tiny_model(64, "deepseek_v3"), 10
    cache = model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=True).past_key_values
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    size = ModelSize.of(model)
    assert [server_bytes(size, tensor_parallel=n, tokens=tokens)["KV cache"] for n in (1, 4)] == [cached, cached]


def test_vllm_caches_whole_heads_of_minicpm3():
    """Of its attention, with values padded to the width of keys; SGLang and transformers cache the latent."""
    model = tiny_model(64, "minicpm3", heads=4)
    plain, vllm = (ModelSize.of(model, engine=engine) for engine in ("sglang", "vllm"))
    heads = 2 * 4 * (model.config.qk_nope_head_dim + model.config.qk_rope_head_dim)
    assert (vllm.cached, vllm.kv_heads) == (heads, 4) and plain.cached < heads and plain.kv_heads == 1
    deepseek = tiny_model(64, "deepseek_v3")
    assert ModelSize.of(deepseek, engine="vllm") == ModelSize.of(deepseek, engine="sglang")


def test_rank_gathers_whole_keys_and_values_of_a_latent():
    model, seen = tiny_model(64, "deepseek_v3", heads=4), []

    def attend(module, query, key, value, *args, **kwargs):
        seen.append(key.shape[1] * key.shape[3] + value.shape[1] * value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("measured", attend)
    model.set_attn_implementation("measured")
    model(input_ids=torch.zeros((1, 3), dtype=torch.long))
    assert set(seen) == {ModelSize.of(model).kv_width}


def test_shared_gpu_holds_server_and_rank_in_phases():
    size, load = qwen3_8b(), RankLoad(ranks=8, num_frozen=1, tokens=1000)
    phases = shared_bytes(size, load, tensor_parallel=2, tokens=1000)
    in_all = {phase: sum(held.values()) for phase, held in phases.items()}
    bf16, state = 2 * size.parameters, (2 + 4 + 8 + 2) * size.parameters // 8
    assert in_all["in rollout"] == bf16 // 2 + state + 1000 * 36 * 2 * 1024
    gathered = 2 * (2 * size.outside + 3 * size.layer)
    assert in_all["as weights arrive"] == bf16 // 2 + state + gathered + bf16 // 8 + 2 * BUCKET_BYTES
    assert phases["in an update"] == rank_bytes(size, load)


def test_ranks_that_spread_experts_gather_their_share():
    size = ModelSize.of(tiny_model(64, "qwen3_moe"))
    assert size.experts == 2 * size.layer_experts == 2 * 8 * 3 * 32 * 32
    sharded, spread = (
        rank_bytes(size, RankLoad(ranks=4, expert_parallel=parts, keeps_whole_gradient=True)) for parts in (1, 2)
    )
    others = size.experts // 2
    less = {"gathered blocks": 3 * others // 2 * size.element, "whole gradient until the last micro-batch": 4 * others}
    assert {name: sharded[name] - num for name, num in spread.items() if num != sharded[name]} == less


def test_ranks_that_split_tokens_share_activations():
    size = ModelSize.of(tiny_model(64))
    alone, row = (rank_bytes(size, RankLoad(ranks=4, tokens=100, context_parallel=parts)) for parts in (1, 2))
    named, keys_and_values = "activations of a micro-batch of 100 tokens", size.kv_width * size.element * size.num_layers
    assert row[named] == alone[named] // 2 + 50 * keys_and_values and row["logits"] == alone["logits"] // 2
    assert {name for name in alone if alone[name] != row[name]} == {named, "logits"}
    splits = [Degrees(tensor_parallel=2, context_parallel=parts) for parts in (1, 2)]
    loads = [RankLoad(ranks=4, tokens=100, context_parallel=one.context_parallel, megatron=one) for one in splits]
    alone, row = (rank_bytes(size, load) for load in loads)  # in a row of Megatron, each rank has its share of the heads
    assert row[named] == alone[named] // 2 + 25 * keys_and_values and row["parameters"] == alone["parameters"]


def test_row_of_megatron_splits_one_copy():
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
        alone[named] == 2 * row[named] == 2 * stages[named] == 10 * 2 * (size.kept * 5 // 4)
        and alone["logits"] == 2 * row["logits"]
    )
    assert alone["gathered blocks"] == row["gathered blocks"] == stages["gathered blocks"] == 0
    one, four = (rank_bytes(size, RankLoad(ranks=ranks, megatron=splits[1])) for ranks in (2, 8))
    assert four == one | {"moments of AdamW": one["moments of AdamW"] // 4}, "which rows share"


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


BOTH = ("qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_moe", "minicpm3")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in BOTH for dtype in (torch.float32, torch.bfloat16)),
        ("deepseek_v3", torch.float32),  # in bfloat16, the router's float32 input is a tenth of so narrow a layer
    ],
)
def test_planned_activations_are_what_autograd_keeps(kind, dtype):
    def model(layers):
        sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 384}
        return tiny_model(64, kind, layers=layers, **sizes).to(dtype).train()

    of_a_layer = (kept_by(model(3), 64) - kept_by(model(2), 64)) / 64
    assert ModelSize.of(model(2)).kept == pytest.approx(of_a_layer, rel=0.03)


def test_recomputed_layer_is_kept_once():
    size = ModelSize.of(tiny_model(64, layers=8))
    whole, again = (rank_bytes(size, RankLoad(tokens=10, recomputes=recomputes)) for recomputes in (False, True))
    named = "activations of a micro-batch of 10 tokens"
    assert whole[named] == 10 * 8 * size.kept and again[named] == 10 * (8 * 4 * size.hidden + size.kept)
    kept = "freed memory that the allocator keeps"
    assert whole[kept] == 0 < rank_bytes(size, RankLoad(tokens=10, on_gpu=False))[kept]


@pytest.mark.slow  # it trains a model of a quarter of a GB
@pytest.mark.parametrize(
    ("ranks", "megatron"),
    [
        (1, []),
        (2, []),
        pytest.param(1, ["1"], marks=needs_megatron),
        pytest.param(2, ["1"], marks=needs_megatron),
        pytest.param(2, ["2"], marks=needs_megatron),
    ],
)
def test_process_takes_as_much_memory_as_planned(ranks, megatron, tmp_path):
    """Under `megatron` with so many ranks to a row: alone, two that share masters and moments, and two that split all."""
    tiny_model(512, hidden=512, layers=20, heads=8, kv_heads=8).save_pretrained(tmp_path / "model")
    given = (str(tmp_path / "model"), *megatron)
    planned = results_of_ranks("support.planned_ranks:measure", ranks, tmp_path / "plan.json", *given)
    most = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert planned["parameters"] * ranks > 200e6
    assert most == pytest.approx([sum(planned.values())] * ranks, rel=0.15), planned


def test_plan_counts_the_whole_gradient_of_a_late_sum():
    size = ModelSize.of(tiny_model(48))
    each, last = (rank_bytes(size, RankLoad(ranks=4, keeps_whole_gradient=keeps)) for keeps in (False, True))
    assert sum(last.values()) - sum(each.values()) == 4 * size.trained
