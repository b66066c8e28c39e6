"""Counts which names and keys of projects for verl and ms-swift work with polyturn.

    python benchmarks/compat_census.py --folder ~/my-project                      one JSON line about your project
    python benchmarks/compat_census.py --folder A B C --library LIBRARY … --out benchmarks/results/compat_census.json
    python benchmarks/compat_census.py --again benchmarks/results/compat_census.json --write docs/migrate

A folder is one project. Its Python files are parsed, not run: `from verl.tools.base_tool import BaseTool` gives the name
`verl.tools.base_tool:BaseTool`. Its shell scripts are searched for command lines of `verl.trainer.main_ppo` and `swift
rlhf`, for their keys. `--library` is a checkout of verl or ms-swift: files with the same last two parts of their path as a
file in it are copies, and so are all files inside a package called verl or swift. Copies are not counted. Only names and the
number of files that use each are stored, never a line of code.

A name is `here` if importing it works, `refused` if an error names it with the reason or a remedy, `missing` otherwise.
Files that build another trainer, because they import one of verl's or ms-swift's trainers, workers or engines, are counted
separately: such a program cannot run here, whatever its other names. So are `foreign` keys, which no release of verl has and
which a trainer of the project reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyturn import compat
from polyturn.compat.swift.args import arguments as swift_arguments
from polyturn.compat.verl_config import table as verl_table

LIBRARIES = ("verl", "swift")
TITLES = {"verl": "verl", "swift": "ms-swift"}
TRAINERS = {
    "verl": re.compile(
        r"verl\.(single_controller|models|workers(?!\.(reward_manager|rollout\.schemas|config))|third_party|checkpoint_engine"
        r"|trainer\.(?!main_ppo(:main)?$|ppo\.core_algos|ppo\.reward\b|config)|utils\.(fsdp|megatron|ulysses|checkpoint|seqlen|flops"
        r"|device|distributed|vllm|profiler|memory|activation|attention|kernel|npu|debug|tracking|metric)|model_merger"
        r"|utils\.dataset\.(multiturn_sft_dataset|sft_dataset|dataset_utils)"
        r"|experimental\.(fully_async|transfer_queue|one_step|agent_loop\S*:(AgentLoopManager|AgentLoopWorker))"
        r"|utils:(Tracking))"
    ),
    "swift": re.compile(
        r"swift(:|\.cli\b|\.llm\.app\b|\.llm:\w+(_main|Arguments)$)|swift\.(trainers|rlhf_trainers|megatron|pipelines|model|arguments|tuners|ray|rl_core|dataset|hub|ui"
        r"|llm\.(train|argument|model|dataset|infer\.(rollout|infer_engine|infer|deploy)|export))\b"
    ),
}
"""Modules whose import makes a file part of another trainer or inference program."""
_KEY = re.compile(
    r"^\+{0,2}(?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward|reward_model|trainer)\.[\w.]+$"
)
_ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "<"}


def main() -> None:
    """Count and resolve the names, print one JSON line, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, nargs="*", default=[], help="projects, one a folder")
    parser.add_argument("--library", type=Path, nargs="*", default=[], help="checkouts of verl and ms-swift")
    parser.add_argument("--again", type=Path, help="the names that an earlier census counted, in place of folders")
    parser.add_argument("--out", type=Path, help="write the names with their counts to this file")
    parser.add_argument("--write", type=Path, help="a folder with verl.md and swift.md that hold the markers")
    options = parser.parse_args()
    if options.again:
        census = json.loads(options.again.read_text(encoding="utf-8"))
    else:
        census = count(options.folder, library=frozenset().union(*map(_tails, options.library)))
    result = {root: resolve(root, census[root]) for root in LIBRARIES}
    if options.out:
        options.out.write_text(json.dumps(census, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    if options.write:
        for root in LIBRARIES:
            write(options.write / f"{root}.md", root, census, result[root])
    print(json.dumps({"date": census["date"], "projects": census["projects"], **result}))


def count(folders: Collection[Path], *, library: Collection[str] = frozenset()) -> dict[str, Any]:
    """Return name -> number of files of each library, and of its command lines key -> number of scripts."""
    census: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "projects": len(folders)}
    for root in LIBRARIES:
        names: dict[str, Counter[str]] = {"plugin": Counter(), "trainer": Counter()}
        files: Counter[str] = Counter()
        keys: Counter[str] = Counter()
        projects: set[Path] = set()
        for folder in folders:
            own = [path for path in _files(folder, root) if _tail(path) not in library]
            local = _local_modules(folder, root, library)
            for path in own:
                if path.suffix == ".sh":
                    used = set(_keys(path, root))
                    keys.update(used)
                    files["script"] += bool(used)
                elif used := {name for name in _names(path, root) if name.partition(":")[0] not in local}:
                    kind = "trainer" if any(TRAINERS[root].match(name) for name in used) else "plugin"
                    names[kind].update(used)
                    files[kind] += 1
                    projects.add(folder)
        census[root] = {"files": dict(files), "projects": len(projects), "keys": dict(keys), **map_values(names)}
    return census


def resolve(root: str, census: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shares of names and keys that work here, and the names that do not.

    Raises:
        SystemExit: the library itself is installed, and would be imported instead of polyturn.
    """
    if not compat.install(root):
        raise SystemExit(f"{TITLES[root]} is installed here; run this in an environment without it")
    out: dict[str, Any] = {"files": census["files"], "projects": census["projects"]}
    for kind in ("plugin", "trainer"):
        state = {name: resolve_name(name) for name in census[kind]}
        out[f"{kind}_names"] = _shares(census[kind], state)
    out["keys"] = _shares(census["keys"], {key: resolve_key(root, key) for key in census["keys"]})
    return out


def resolve_name(name: str) -> str:
    """Return here, refused or missing for `module` or `module:name`."""
    module, _, attribute = name.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = __import__(module, fromlist=[attribute or "__name__"])
            if attribute not in ("", "*"):
                getattr(imported, attribute)
    except ImportError as error:
        return "refused" if "does not offer" in str(error) else "missing"
    except AttributeError:
        return "missing"
    return "here"


def resolve_key(root: str, key: str) -> str:
    """Return here, refused or missing for a key of a command line; foreign if no release of verl has the key."""
    tables = [verl_table.table()] if root == "verl" else [swift_arguments.table(), swift_arguments.megatron_table()]
    if not any(table.covers(key) for table in tables):
        return "foreign" if root == "verl" and not verl_table.is_of_verl(key) else "missing"
    rule = next((rule for table in tables if (rule := table.find(key)) is not None), None)
    return "refused" if rule is not None and rule.rejected is not None else "here"


def _shares(counts: Mapping[str, int], state: Mapping[str, str]) -> dict[str, Any]:
    """Return the shares by file and by distinct name, and the missing names, the most used first."""
    counts = {name: counts[name] for name in sorted(counts, key=lambda name: (-counts[name], name))}
    of = {kind: {n: c for n, c in counts.items() if state[n] == kind} for kind in ("here", "refused", "missing", "foreign")}
    foreign = of.pop("foreign")
    uses, distinct = (sum(measure(part) for part in of.values()) for measure in (lambda part: sum(part.values()), len))
    return {
        "uses": uses,
        "distinct": distinct,
        "here_by_use": round(sum(of["here"].values()) / uses, 4) if uses else None,
        "here_by_name": round(len(of["here"]) / distinct, 4) if distinct else None,
        "refused": of["refused"],
        "missing": of["missing"],
        "foreign": foreign,
    }


def map_values(names: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Return plain dictionaries."""
    return {kind: dict(counts) for kind, counts in names.items()}


def _files(folder: Path, root: str) -> Iterator[Path]:
    """Yield the Python files and scripts of a project, without copies of the library."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts[:-1]
        if path.suffix in (".py", ".sh") and path.is_file() and root not in inside:
            yield path


def _local_modules(folder: Path, root: str, library: Collection[str]) -> set[str]:
    """Return the modules in a project's copy of the library that the library does not have."""
    copies = [path for path in folder.rglob(root) if path.is_dir() and (path / "__init__.py").exists()]
    own = [file.relative_to(copy.parent) for copy in copies for file in copy.rglob("*.py") if _tail(file) not in library]
    return {".".join((file.parent if file.stem == "__init__" else file.with_suffix("")).parts) for file in own}


def _names(path: Path, root: str) -> Iterator[str]:
    """Yield the names that a file imports from a library, at any depth of the code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == root)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == root:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _keys(path: Path, root: str) -> Iterator[str]:
    """Yield the keys of a script's command lines that train with a library."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    for line in text.splitlines():
        if root == "verl" and "verl.trainer.main_ppo" in line:
            words = (word.partition("=")[0] for word in _words(line) if "=" in word)
            yield from (word.lstrip("+") for word in words if _KEY.match(word))
        elif root == "swift" and re.search(r"\bswift rlhf\b", line) and "grpo" in line:
            yield from (word[2:].partition("=")[0] for word in _words(line) if re.match(r"--[a-z_]+", word))


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    start = next((i for i, word in enumerate(words) if word in ("rlhf", "verl.trainer.main_ppo")), 0)
    end = next((i for i in range(start, len(words)) if words[i] in _ENDS), len(words))
    return words[start:end]


def _tail(path: Path) -> str:
    return "/".join(path.parts[-2:])


def _tails(folder: Path) -> set[str]:
    """Return the last two parts of the path of each file."""
    return {_tail(path) for path in folder.rglob("*") if path.suffix in (".py", ".sh")}


def write(page: Path, root: str, census: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write the shares between the markers of a page."""
    begin, end = "<!-- census: begin -->\n", "<!-- census: end -->"
    rows = [
        f"| counted on {census['date']}, {result['projects']} projects | uses | of them here | distinct | of them here |",
        "|---|---|---|---|---|",
    ]
    for title, key in (
        ("plug-in files", "plugin_names"),
        ("files with a trainer of their own", "trainer_names"),
        ("keys of scripts", "keys"),
    ):
        part = result[key]
        if part["uses"]:
            by_use, by_name = (f"{100 * part[name]:.1f} %" for name in ("here_by_use", "here_by_name"))
            rows.append(f"| {title} | {part['uses']} | {by_use} | {part['distinct']} | {by_name} |")
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}" + "\n".join(rows) + f"\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
