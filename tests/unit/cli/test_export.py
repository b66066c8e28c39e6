"""Models of runs and checkpoints are exported: adapters merged, in the dtype they started from, and to the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyturn.cli.main import main
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training.checkpoint import STATE
from polyturn.training.hf import save_model
from support.models import tiny_model
from support.runs import call_command, write_tiny_run
from support.vision_run import write_vision_run


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


def test_merged_adapter_of_a_vision_model_has_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_vision_run(tmp_path)
    trained = call_command(main, "train", config, "train.steps=1", "evaluation.before=false", "model.lora.rank=2")
    assert trained.code == 0, trained.err
    (run,) = (tmp_path / "runs").iterdir()
    exported = call_command(main, "export", run, "-o", tmp_path / "merged")
    assert exported.code == 0, exported.err
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


def test_model_with_damaged_weights_is_not_exported(tmp_path: Path) -> None:
    model, out = tmp_path / "step-000001" / "model", tmp_path / "out"
    model.mkdir(parents=True)
    for damaged in ("{", "[]"):
        (model / "config.json").write_text(damaged)
        refused = call_command(main, "export", model.parent, "-o", out)
        assert refused.code == 2 and f"{model / 'config.json'}" in refused.err and "copy the model again" in refused.err
    (model / "config.json").write_text("{}")
    refused = call_command(main, "export", model.parent, "-o", out)
    assert refused.code == 2 and f"there are no weights in {model}" in refused.err
    save_file({"w": torch.zeros(8)}, model / "model.safetensors")
    (tmp_path / "config.yaml").write_text("model: one of another program\n")
    exported = call_command(main, "export", model, "-o", out)
    assert exported.code == 0 and f" {model}/\n" in exported.out, "it is no checkpoint, although its folder is called model"
    whole = (out / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-4])
    refused = call_command(main, "export", model.parent, "-o", tmp_path / "other")
    assert refused.code == 2 and "model.safetensors cannot be read (SafetensorError" in refused.err
    assert not (tmp_path / "other").exists()
    (model / "model.safetensors").write_bytes(whole)
    (model / "model.safetensors.index.json").write_text("{")
    refused = call_command(main, "export", model.parent, "-o", tmp_path / "other", "--dtype", "float16")
    assert refused.code == 2 and "model.safetensors.index.json cannot be read" in refused.err
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused = call_command(main, "export", model.parent, "-o", tmp_path / "other", "--dtype", "float16")
    assert refused.code == 2 and "--dtype converts only safetensors" in refused.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints in float32 of a model in bfloat16, the first of which is the best."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), hidden=16, layers=1)
    save_model(model.bfloat16(), tmp_path / "base", tokenizer=tokenizer)
    folder = tmp_path / "run"
    for step in (1, 2):
        save_model(model.float(), folder / "checkpoints" / f"step-00000{step}" / "model", tokenizer=tokenizer)
        (folder / "checkpoints" / f"step-00000{step}" / STATE).touch()
    (folder / "checkpoints" / "best").write_text("step-000001")
    (folder / "config.yaml").write_text(f"model: {{path: {tmp_path / 'base'}, dtype: float32}}\n")
    return folder


def kinds(model: Path) -> set[torch.dtype]:
    return {tensor.dtype for file in model.glob("*.safetensors") for tensor in load_file(file).values()}


def test_export_keeps_the_dtype_of_the_model_it_started_from(run: Path, tmp_path: Path) -> None:
    exported = call_command(main, "export", run, "-o", tmp_path / "out")
    assert exported.code == 0, exported.err
    assert kinds(tmp_path / "out") == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert call_command(main, "export", run, "-o", tmp_path / "wide", "--dtype", "float32").code == 0
    assert kinds(tmp_path / "wide") == {torch.float32}


def test_config_of_an_adapter_is_refused_for_a_whole_model(run: Path, tmp_path: Path) -> None:
    refused = call_command(main, "export", run, "-o", tmp_path / "out", "--config", run / "config.yaml")
    assert refused.code == 2 and "--config" in refused.err and not (tmp_path / "out").exists()


def test_export_fills_the_empty_working_directory(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    exported = call_command(main, "export", run, "-o", ".")
    assert exported.code == 0, exported.err
    names = {path.name for path in run.glob("checkpoints/step-000002/model/*")}
    assert {path.name for path in Path.cwd().iterdir()} == names


def test_interrupted_export_leaves_no_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: Path, dtype: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyturn.cli.export._cast", interrupted)
    before = sorted(tmp_path.iterdir())
    assert call_command(main, "export", run, "-o", tmp_path / "out").code == 130
    assert sorted(tmp_path.iterdir()) == before


def test_export_names_its_checkpoint_and_the_best(run: Path, tmp_path: Path) -> None:
    told = call_command(main, "export", run, "-o", tmp_path / "out").out
    assert "step-000002" in told and "step-000001" in told
    of_best = call_command(main, "export", run / "checkpoints" / "step-000001", "-o", tmp_path / "best")
    assert of_best.code == 0 and "step-000002" not in of_best.out


class Hub:
    """A client of the hub that uploads nothing."""

    uploads: list[tuple[str, list[str]]]
    error: Exception | None = None

    def whoami(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"name": "me"}

    def create_repo(self, name: str, *, exist_ok: bool) -> Any:
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.uploads.append((repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_export_uploads_to_the_hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "uploads", [], raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    done = call_command(main, "export", run, "-o", tmp_path / "out", "--push-to-hub", "me/mine")
    assert done.code == 0, done.err
    ((name, files),) = Hub.uploads
    assert name == "me/mine" and {"config.json", "model.safetensors"} <= set(files)


@pytest.mark.parametrize(
    ("error", "word"), [(LocalTokenNotFoundError("no token"), "HF_TOKEN"), (ConnectionError("no route"), "no route")]
)
def test_unusable_hub_is_refused_before_the_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, word: str
) -> None:
    monkeypatch.setattr(Hub, "error", error)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    refused = call_command(main, "export", run, "-o", tmp_path / "out", "--push-to-hub", "me/mine")
    assert refused.code == 2 and word in refused.err and "me/mine" in refused.err
    assert not (tmp_path / "out").exists()
