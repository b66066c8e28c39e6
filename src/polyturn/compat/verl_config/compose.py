"""Composes a tree of verl's keys with Hydra, and records which file or override wrote which key.

    compose_file(Path("gsm8k_multiturn_grpo.yaml"), ["data.train_batch_size=4", "rollout@actor_rollout_ref.rollout=mine"])
      ->  Composed(values={"data": {...}, ...}, origin={"data.train_batch_size": "from the override …", ...})

`ppo_trainer` and its groups come from the checkout of verl around the working directory, or else from the shipped base. Two
things differ from Hydra. An override may set a key that the tree lacks, with or without `+`, because the table of keys
decides which keys exist. And a config that does not name `ppo_trainer` is still based on it.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyturn.compat.verl_config.overrides import BOOLEAN_SECTIONS, Override, refuse_backend
from polyturn.compat.verl_config.table import is_of_verl, table
from polyturn.config.load import warn_of_repeated
from polyturn.config.translate.tree import Composed, Unresolved, leaves
from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.yaml_file import check_config_file, read_yaml

logger = logging.getLogger(__name__)

BASE = Path(__file__).parent / "base"
"""The tree that is used if the working directory is not in a checkout of verl."""
BASE_NAME = "ppo_trainer"
BASE_NAMES = (BASE_NAME, "ppo_megatron_trainer")
OF_VERL = Path("verl", "trainer", "config")
"""The tree's folder in a checkout of verl."""
MAX_NAME = 200
"""Largest number of characters of a file's name; file systems allow about 250."""


def compose_file(path: Path, overrides: Sequence[str] = ()) -> Composed:
    """Compose the config in the file `path`.

    Raises:
        ConfigError: a file is missing or damaged, or an override cannot be read.
    """
    check_config_file(path)
    if path.suffix != ".yaml":
        raise ConfigError(f"the config {str(path)!r} must be called {path.stem}.yaml: Hydra reads no other files")
    return _composed(path, overrides)


def compose_name(name: str, *, folder: Path | None, overrides: Sequence[str] = (), more: Sequence[Path] = ()) -> Composed:
    """Compose the config that `--config-name` names.

    Args:
        name: The config's name, with or without `.yaml`.
        folder: The folder of `--config-path`; None uses verl's own.
        overrides: The overrides of the command line.
        more: Folders of `--config-dir`.

    Raises:
        ConfigError: the config does not exist, or cannot be read.
    """
    refuse_backend(name, what="the config")
    file = f"{name.removesuffix('.yaml')}.yaml"
    folders = [folder or base_folder(), *more]
    path = next((f for f in folders if len(file) < MAX_NAME and "\0" not in file and (f / file).is_file()), None)
    if path is None and file.removesuffix(".yaml") in BASE_NAMES:
        path = base_folder()
    if path is None:
        if folder is None and not more:
            known = [*(p.stem for p in base_folder().glob("*.yaml")), *BASE_NAMES]
            raise ConfigError(f"verl has no config {name!r}; name its folder with --config-path.{did_you_mean(name, known)}")
        return compose_file(folders[-1] / file, overrides)
    return _composed(path / file, overrides, more=more)


def base_folder() -> Path:
    """Return the folder of `ppo_trainer`: in the checkout of verl around the working directory or on Python's path, else
    the shipped one."""
    here = Path.cwd()
    trees = (folder / OF_VERL for folder in (here, *here.parents, *map(Path, sys.path)))
    return next((tree for tree in trees if (tree / f"{BASE_NAME}.yaml").is_file()), BASE)


# --- one composition ----------------------------------------------------------------------------------------------------


def _composed(path: Path, overrides: Sequence[str], *, more: Sequence[Path] = ()) -> Composed:
    """Compose the config at `path`; groups are searched next to it, in `more`, in its search path, and in verl's tree."""
    _require_hydra()
    base = base_folder()
    is_base = path.parent == base
    own: dict[str, Any] = {} if is_base else _spelled_out(read_yaml(path))
    refuse_backend(str(own.get("defaults", "")), what=f"{path}: defaults names {own.get('defaults')!r:.200}")
    warn_of_repeated(overrides)
    changes = [Override.parse(text) for text in overrides]
    folders = [path.parent, *more, *_search_path(own, changes), base]
    for change in changes:
        change.find_group(folders)
    groups = [c for c in changes if c.is_group]
    hydra = _Hydra(path, folders=folders)
    if is_base:
        tree = hydra.compose({"defaults": [path.stem, "_self_"]}, groups) if groups else _verls_own(base, path.stem)
        parts = hydra.parts if groups else []
    else:
        tree, parts = hydra.compose(own, groups), hydra.parts
        if {path.stem, *(part.config_path for part in parts)}.isdisjoint(BASE_NAMES):
            below = _verls_own(base, BASE_NAME)
            below.merge_with(tree)
            tree = below
    for part in parts:
        refuse_backend(part.config_path, what=f"{path}: its part {part.config_path!r}")
    origin = _origin(parts, None if is_base else path, own, folders)
    for change in changes:
        if change.key.startswith(("hydra.", "hydra/")):
            origin[change.key.replace("/", ".")] = f"from the override {change.text!r}"
        elif not change.is_group:
            change.apply(tree, origin)
    values = _resolved(tree)
    if base != BASE:  # a checkout's tree may have been changed
        keys = [".".join(path) for path, _ in leaves(values)]
        if strange := [key for key in keys if key not in origin and not is_of_verl(key)]:
            logger.warning("%s: no release of verl has %s; check that none is misspelt", base, ", ".join(strange))
    about_hydra = _about_hydra(own, changes)
    return Composed(values={**values, "hydra": about_hydra} if about_hydra else values, origin=origin)


def _about_hydra(own: Mapping[str, Any], changes: Sequence[Override]) -> dict[str, Any]:
    """Return the arguments of Hydra itself, without its search path."""
    section = own.get("hydra")
    settings = dict(section) if isinstance(section, Mapping) else {}
    settings |= {c.key.removeprefix("hydra")[1:]: c.value for c in changes if c.key.startswith(("hydra.", "hydra/"))}
    return {key: value for key, value in settings.items() if key != "searchpath"}


def _verls_own(base: Path, name: str) -> DictConfig:
    """Return a config of verl's own tree by its name."""
    return copy.deepcopy(_shipped()) if (base, name) == (BASE, BASE_NAME) else _fresh(base, name)


@functools.cache
def _shipped() -> DictConfig:
    """Return the shipped tree; it is cached, because it never changes."""
    return _fresh(BASE, BASE_NAME)


def _fresh(base: Path, name: str) -> DictConfig:
    return _Hydra(base / f"{name}.yaml", folders=[base]).compose({"defaults": [name, "_self_"]}, [])


class _Hydra:
    """Runs Hydra on a copy of one config, to control its search path, and turns its errors into ConfigErrors."""

    def __init__(self, path: Path, *, folders: Sequence[Path]) -> None:
        self._path = path
        self._folders = folders
        self._search = [f"file://{folder.absolute()}" for folder in folders]
        self.parts: list[Any] = []
        """The files of the last composed tree, in order of increasing precedence."""

    def compose(self, top: Mapping[str, Any], groups: Sequence[Override]) -> DictConfig:
        """Return the tree of the config `top` with the files selected by `groups`."""
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        name = "config" if top.get("defaults") == [self._path.stem, "_self_"] else self._path.stem
        text = OmegaConf.to_yaml(OmegaConf.create({**top, "hydra": {"searchpath": self._search}}))
        chosen = [g.text for g in groups]
        with tempfile.TemporaryDirectory(prefix="polyturn-") as folder, self._as_config_errors():
            (Path(folder) / f"{name}.yaml").write_text(text, encoding="utf-8")
            with initialize_config_dir(folder, version_base=None):
                tree = compose(name, chosen)
                loader = GlobalHydra.instance().config_loader()
                self.parts = list(loader.compute_defaults_list(name, chosen, RunMode.RUN).defaults)
        OmegaConf.set_struct(tree, False)
        return tree

    @contextmanager
    def _as_config_errors(self) -> Iterator[None]:
        from hydra.errors import HydraException, MissingConfigException

        wrong = (HydraException, OmegaConfBaseException, OSError, LookupError, AttributeError, TypeError, ValueError)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the default position of `_self_`
            try:
                yield
            except yaml.MarkedYAMLError as error:
                mark = error.problem_mark
                where = "a part of it" if mark is None else f"{mark.name} line {mark.line + 1}"
                raise ConfigError(f"{self._path}: {where} is not YAML ({error.problem}); correct it") from error
            except RecursionError:
                raise ConfigError(f"{self._path}: its `defaults` form a circle, or it is nested too deep") from None
            except MissingConfigException as error:
                reason, searched = str(error).partition("\n")[0].rstrip("."), ", ".join(map(str, self._folders))
                known = error.options or [BASE_NAME, *(p.stem for f in self._folders for p in f.glob("*.yaml"))]
                near = did_you_mean(str(error.missing_cfg_file or "").rpartition("/")[2], known)
                raise ConfigError(f"{self._path}: {reason} in {searched}.{near}") from error
            except wrong as error:
                raise ConfigError(f"{self._path}: Hydra cannot compose it: {' '.join(str(error).split()):.400}") from error


def _require_hydra() -> None:
    """Check that Hydra is installed.

    Raises:
        ConfigError: Hydra is missing.
    """
    if importlib.util.find_spec("hydra") is None:
        raise ConfigError(
            "configs in verl's keys are composed by Hydra, which is not installed: pip install 'polyturn[verl]'"
        )


def _search_path(own: Mapping[str, Any], changes: Sequence[Override]) -> list[Path]:
    """Return the folders of `hydra.searchpath`, which may name modules; verl's tree is always searched."""
    section = own.get("hydra")
    names = section.get("searchpath") if isinstance(section, Mapping) else None
    for change in changes:
        if change.key == "hydra.searchpath":
            names = change.value
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise ConfigError(f"hydra.searchpath is {names!r:.200}; it must be a list of file://FOLDER and pkg://MODULE")
    folders: list[Path] = []
    for name in map(str, OmegaConf.create(names or [])):
        existing = [folder for folder in _folders_of(name) if folder.is_dir()]
        if not existing and not name.startswith("pkg://verl.") and not name.endswith(OF_VERL.as_posix()):
            logger.warning("hydra.searchpath names %s, which does not exist", name)
        folders += existing
    return folders


def _folders_of(location: str) -> list[Path]:
    """Return the folders of file://FOLDER, FOLDER or pkg://MODULE."""
    if not location.startswith("pkg://"):
        return [Path(os.path.expanduser(location.removeprefix("file://")))]
    if location.startswith("pkg://verl."):
        return []
    try:
        spec = importlib.util.find_spec(location.removeprefix("pkg://").replace("/", "."))
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _origin(parts: Sequence[Any], path: Path | None, own: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, str]:
    """Return key -> the file that wrote it, without keys from verl's own tree."""
    origin: dict[str, str] = {}
    for part in parts:
        is_top = path is not None and part.config_path == path.stem
        name = os.path.normpath(f"{part.config_path}.yaml")
        folder = next((f for f in folders if (f / name).is_file()), None)
        if part.config_path.startswith("hydra/") or folder is None or _is_of_verl(folder):
            continue
        values = own if is_top else read_yaml(folder / name)
        inside = [] if part.package in (None, "", "_global_") else part.package.split(".")
        for key, value in values.items():
            if key not in ("defaults", "hydra"):
                origin |= {".".join(at): f"in {folder / name}" for at, _ in leaves(value, (*inside, str(key)))}
    return origin


def _is_of_verl(folder: Path) -> bool:
    return folder == BASE or folder.absolute().as_posix().endswith(OF_VERL.as_posix())


def _spelled_out(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `values` with bare booleans of sections replaced by their key, and without empty sections."""
    spelled: dict[str, Any] = {}
    for name, value in values.items():
        key = ".".join((*path, str(name)))
        if isinstance(value, bool) and key in BOOLEAN_SECTIONS:
            value = {BOOLEAN_SECTIONS[key].rpartition(".")[2]: value}
        if value is None and table().goes_deeper(key):
            continue  # `section:` without keys, for example because they are commented out
        spelled[str(name)] = _spelled_out(value, (*path, str(name))) if isinstance(value, Mapping) else value
    return spelled


def _resolved(tree: DictConfig) -> dict[str, Any]:
    """Return a tree as plain data; expressions that cannot be resolved become `Unresolved`."""

    def visit(node: DictConfig) -> dict[str, Any]:
        return {str(key): one(node, key) for key in node}

    def one(node: DictConfig, key: Any) -> Any:
        raw = node._get_node(key)
        if isinstance(raw, DictConfig) and not raw._is_interpolation() and not raw._is_none():
            return visit(raw)
        try:
            value = node[key]
            return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
        except OmegaConfBaseException:
            return Unresolved("" if raw is None else raw._value())

    return visit(tree)
