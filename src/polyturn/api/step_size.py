"""Set the size of a training step if the configuration does not: smaller on a CPU than on a GPU.

    with_step_size(loaded, resume=False)  ->  on a CPU train.groups_per_step 4, not 32; group_size 8; 128 tokens a turn
    with_step_size(loaded, resume=True)   ->  the numbers in the config.yaml of the run's folder, on any machine

The numbers are chosen once, before they are used, and written to the run's config.yaml. Only training uses this, because the
result of an evaluation must not depend on the machine.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from polyturn.config.load import Loaded
from polyturn.config.models import RunConfig
from polyturn.config.references import value_at
from polyturn.config.schema import KeyPath, dotted
from polyturn.config.sources import leaves, merge, nested
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.infra.yaml_file import read_yaml

logger = logging.getLogger(__name__)

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of NVIDIA's and AMD's drivers, and of either one's under WSL."""
ON_CPU: Mapping[KeyPath, int] = {
    ("train", "groups_per_step"): 4,
    ("train", "group_size"): 8,
    ("rollout", "limits", "max_tokens_per_turn"): 128,
}
"""Keys of a step's size -> default without a GPU."""


def with_step_size(loaded: Loaded[RunConfig], *, resume: bool | Literal["auto"]) -> Loaded[RunConfig]:
    """Return the configuration with the missing keys of a step's size filled in; a run that resumes keeps its numbers."""
    config = loaded.config
    former = _former(Path(config.out) / config.name / "config.yaml") if resume else {}
    unset = [path for path in ON_CPU if path not in loaded.written]
    if former:
        sizes = {path: value for path, value in leaves(former, ()) if path in unset}
        why = "as at the start of the run"
    elif _is_on_cpu(config):
        sizes = {path: ON_CPU[path] for path in unset}
        why = "the defaults are smaller on a CPU; set the keys to change them"
    else:
        return loaded
    sizes = {path: value for path, value in sizes.items() if value != value_at(loaded.resolved, path)}
    if not sizes:
        return loaded
    numbers = ", ".join(f"{dotted(path)} {'null' if value is None else value}" for path, value in sizes.items())
    logger.info("%s: %s", numbers, why)
    resolved = copy.deepcopy(loaded.resolved)
    for path, value in sizes.items():
        config = _replaced(config, path, value)
        merge(resolved, nested(path, value))
    return Loaded(config, resolved, loaded.written)


def _former(path: Path) -> dict[str, Any]:
    """Return the settings of an earlier run; empty if the file is missing or damaged (resuming warns about that later)."""
    try:
        return read_yaml(path) if path.is_file() else {}
    except ConfigError:
        return {}


def has_cuda() -> bool:
    """Return whether PyTorch can use a CUDA or ROCm GPU here."""
    if not any(driver.exists() for driver in DRIVERS) or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _is_on_cpu(config: RunConfig) -> bool:
    """Return whether the run trains on a CPU: no cluster, no GPUs configured for servers, and no CUDA here."""
    launch = config.engine.launch if isinstance(config.engine, ServerOptions) else None
    return config.cluster.address is None and not (launch is not None and launch.devices) and not has_cuda()


def _replaced(section: Any, path: KeyPath, value: Any) -> Any:
    """Return a section with another value at `path`."""
    key, *rest = map(str, path)
    changed = {key: _replaced(getattr(section, key), tuple(rest), value) if rest else value}
    return section.model_copy(update=changed) if isinstance(section, BaseModel) else dataclasses.replace(section, **changed)
