"""Models in and out of the Hugging Face format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from polyturn.core.errors import ConfigError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training.hf import (
    as_checkpoint,
    build_model,
    choose_kernels,
    count_parameters,
    load_model,
    load_unread,
    save_model,
)
from polyturn.training.part_loading import read_weights
from support.models import tiny_model
from support.refusals import refuses
from support.states import MakesFolder
from support.vision import tiny_vision_model, vision_tokenizer

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def test_seed_decides_weights_and_leaves_the_random_state():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (build_model(CONFIG, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_pickled_code_in_place_of_weights_is_refused(tmp_path):
    folder = tmp_path / "model"
    build_model(CONFIG, seed=0).config.save_pretrained(folder)
    torch.save({"w": MakesFolder(tmp_path / "ran")}, folder / "pytorch_model.bin")
    refuses(lambda: load_model(folder), ConfigError, "no model can be loaded")
    assert not (tmp_path / "ran").exists()


def test_export_is_loaded_by_transformers(tmp_path):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    folder = save_model(model, tmp_path / "run" / "model", tokenizer=tokenizer)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert type(again) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    chat = [{"role": "user", "content": "2 + 3?"}]
    assert (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat)["input_ids"]
        == tokenizer.apply_chat_template(chat)["input_ids"]
    )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), load_model(folder).parameters(), strict=True))


def test_save_replaces_the_former_one(tmp_path):
    folder = tmp_path / "model"
    save_model(tiny_model(64, seed=1), folder)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {folder.stat().st_mode & 0o666}, "as readable"
    (folder / "stale.txt").write_text("from before")
    newer = tiny_model(64, seed=2)
    save_model(newer, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not (folder / "stale.txt").exists()
    assert torch.equal(next(load_model(folder).parameters()), next(newer.parameters()))


def test_folder_without_permissions_gets_the_weights(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)  # as exFAT does
    assert load_model(save_model(tiny_model(64), tmp_path / "model")).num_parameters() > 0


def test_failed_save_keeps_the_former_one(tmp_path):
    class Full:
        def save_pretrained(self, folder: object) -> None:
            raise OSError("no space left on device")

    folder = tmp_path / "model"
    save_model(tiny_model(64), folder)
    refuses(lambda: save_model(tiny_model(64), folder, tokenizer=Full()), OSError, "no space left")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert count_parameters(load_model(folder)) == count_parameters(tiny_model(64))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no model_type"),
        ({"model_type": "qwen33"}, "no model_type 'qwen33'.*'qwen3'"),
        ({"model_type": ["qwen3"]}, "no model_type"),
        ({**CONFIG, "num_attention_heads": "two"}, "no 'qwen3' model can be built"),
        ({**CONFIG, "num_key_value_heads": 0}, "no 'qwen3' model can be built.*ZeroDivisionError"),
        ({**CONFIG, "hidden_act": "silly"}, "no 'qwen3' model can be built.*'silly'"),
        ({**CONFIG, "pad_token_id": 10**6}, "no 'qwen3' model can be built.*Padding_idx"),
    ],
)
def test_config_that_cannot_be_built_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_model(config, seed=0)


def seeing_model() -> PreTrainedModel:
    return tiny_vision_model(vision_tokenizer())


def model_of_experts() -> PreTrainedModel:
    fields = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return build_model(
        {"model_type": "qwen3_moe", "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8, **sizes, **fields}, seed=0
    )


@pytest.mark.parametrize("make", [seeing_model, model_of_experts])
def test_weights_for_servers_are_those_of_a_checkpoint(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = as_checkpoint(model, {name: value.detach() for name, value in model.state_dict().items()})
    assert sent.keys() == saved.keys() != model.state_dict().keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_weights_with_checkpoint_names_are_not_copied() -> None:
    model = tiny_model(tiny_tokenizer())
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    sent = as_checkpoint(model, weights)
    assert {name: value.data_ptr() for name, value in sent.items()}.items() <= {
        name: value.data_ptr() for name, value in weights.items()
    }.items()


def test_missing_kernels_are_refused() -> None:
    fields = {"model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    model = build_model(fields, seed=0)
    assert choose_kernels(model, attention="eager").config._attn_implementation == "eager"
    refuses(lambda: choose_kernels(model, attention="flash_attention_2"), ConfigError, "'flash_attention_2'", "set sdpa")
    refuses(lambda: choose_kernels(model, liger=True), ConfigError, "model.liger is true and ", "pip install liger-kernel")


def test_missing_damaged_or_misshapen_weights_are_refused(tmp_path: Path) -> None:
    folder = save_model(build_model(CONFIG, seed=0), tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refuses(lambda: load_model(folder), ConfigError, "SafetensorError")
    refuses(lambda: read_weights(load_unread(folder), torch.device("cpu")), ConfigError, str(folder), "SafetensorError")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(lambda: read_weights(load_unread(folder), torch.device("cpu")), ConfigError, "model-00001-of-00002")
    for broken in ('{"weight_map": {"mod', "{}", "[]", '{"weight_map": null}', '{"weight_map": {"model.norm.weight": [1]}}'):
        (folder / "model.safetensors.index.json").write_text(broken)
        refuses(lambda: load_unread(folder), ConfigError, str(folder / "model.safetensors.index.json"))
    (folder / "model.safetensors.index.json").unlink()
    refuses(lambda: load_model(tmp_path / "nowhere"), ConfigError, "nowhere")
    weights.write_bytes(whole)
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 48'))
    refuses(lambda: load_model(folder), ConfigError, "mismatch")
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": "wide"'))
    refuses(lambda: load_model(folder), ConfigError, "intermediate_size")
    config.write_text(config.read_text().replace('"intermediate_size": "wide"', '"hidden_act": "silly"'))
    refuses(lambda: load_model(folder), ConfigError, "'silly'")


def test_weights_read_in_parts_have_the_usual_types(tmp_path: Path) -> None:
    model = tiny_model(64, "deepseek_v3", hidden=16)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.normal_()
    folder = save_model(model, tmp_path / "model")
    whole, parts = (load(folder, dtype=torch.bfloat16) for load in (load_model, load_unread))
    read_weights(parts, torch.device("cpu"))
    own = parts.state_dict()
    assert {name: t.dtype for name, t in own.items()} == {name: t.dtype for name, t in whole.state_dict().items()}
    assert all(torch.equal(own[name], tensor) for name, tensor in whole.state_dict().items())


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = save_model(build_model({**CONFIG, "tie_word_embeddings": False}, seed=0), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in weights.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    refuses(lambda: load_model(folder), ConfigError, "1 are missing", "'lm_head.weight'")
    assert load_model(folder, needs_head=False).config.vocab_size, "a critic reads the backbone alone"
    save_file({"lm_head.weight": weights["lm_head.weight"]}, folder / "model.safetensors")
    for needs_head in (True, False):
        refuses(lambda needs_head=needs_head: load_model(folder, needs_head=needs_head), ConfigError, "are missing")
