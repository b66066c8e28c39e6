"""`polyturn export`: write a run's model as a Hugging Face folder.

    RUN, or one of its checkpoints  ->  config.json, weights, tokenizer, chat template

A checkpoint contains whole weights for any number of ranks, so they are copied. An adapter is merged into its base model,
which the run's config names.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from safetensors import SafetensorError, safe_open

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.build.model import build_media
from polyturn.cli.arguments import declare, new_folder
from polyturn.cli.console import Output, command
from polyturn.config.load import base_of
from polyturn.core.errors import CheckpointError, ConfigError, one_line
from polyturn.infra.model_json import read_model_json
from polyturn.infra.yaml_file import read_yaml
from polyturn.tokens.codec import load_codec
from polyturn.training.checkpoint import MODEL, STATE, Checkpoints

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DTYPES = ("float32", "bfloat16", "float16")


@declare("export")
def main(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL", help="Folder of a run (its latest checkpoint), of a checkpoint or of a model."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", callback=new_folder, help="The new folder, in Hugging Face format.")],
    config: Annotated[Path | None, typer.Option(help="The run's config, for an adapter outside its run's folder.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; by default the original model's."),
    ] = None,
    push_to: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="USER/MODEL", help="Also upload it to the Hugging Face hub.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face folder. Weights, tokenizer and chat template; an adapter is merged."""
    draft = (out if out.is_dir() else out.parent) / f".{out.absolute().name}.draft"  # `out` has a whole model or none
    if out.exists() and any(path != draft for path in (out.iterdir() if out.is_dir() else [out])):
        raise ConfigError(f"{out} already exists; choose a new folder, or remove it")
    model = build.model_folder(source)
    assert model is not None
    hub = None if push_to is None else _sign_in(push_to)
    is_whole = (model / "config.json").is_file()
    if is_whole:
        if config is not None:
            raise ConfigError(f"--config names an adapter's base model, and {model} is a whole model; remove --config")
        for file in (model / "config.json", *model.glob("*.index.json")):
            read_model_json(file)
        _require_weights(model)
        if dtype is not None and not any(model.glob("*.safetensors")):
            raise ConfigError(f"--dtype converts only safetensors files, and {model} has none; remove --dtype")
    kept = dtype or _dtype_of_origin(source)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        if is_whole:
            shutil.copytree(model, draft)
        else:
            _merge(model, draft, config=config or _config_of(source))
        if kept is not None:
            _cast(draft, kept)
        if out.is_dir():  # it may be the working directory or a mounted disk, so it stays
            for path in draft.iterdir():
                path.rename(out / path.name)
        else:
            draft.rename(out)
    except OSError as problem:
        raise CheckpointError(f"{model} cannot be written to {out}: {problem}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console = Output()
    console.fact("model", f"{out} ({_dtype_of(out) or 'of several dtypes'})")
    console.fact("from", model.parent if (model.parent / STATE).is_file() else model)
    best = Checkpoints(source / "checkpoints").best()
    if best is not None and (best / MODEL).is_dir() and best / MODEL != model:
        console.fact("best", f"another checkpoint did better in evaluation: {command('export', best, '-o', f'{out}-best')}")
    if hub is not None and push_to is not None:
        console.fact("on the hub", _push(hub, out, push_to))


def _sign_in(name: str) -> HfApi:
    """Sign in and return the hub's client, before any file is written.

    Raises:
        ConfigError: there is no token, the token is invalid, or the hub cannot be reached.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    with _hub_errors(name):
        hub.whoami()
    return hub


def _push(hub: HfApi, folder: Path, name: str) -> str:
    with _hub_errors(name):
        repo = hub.create_repo(name, exist_ok=True)
        hub.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Upload model trained with polyturn")
    return str(repo)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # the client that this release uses: httpx or httpx2

    where = f"--push-to-hub {name}"
    try:
        yield
    except LocalTokenNotFoundError as problem:
        raise ConfigError(f"{where}: no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN") from problem
    except HFValidationError as problem:
        raise ConfigError(f"{where}: this is not a repository's name; write USER/MODEL ({one_line(problem)})") from problem
    except HfHubHTTPError as problem:
        raise ConfigError(f"{where}: the hub refused it ({one_line(problem)}); check the name and the token") from problem
    except (OfflineModeIsEnabled, OSError, httpx.HTTPError) as problem:
        raise ConfigError(f"{where}: the hub cannot be reached ({one_line(problem)})") from problem


def _dtype_of_origin(source: Path) -> str | None:
    """Return the dtype of the model that the run of `source` started from; None if unknown."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path, base = _config_of(source), base_of(_config_of(source))
        section = read_yaml(path).get("model")
    except ConfigError:  # a folder outside a run
        return None
    origin = section.get("path") if isinstance(section, dict) else None  # the file may be another program's
    if not isinstance(origin, str):
        return None
    folder = base / origin
    if folder.is_dir():
        return _dtype_of(folder)
    try:
        cached = try_to_load_from_cache(origin, "config.json")
    except HFValidationError:  # a model object from a program
        return None
    return _dtype_of(Path(cached).parent) if isinstance(cached, str) else None


def _dtype_of(model: Path) -> str | None:
    """Return the dtype in a model's config; None without one."""
    if not (model / "config.json").is_file():
        return None
    about = read_model_json(model / "config.json")
    dtype = about.get("dtype") or about.get("torch_dtype")
    return dtype if isinstance(dtype, str) and dtype in DTYPES else None


def _cast(model: Path, dtype: str) -> None:
    """Convert the weights of a folder to a floating dtype, file by file."""
    import torch
    from safetensors.torch import load_file, save_file

    wanted, num_bytes, is_changed = getattr(torch, dtype), 0, False
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        cast = {name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()}
        num_bytes += sum(t.numel() * t.element_size() for t in cast.values())
        if any(cast[name].dtype != t.dtype for name, t in tensors.items()):
            is_changed = True
            draft = file.with_suffix(".draft")  # the loaded tensors are memory-mapped from the file
            save_file(cast, draft, metadata={"format": "pt"})
            draft.replace(file)
    if not is_changed:
        return
    index = model / "model.safetensors.index.json"
    if index.is_file():
        about = read_model_json(index)
        about["metadata"] = {**about.get("metadata", {}), "total_size": num_bytes}
        index.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    config = model / "config.json"
    about = read_model_json(config)
    config.write_text(json.dumps({**about, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _require_weights(model: Path) -> None:
    """Raise for a folder without weights, or with truncated files: opening one compares the lengths in its header."""
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


def _merge(model: Path, out: Path, *, config: Path) -> None:
    from polyturn.training import hf
    from polyturn.training.lora import CONFIG_FILE

    source, _ = open_source(config, [])
    own = source.config.model
    # Paths in a run's config are relative to the original config; the adapter has the resolved path of its base model.
    base = read_model_json(model / CONFIG_FILE).get("base_model_name_or_path")
    if own.path is not None and base and not (source.base / str(own.path)).is_dir() and Path(base).is_dir():
        source = replace(source, config=source.config.model_copy(update={"model": own.model_copy(update={"path": base})}))
    codec = load_codec(str(model))
    adapted = build.build_model(source, codec.tokenizer, checkpoint=model)
    media = build_media(source, codec, adapted)
    hf.save_model(adapted, out, tokenizer=codec.tokenizer, processor=None if media is None else media.processor)


def _config_of(source: Path) -> Path:
    for folder in (source, *source.resolve().parents):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ConfigError(
        f"{source} contains an adapter, and no config.yaml above it names the base model; give the run's config with "
        "--config"
    )
