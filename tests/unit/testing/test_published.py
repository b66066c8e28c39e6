"""Published models in small: the folder is like the real one, in its config, its tokenizer's ids and its template."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import polyturn.testing
from polyturn.core.errors import ConfigError
from polyturn.testing.published import PUBLISHED, published_config, published_tokenizer, tiny
from support.refusals import refuses

REAL = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "qwen2" / "tokenizer.json"
SHORT = ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct"]


@pytest.mark.parametrize("name", SHORT)
def test_folder_loads_as_the_published_one(name: str, tmp_path: Path) -> None:
    folder = polyturn.testing.tiny(name, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == PUBLISHED[name]["model_type"]
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert model.num_parameters() < 1_000_000 and model.config.vocab_size > len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Alibaba Cloud" in (folder / "LICENSE").read_text()


def test_folder_is_made_once_and_always_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    first = tiny(SHORT[0])
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny(SHORT[0]) == first and (first / "model.safetensors").stat().st_mtime_ns == written
    again = tiny(SHORT[0], tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert tiny(SHORT[0], seed=1) != first


def test_turn_tokens_sets_the_length_of_a_turn(tmp_path: Path) -> None:
    folder = tiny(SHORT[0], tmp_path / "model", turn_tokens=10)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|im_start|>user\nHow much is it?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt").input_ids
    ends = model(ids).logits.softmax(-1)[0, :, tokenizer.eos_token_id].mean()
    assert 0.05 < ends.item() < 0.2


def test_text_survives_and_only_qwen3_has_thinking_tags() -> None:
    thinks, speaks = map(published_tokenizer, SHORT)
    text = "  17 + 25 = 42\n\n\t日本語 é 🙂 ... ####"
    for tokenizer in (thinks, speaks):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("<tool_call>")) == 1
    assert len(thinks.encode("<think>")) == 1 < len(speaks.encode("<think>"))


@pytest.mark.skipif(not REAL.is_file(), reason="Qwen's vocabulary is not beside this checkout")
def test_ids_of_text_are_qwens_own() -> None:
    vocabulary = json.loads(REAL.read_text())["model"]["vocab"]
    ours = {word: number for word, number in published_tokenizer(SHORT[0]).get_vocab().items() if number < 4096}
    assert len(ours) == 4096 and all(vocabulary[word] == number for word, number in ours.items())


def test_config_has_the_published_sizes(tmp_path: Path) -> None:
    written = json.loads((published_config("Qwen/Qwen3-8B", tmp_path) / "config.json").read_text())
    assert (written["hidden_size"], written["num_hidden_layers"], written["vocab_size"]) == (4096, 36, 151936)


def test_unknown_name_gets_the_nearest() -> None:
    refuses(lambda: tiny("Qwen/Qwen3-06B"), ConfigError, "'Qwen/Qwen3-06B'", "Qwen/Qwen3-0.6B")
