"""An adapter in a run's folder is exported, merged, whatever paths its config says: they were beside the original one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyturn.cli.main import main
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training.hf import save_model
from support.models import tiny_model
from support.runs import call_command, write_tiny_run


def test_adapter_over_a_relative_model_path_is_merged(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path)
    tokenizer = tiny_tokenizer()
    save_model(tiny_model(len(tokenizer), hidden=16, layers=1), tmp_path / "base", tokenizer=tokenizer)
    text = config.read_text()
    start, end = text.index("model:"), text.index("data:")
    config.write_text(f"{text[:start]}model: {{path: base, lora: {{rank: 2}}}}\n{text[end:]}")
    assert call_command(main, "train", config, "train.steps=1", "evaluation.before=false", "train.optim.lr=1e-2").code == 0
    exported = call_command(main, "export", tmp_path / "runs" / "tiny", "-o", tmp_path / "merged")
    assert exported.code == 0, exported.err
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("base", "merged"))
    assert base.keys() == merged.keys()
    changed = [name for name, tensor in base.items() if not torch.equal(tensor, merged[name])]
    assert changed and all("proj" in name for name in changed)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_model_with_damaged_weights_is_not_exported(tmp_path: Path) -> None:
    model, out = tmp_path / "step-000001" / "model", tmp_path / "out"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    refused = call_command(main, "export", model.parent, "-o", out)
    assert refused.code == 2 and f"there are no weights in {model}" in refused.err
    save_file({"w": torch.zeros(8)}, model / "model.safetensors")
    assert call_command(main, "export", model.parent, "-o", out).code == 0
    whole = (out / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-4])
    refused = call_command(main, "export", model.parent, "-o", tmp_path / "other")
    assert refused.code == 2 and "model.safetensors cannot be read (SafetensorError" in refused.err
    assert not (tmp_path / "other").exists()
