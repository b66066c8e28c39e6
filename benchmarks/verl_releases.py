"""Counts the parts of each release of verl that work with polyturn: keys of its config tree and multi-turn launch scripts.

    python benchmarks/verl_releases.py --wheels DIR --checkouts DIR --write benchmarks/README.md
    python benchmarks/verl_releases.py --wheels DIR --names src/polyturn/compat/verl_config/names.txt

The folder of wheels contains files such as verl-0.6.1-….whl (`pip download --no-deps verl==0.6.1`), the folder of checkouts
has a folder per release, such as 0.6.1. bash runs each script with stand-ins for python and torchrun, which record the
command lines. Each is then composed, translated and validated as in `polyturn run-as verl`, both inside the checkout and
from a copy of examples and recipe alone. The table is written between the markers of the page, followed by the results of
`verl_tests.py` (`--tests FILE`). `--names` writes the names of all keys with their releases, which distinguish a misspelt
key from a key of verl in sections without a meaning here. `--modules` (for src/polyturn/compat/verl/modules.txt) writes the
names of all modules, which distinguish verl's modules from a project's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyturn.compat.verl_config.command import HydraArguments, config_path, parse_arguments
from polyturn.compat.verl_config.compose import BASE_NAMES, OF_VERL, compose_name
from polyturn.compat.verl_config.table import NULL, OTHER, kind_of, table
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values, read_yaml
from polyturn.config.models import RunConfig
from polyturn.config.translate.paths import absolute
from polyturn.config.translate.tree import Unresolved, leaves
from polyturn.core.errors import PolyturnError

MARKS = ("<!-- releases of verl: begin -->", "<!-- releases of verl: end -->")
FOLDERS = (
    "examples/sglang_multiturn",
    *(f"recipe/{name}" for name in ("retool", "langgraph_agent", "collabllm", "char_count", "spo", "r1")),
)
STAND_IN = """#!{python}
import json, os, sys
with open(os.environ["COMMANDS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
FILLED = [
    "actor_rollout_ref.model.path=tiny",
    "critic.model.path=tiny",
]
FILES = {"train": "train.parquet", "val": "test.parquet"}
"""Files that a script expects on its machine."""


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--tests", type=Path, help="the file that verl_tests.py wrote")
    parser.add_argument("--write", type=Path, help="a page with the markers")
    parser.add_argument("--modules", type=Path, help="write the names of the modules to this file")
    parser.add_argument("--names", type=Path, help="write the names of the keys to this file")
    options = parser.parse_args()
    if options.names:
        options.names.write_text("".join(name_lines(names(options.wheels))), encoding="utf-8")
        return
    if options.modules:
        lines = [f"{name}\n" for name in sorted(modules(options.wheels))]
        options.modules.write_text("".join(lines), encoding="utf-8")
        return
    more = cells(json.loads(options.tests.read_text())) if options.tests else {}
    checkouts = {folder.name: folder for folder in sorted(options.checkouts.iterdir())} if options.checkouts else {}
    keys = {release: known_keys(package) for release, package in {**checkouts, **dict(wheels(options.wheels))}.items()}
    scripts = {release: launch(folder) for release, folder in checkouts.items()}
    page = table_of(keys, scripts, more)
    if options.write:
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARKS[0])
        options.write.write_text(f"{before}{MARKS[0]}\n{page}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")
    print(page)
    print(json.dumps({"keys": keys, "scripts": {r: {p: s[p] for p in ("inside", "outside")} for r, s in scripts.items()}}))


# --- keys -----------------------------------------------------------------------------------------------------------------


def wheels(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the release and the file of each wheel, the oldest first."""
    wheel_of = {path.name.split("-")[1]: path for path in folder.glob("verl-*.whl")}
    yield from sorted(wheel_of.items(), key=lambda item: [int(part) for part in item[0].split(".")])


def tree_values(package: Path) -> dict[str, set[str]]:
    """Return the keys of the trees of a wheel or a checkout: `ppo_trainer` and Megatron's composed, generated ones as is.

    Each key comes with the kinds of its values (null, bool, number or other), an expression with the kind of its result.
    """
    with tempfile.TemporaryDirectory() as where:
        if package.is_dir():
            shutil.copytree(package / OF_VERL, Path(where) / OF_VERL)
        else:
            unpack(package, Path(where))
        trees: dict[str, Any] = {
            path.stem: read_yaml(path) for path in sorted((Path(where) / OF_VERL).glob("_generated_*.yaml"))
        }
        with contextlib.chdir(where):
            trees |= {name: compose_name(name, folder=None).values for name in BASE_NAMES}
    kinds_of: dict[str, set[str]] = {}
    for path, value in (leaf for tree in trees.values() for leaf in leaves(tree)):
        kinds = kinds_of.setdefault(".".join(path), set())
        if not isinstance(value, Unresolved) and "${" not in str(value):
            kinds.add(NULL if value == "null" else kind_of(value))
    return {key: kinds or {NULL, OTHER} for key, kinds in kinds_of.items()}


def names(folder: Path) -> dict[str, list[str]]:
    """Return each key of the wheels with its releases and the kinds of its values: {"data.seed": ["0.6.1", …, "null"]}."""
    releases_of: dict[str, list[str]] = {}
    kinds: dict[str, set[str]] = {}
    for release, wheel in wheels(folder):
        for key, of_release in tree_values(wheel).items():
            releases_of.setdefault(key, []).append(release)
            kinds.setdefault(key, set()).update(of_release)
    return {key: [*releases, *sorted(kinds[key])] for key, releases in releases_of.items()}


def name_lines(releases_of: Mapping[str, list[str]]) -> list[str]:
    """Return the lines of `names.txt`, one for the keys of a section that are in the same releases."""
    lines: dict[str, list[str]] = {}
    for key, values in sorted(releases_of.items()):
        section, _, name = key.rpartition(".")
        kinds = [value for value in values if not value[0].isdigit()]
        head = " ".join([section or "-", *(value for value in values if value[0].isdigit())])
        lines.setdefault(head, []).append(f"{name}={','.join(kinds)}")
    return [f"{head}: {' '.join(keys)}\n" for head, keys in lines.items()]


def modules(folder: Path) -> set[str]:
    """Return the names of the modules of the wheels."""
    names: set[str] = set()
    for _, wheel in wheels(folder):
        with zipfile.ZipFile(wheel) as archive:
            names |= {_module(file) for file in archive.namelist() if file.split("/")[0] == "verl" and file.endswith(".py")}
    return names


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unpack(wheel: Path, where: Path) -> None:
    """Unpack the config tree of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where, [name for name in archive.namelist() if name.startswith("verl/trainer/config/")])


def known_keys(package: Path) -> dict[str, int]:
    """Return the number of keys in the trees of a wheel or a checkout, and the number of those in the table."""
    every = tree_values(package)
    return {"known": sum(map(table().covers, every)), "of": len(every)}


# --- scripts --------------------------------------------------------------------------------------------------------------


def launch(checkout: Path) -> dict[str, Any]:
    """Try every multi-turn launch script of a checkout, inside it and from a copy of its scripts alone."""
    result: dict[str, Any] = {"reasons": {}}
    with tempfile.TemporaryDirectory() as temporary:
        inside, outside = Path(temporary) / "inside", Path(temporary) / "outside"
        for folder, names in (
            (inside, ("examples", "recipe", "verl/trainer/config", "verl/__init__.py")),
            (outside, ("examples", "recipe")),
        ):
            folder.mkdir()
            for name in names:
                _copy(checkout / name, folder / name)
            for file in FILES.values():
                (folder / file).touch()
        for name, folder in (("inside", inside), ("outside", outside)):
            verdicts = {str(s.relative_to(folder)): verdict(s, folder) for s in launch_scripts(folder)}
            result[name] = {kind: sum(v[0] == kind for v in verdicts.values()) for kind in ("accepted", "refused", "other")}
            result["reasons"][name] = {script: why for script, (kind, why) in verdicts.items() if kind != "accepted"}
    return result


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git"))
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def launch_scripts(checkout: Path) -> list[Path]:
    """Return the launch scripts of a checkout."""
    return sorted(script for folder in FOLDERS for script in (checkout / folder).rglob("*.sh"))


def verdict(script: Path, checkout: Path) -> tuple[str, str]:
    """Return accepted, refused or other (it starts no training by verl.trainer.main_ppo), and the reason."""
    commands = [c for c in commands_of(script, checkout) if c[1:3] == ["-m", "verl.trainer.main_ppo"]]
    if not commands:
        return "other", "it starts other programs"
    files = [f"data.{part}_files={checkout / file}" for part, file in FILES.items()]
    why = ""
    for folder in (checkout, script.parent):  # some scripts start in the checkout, some in their own folder
        try:
            with contextlib.chdir(folder):
                for command in commands:
                    accept(parse_arguments([*command[3:], *FILLED, *files]))
            return "accepted", ""
        except PolyturnError as refusal:
            why = why or str(refusal)
    return "refused", why


def accept(arguments: HydraArguments) -> None:
    """Compose, translate and validate the configuration of a command line."""
    folder = None if arguments.folder is None else config_path(arguments.folder)
    translation = translate(compose_name(arguments.name, folder=folder, overrides=arguments.overrides, more=arguments.more))
    load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)


def commands_of(script: Path, checkout: Path) -> list[list[str]]:
    """Run a script in its folder with stand-ins for the programs that it starts; return their command lines."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python", "python3", "torchrun", "ray", "nvidia-smi", "ulimit", "pip", "pip3", "sleep"):
            program = Path(folder) / name
            program.write_text(STAND_IN.format(python=sys.executable))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        log = Path(folder) / "commands.jsonl"
        log.touch()
        variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COMMANDS": str(log), "HOME": folder}
        subprocess.run(["bash", str(script)], cwd=checkout, env=variables, capture_output=True, timeout=120, check=False)
        return [json.loads(line) for line in log.read_text().splitlines()]


# --- the table ------------------------------------------------------------------------------------------------------------


def cells(tests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return release -> column -> cell of the areas in which verl passes a test."""
    return {
        release: {f"{area} tests": f"{counts['passed']} of {counts['of']}" for area, counts in areas.items() if counts["of"]}
        for release, areas in tests.items()
    }


def table_of(keys: Mapping[str, Any], scripts: Mapping[str, Any], more: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table as Markdown, without columns that were not measured."""
    columns = sorted({column for row in more.values() for column in row})
    head = [
        "release",
        "keys known",
        "scripts inside a checkout",
        "refused by name",
        "scripts outside",
        "refused by name",
        *columns,
    ]
    rows = []
    for release in sorted(
        {*keys, *scripts, *more}, key=lambda r: [int(p) if p.isdigit() else 0 for p in r.replace("-", ".").split(".")]
    ):
        known = f"{keys[release]['known']} of {keys[release]['of']}" if release in keys else ""
        cells = [release, known]
        for side in ("inside", "outside"):
            counts = scripts.get(release, {}).get(side)
            total = counts["accepted"] + counts["refused"] if counts else 0
            cells += [f"{counts['accepted']} of {total}", str(counts["refused"])] if counts and total else ["", ""]
        rows.append([*cells, *(more.get(release, {}).get(c, "") for c in columns)])
    measured = [column for column in range(len(head)) if any(row[column] for row in rows)]
    lines = [f"| {' | '.join(row[column] for column in measured)} |" for row in [head, *rows]]
    lines.insert(1, "|" + "---|" * len(measured))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
