"""Runs verl's own tests of its multi-turn interfaces twice, unchanged: with verl on a CPU, and with polyturn in its place.

    python benchmarks/verl_tests.py --cache DIR --python VENV/bin/python --out benchmarks/results/verl_tests.json
    python benchmarks/verl_releases.py --wheels DIR/wheels --checkouts DIR/checkouts --tests … --write benchmarks/README.md

Missing wheels are downloaded from the package index and missing checkouts are cloned into DIR, with the recipes at the
commit that a checkout names; `--repository` and `--recipes` are clones to use instead of the public ones. A release without
a tag has only its package, with part of the tests. VENV is an environment in which verl itself works: polyturn's
requirements, verl's, `setuptools<81`, `transformers<5`, and `datasets<4.5` for the older releases. A test counts if verl
itself passes it. The file has, for each release and area, the number of these tests that pass here, and the reason for each
failure. `--side` repeats one side and takes the other from DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RELEASES = {
    "0.4.1": "v0.4.1",
    "0.5.0": "v0.5.0",
    "0.6.1": "v0.6.1",
    "0.7.0": "v0.7.0",
    "0.7.1": "v0.7.1",
    "2026-01": "main",
    "0.9.1": "v0.9.1",
}
"""Release -> its tag; 2026-01 is the main branch at the end of that month."""
REPOSITORY = "https://github.com/verl-project/verl"
RECIPES = "https://github.com/verl-project/verl-recipe"
UNTIL = "2026-02-01T00:00:00Z"
AREAS = {
    "interaction": r"interactions/|multi_interaction|w_interaction",
    "parser": r"tool_parser",
    "tool": r"tests/tools/|async_rollout_(mcp|search|sf|w)_tools|call_tool_on_cpu|tool_call_id_on_cpu",
    "scorer": (
        r"utils/reward_score/|workers/reward_manager|reward_loop/test_(async_token|math_verify|rate_limited)"
        r"|reward/test_.*_on_cpu"
    ),
}
"""Area -> pattern of the paths of its tests; the first match counts."""
LIMIT_S = 600
TEST_LIMIT_S = 180
"""Time limits of a file and of a test, in seconds."""
Results = dict[str, tuple[str, str]]
"""Test -> (passed, skipped, failed or error; the message)."""


def main() -> None:
    """Measure the releases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="holds wheels, checkouts and the results of each side")
    parser.add_argument("--python", type=Path, help="an interpreter with which verl itself works")
    parser.add_argument("--repository", default=REPOSITORY)
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--releases", nargs="*", default=list(RELEASES))
    parser.add_argument("--areas", nargs="*", default=list(AREAS))
    parser.add_argument("--side", choices=("verl", "polyturn", "none"), nargs="*", default=("verl", "polyturn"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = options.cache / "results"
    results.mkdir(parents=True, exist_ok=True)
    for release in options.releases:
        checkout = fetched(release, options.cache.resolve(), repository=options.repository, recipes=options.recipes)
        files = {area: names for area, names in test_files(checkout).items() if area in options.areas}
        for side in (side for side in ("verl", "polyturn") if side in options.side):
            chosen = [name for names in files.values() for name in names]
            if side == "polyturn":  # only tests that verl passes count
                own = {name: tests for area in files for name, tests in _load(results, "verl", release, area).items()}
                chosen = [n for n in chosen if any(kind == "passed" for kind, _ in own.get(n, {}).values())]
            outcomes = measured(chosen, checkout, side, options.python)
            for area, names in files.items():
                here = {name: outcomes[name] for name in names if name in outcomes}
                (results / f"{side}-{release}-{area}.json").write_text(json.dumps(here, indent=1), encoding="utf-8")
                print(side, release, area, dict(Counter(kind for t in here.values() for kind, _ in t.values())), flush=True)
    options.out.write_text(json.dumps(summary(options.cache / "results"), indent=1) + "\n", encoding="utf-8")


def fetched(release: str, cache: Path, *, repository: str, recipes: str) -> Path:
    """Return the checkout of a release; download the checkout and the wheel if they are missing."""
    wheels, checkout = cache / "wheels", cache / "checkouts" / release
    if RELEASES[release] != "main" and not list(wheels.glob(f"verl-{release}-*.whl")):
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), f"verl=={release}"]
        subprocess.run(download, check=True)
    if not checkout.is_dir():
        commit = _clone(repository, RELEASES[release], checkout)
        if not commit:
            with zipfile.ZipFile(next(wheels.glob(f"verl-{release}-*.whl"))) as archive:
                archive.extractall(checkout)
        elif (link := _git(checkout, "ls-tree", "HEAD", "recipe").split())[1:2] == ["commit"]:
            (checkout / "recipe").rmdir()
            _clone(recipes, link[2], checkout / "recipe")
    return checkout


def _clone(repository: str, at: str, folder: Path) -> str:
    """Clone a repository at a tag, a commit or the end of a branch's month; return the commit, "" if there is none."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", repository, str(folder)], check=True)
    commit = _git(folder, "rev-list", "-1", "--first-parent", *([f"--before={UNTIL}", "HEAD"] if at == "main" else [at]))
    if commit:
        _git(folder, "checkout", "--quiet", commit)
    else:
        shutil.rmtree(folder)
    return commit


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=False, capture_output=True, text=True).stdout.strip()


def test_files(checkout: Path) -> dict[str, list[str]]:
    """Return the test files of each area."""
    names_of: dict[str, list[str]] = {}
    for path in sorted((checkout / "tests").rglob("test_*.py")):
        name = str(path.relative_to(checkout))
        if area := next((area for area, rule in AREAS.items() if re.search(rule, name)), None):
            names_of.setdefault(area, []).append(name)
    return names_of


def measured(files: Sequence[str], checkout: Path, side: str, python: Path | None) -> dict[str, Results]:
    """Run files in their checkout with one pytest; if it does not end, with one for each file."""
    if not files:
        return {}
    variables = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--junitxml", str(report), "-W", "ignore"]
        options += [
            f"--timeout={TEST_LIMIT_S}",
            "-o",
            "addopts=",
            "-o",
            "asyncio_mode=strict",
            "--continue-on-collection-errors",
            *files,
        ]
        if side == "verl":
            variables["PYTHONPATH"] = str(checkout)
            command = [str(python), "-m", "pytest", *options]
        else:
            command = [sys.executable, "-m", "polyturn", "run-as", "verl", "--", sys.executable, "-m", "pytest", *options]
        run = {"cwd": checkout, "env": variables, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            output = subprocess.run(command, timeout=LIMIT_S * len(files), check=False, **run).stdout
        except subprocess.TimeoutExpired:
            output = f"no end within {LIMIT_S} s a file"
        if report.is_file():
            return _read(report, files)
    if len(files) == 1:
        return {files[0]: {"collection": ("error", output[-300:])}}
    return {file: tests for one in files for file, tests in measured([one], checkout, side, python).items()}


def _read(report: Path, files: Sequence[str]) -> dict[str, Results]:
    """Return the results of each file in a report."""
    results: dict[str, Results] = {}
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        whole = f"{case.get('classname') or ''}.{case.get('name')}"
        if module := next((m for m in sorted(modules, key=len, reverse=True) if m in whole), None):
            results.setdefault(modules[module], {}).update([_result(case)])
    return results


def _result(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = {"failure": "failed"}.get(child.tag, child.tag)
            return name, (kind, f"{child.get('message') or ''} {(child.text or '')[-300:]}"[-500:])
    return name, ("passed", "")


def summary(results: Path) -> dict[str, Any]:
    """Return release -> area -> {passed, of, files, others}, over the tests that verl passes; `others` has the reasons."""
    table: dict[str, Any] = {}
    for path in sorted(results.glob("verl-*.json")):
        release, _, area = path.stem.removeprefix("verl-").rpartition("-")
        own, here = (_load(results, side, release, area) for side in ("verl", "polyturn"))
        passed = [(file, test) for file, tests in own.items() for test, (kind, _) in tests.items() if kind == "passed"]
        others = {}
        for file, test in passed:
            kind, why = here.get(file, {}).get(test) or next(iter(here.get(file, {}).values()), ("missing", ""))
            if kind != "passed" or test not in here.get(file, {}):
                others[f"{file}::{test}"] = _reason(why)
        cell = {"passed": len(passed) - len(others), "of": len(passed), "files": len(own), "others": others}
        table.setdefault(release, {})[area] = cell
    return table


def _load(results: Path, side: str, release: str, area: str) -> Mapping[str, Results]:
    path = results / f"{side}-{release}-{area}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _reason(text: str) -> str:
    """Return the line of a report with the error."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return re.sub(r" \(/\S+\)", "", (lines or [text.strip()])[-1])[:160]


if __name__ == "__main__":
    main()
