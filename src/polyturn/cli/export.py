"""`polyturn export`: a run's model as a Hugging Face folder that anything else loads.

    RUN, or one of its checkpoints  ->  config.json, weights, tokenizer, chat template

A checkpoint holds whole weights, however many ranks trained them, so most of this is a copy. An adapter is merged into its
base model, which the run's config names.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from polyturn import build
from polyturn.api.folders import open_place
from polyturn.cli.console import Output
from polyturn.core.errors import CheckpointError, ConfigError, one_line
from polyturn.tokens.codec import load_codec


def run(source: Path, *, out: Path, config: Path | None = None) -> None:
    """Write the model of `source` to the new folder `out`.

    Args:
        source: A run's folder (its latest checkpoint), a checkpoint, or a model's folder.
        out: Where it goes.
        config: The run's config, where `source` holds an adapter and its own config.yaml is not beside it.

    Raises:
        CheckpointError: there is no model in `source`, or its weights are missing or damaged.
        ConfigError: `out` is there already, or the base model of an adapter is not known.
    """
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} is there already; name a new folder, or remove it")
    model = build.model_folder(source)
    assert model is not None
    if (model / "config.json").is_file():
        _require_weights(model)
        _copy(model, out)
    else:
        _merge(model, out, config=config or _config_of(source))
    Output().fact("model", out)


def _require_weights(model: Path) -> None:
    """Refuse a folder without weights, or with some that are cut: a header says how long its file is."""
    files = [file for kind in ("safetensors", "bin") for file in sorted(model.glob(f"*.{kind}"))]
    if not files:
        raise CheckpointError(f"there are no weights in {model}")
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="np"):
                    pass
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"the weights in {file} cannot be read ({one_line(problem)})") from problem


def _copy(model: Path, out: Path) -> None:
    """Copy so that `out` is whole or not there."""
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(model, draft)
        if out.is_dir():
            out.rmdir()  # it is empty
        draft.rename(out)
    except OSError as problem:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"{model} cannot be copied to {out}: {problem}") from problem


def _merge(model: Path, out: Path, *, config: Path) -> None:
    from polyturn.training import hf
    from polyturn.training.lora import CONFIG_FILE

    place, _ = open_place(config, [])
    own = place.config.model
    # The config in a run's folder says paths as they were beside the original one; the adapter has its base as it was found.
    found = json.loads((model / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if own.path is not None and found and not (place.base / own.path).is_dir() and Path(found).is_dir():
        place = replace(place, config=place.config.model_copy(update={"model": own.model_copy(update={"path": found})}))
    tokenizer = load_codec(str(model)).tokenizer
    adapted = build.build_model(place, tokenizer, checkpoint=model)
    hf.save_model(adapted, out, tokenizer=tokenizer)


def _config_of(source: Path) -> Path:
    for folder in (source, *source.resolve().parents):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ConfigError(
        f"{source} holds an adapter, and no config.yaml above it names the base model; give the run's config with --config"
    )
