"""The formulas of memory, on a published model's config."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyturn.training.memory import ModelSize, RankLoad, rank_bytes, server_bytes, sync_seconds
from support.models import tiny_model

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


def test_one_rank_gathers_nothing_and_float32_has_no_masters():
    held = rank_bytes(ModelSize.of(tiny_model(64)), RankLoad())
    assert held["gathered blocks"] == held["float32 masters"] == 0 < held["gradients"] == held["parameters"]


def test_a_critic_is_a_second_model_that_is_trained():
    size = ModelSize.of(tiny_model(64))
    one, two = (rank_bytes(size, RankLoad(num_trained=num)) for num in (1, 2))
    of_models = ("parameters", "gradients", "moments of AdamW")
    assert {name for name in one if one[name] != two[name]} == set(of_models)
    assert all(two[name] == 2 * one[name] for name in of_models)
