"""The pages are executed: Python runs, commands parse, configurations load, and named keys and metrics exist.

Python blocks of one page run in one namespace, from top to bottom, in a folder where each run that the page opens is a
small one; RUN_ELSEWHERE names those that need more. A YAML snippet is a part of a configuration; a line that sets a section
again begins another one, because pages show alternatives beneath each other. Links are checked by `scripts/house.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import typer
import yaml
from typer.core import TyperArgument, TyperGroup

from polyturn.algorithms.losses import policy_losses
from polyturn.cli.dialects import GROUP
from polyturn.cli.main import app
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.config.schema import is_model, keys_of, schema_table
from polyturn.infra.plugins import offered
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rewards.gsm8k import compute_score
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.parquet_store import ParquetStore
from polyturn.testing import tiny
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.failures import ToolFailure
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tracking.manager import tracker_spec
from polyturn.tracking.metric_docs import MEANINGS
from polyturn.training.observer import AlsoRecord, RunObserver
from support.sandboxes import needs_bubblewrap
from support.scripted_server import scripted_server

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/recipes/README.md")),
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "reference"),  # generated
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
RUN_ELSEWHERE = {
    ("docs/guides/serve.md", 0): "test_client_of_the_guide_asks_a_server",
    ("docs/guides/testing.md", 0): "test_tests_that_a_page_shows_pass",
    ("docs/guides/see.md", 0): "test_notebook_of_a_page_reads_a_run",
    ("docs/segments.md", 0): "test_schedulers_of_the_segments_page_run",
}
"""Blocks that need what a page cannot bring, and the tests that run them; here they are only compiled."""
MODEL = "Qwen/Qwen3-0.6B"
NEED_BUBBLEWRAP = {"docs/guides/sandboxes.md"}
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SECTIONS = set(RunConfig.model_fields)
SOURCE = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))


def blocks(page: str, *languages: str) -> list[str]:
    return [body for _, language, body in BLOCK.findall(TEXTS[page]) if language in languages]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of one evaluation."""
    folder = tmp_path_factory.mktemp("recorded")
    with ParquetStore(folder) as store:
        for group in asyncio.run(RolloutPool(scripted_context(["#### 4"])).run([GroupSpec(id="g", task=task(), size=2)])):
            store.add(group, step=0, split="eval/greedy")
    return folder


def small(code: str, model: str) -> str:
    """Return code that trains the same in a few seconds: with a small random model, for one step of four episodes."""
    if "polyturn.train(" not in code:
        return code
    few = re.sub(r"\bsteps=\d+", "steps=1, groups_per_step=2, max_tokens_per_turn=16", code)
    return re.sub(r"group_size=\d+", "group_size=2", few).replace(f'"{MODEL}"', repr(model))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[needs_bubblewrap] * (p in NEED_BUBBLEWRAP)) for p in TEXTS if blocks(p, "python")]
)
def test_python_of_a_page_runs(page: str, tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in set(re.findall(r'polyturn\.Run\("([^"]+)"\)', TEXTS[page])):
        shutil.copytree(recorded, tmp_path / run)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    model = str(tiny(MODEL)) if MODEL in TEXTS[page] else MODEL
    for number, body in enumerate(blocks(page, "python")):
        code = compile(small(body, model), f"{page} block {number}", "exec")
        if (page, number) not in RUN_ELSEWHERE:
            exec(code, module.__dict__)


def test_blocks_run_elsewhere_have_their_tests() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/unit").rglob("test_*.py"))
    for (page, number), test in RUN_ELSEWHERE.items():
        assert len(blocks(page, "python")) > number, page
        assert f"def {test}(" in tests


async def test_tests_that_a_page_shows_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's plug-ins are some of ours."""
    mine = ModuleType("mine")
    own = {"MyInteraction": Gsm8kInteraction, "MyTool": Gsm8kTool, "MyScheduler": MultiTurnScheduler}
    vars(mine).update(own, SCHEMA=Gsm8kTool({}).tool_schema, compute_score=compute_score)
    monkeypatch.setitem(sys.modules, "mine", mine)
    page: dict[str, Any] = {}
    exec(blocks("docs/guides/testing.md", "python")[0], page)
    tests = [test for name, test in page.items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        await test()


async def test_notebook_of_a_page_reads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = await RolloutPool(scripted_context(["#### 4"])).run([GroupSpec(id="g0", task=task(), size=2)])
    with RunObserver(tmp_path / "runs" / "mine", total_steps=1) as observer:
        observer.on_step(1, {"rollout/success": 1.0}, groups)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks("docs/guides/see.md", "python")[0], names)
    assert len(names["late"]) == 0 and names["by_stop"].to_pylist() == [{"stop_reason": "stop", "n": 2}]
    assert [turn.message.text for turn in names["one"].turns] == ["#### 4"]


def test_tracker_of_a_page_sends_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "tracker.py").write_text(blocks("docs/guides/see.md", "python")[1])
    got: list[dict[str, Any]] = []
    with scripted_server(lambda path, body: got.append(body) or {}) as url:
        spec = tracker_spec("tracker.py:Webhook", base=tmp_path, url=url)
        with RunObserver(tmp_path / "mine", total_steps=1, also=AlsoRecord(trackers=[spec])) as observer:
            observer.on_step(3, {"rollout/success": 0.5}, [])
    assert got == [{"run": "mine", "step": 3, "success": 0.5}]


def commands(page: str) -> list[str]:
    """Return the lines of a page's blocks that call polyturn or make, continued lines joined."""
    lines = "\n".join(blocks(page, "bash", "sh", "console", "text", "")).replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ").removeprefix(".venv/bin/").partition(" #")[0].strip() for line in lines]
    return [command for command in found if re.match(r"(polyturn|make) [a-z]", command)]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_commands_of_a_page_parse(page: str) -> None:
    for command in commands(page):
        program, *words = shlex.split(command.replace(" …", " "))
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert [w for w in words if w not in targets and "=" not in w] == [], command
            continue
        found: Any = typer.main.get_command(app)
        while isinstance(found, TyperGroup) and words and words[0] in found.commands:
            found = found.get_command(typer.Context(found), words.pop(0))
        if isinstance(found, TyperGroup):
            assert found.name == "config", f"{command}: there is no such command"
            continue
        dialects = {f"--{name}" for name in offered(GROUP)} if found.name == "train" else set()
        known = {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help"} | dialects
        own = words[: words.index("--")] if "--" in words else words
        assert [w for w in own if w.startswith("-") and w.partition("=")[0] not in known] == [], command
        assert len(words) >= len([p for p in found.params if isinstance(p, TyperArgument) and p.required]), command


def alternatives(block: str) -> list[str]:
    """Cut a block before each line that sets a section a second time."""
    parts: list[list[str]] = [[]]
    seen: set[str] = set()
    for line in block.splitlines():
        section = line.split(":")[0] if line[:1].isalpha() else ""
        if section and section in seen:
            parts.append([])
            seen = set()
        seen.add(section)
        parts[-1].append(line)
    return ["\n".join(part) for part in parts]


def test_configurations_of_the_pages_load() -> None:
    loaded = 0
    for page in TEXTS:
        texts = [text for block in blocks(page, "yaml") for text in alternatives(block)]
        for given in map(yaml.safe_load, texts):
            if isinstance(given, dict) and given.keys() <= SECTIONS:
                load_config(RunConfig, None, values={**given, "model": {"path": "there", **given.get("model", {})}})
                loaded += 1
    assert loaded > 20


def has_key(model: type, path: list[str]) -> bool:
    if not path:
        return True
    key = keys_of(model).get(path[0])
    if key is None:
        return False
    inner = [kind for kind in (key.annotation, *get_args(key.annotation)) if is_model(kind)]
    return any(has_key(kind, path[1:]) for kind in inner) if inner else len(path) == 1 or "dict" in str(key.annotation)


def named(pattern: str) -> set[tuple[str, str]]:
    """Return the names on each page."""
    pages = {page: text for page, text in TEXTS.items() if page.startswith(("docs/", "examples/")) and "migrate" not in page}
    return {(page, name) for page, text in pages.items() for name in re.findall(pattern, text)}


def test_keys_that_a_page_names_exist() -> None:
    files = ("py", "yaml", "jsonl", "png", "md", "json", "parquet")
    keys = named(rf"`((?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_]+)+)(?::[^`]*)?`")
    keys = {(page, key) for page, key in keys if key.rsplit(".")[-1] not in files and f"polyturn.{key}" not in SOURCE}
    assert {one for one in keys if not has_key(RunConfig, one[1].split("."))} == set()


def test_metrics_that_a_page_names_are_recorded() -> None:
    """The table of metrics has the name; its parts in angle brackets stand for any text."""
    templates = [name for name in MEANINGS if not name.endswith(("/<figure>", "/<component>"))]
    known = [re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", name)))) for name in templates]
    names = named(r"`((?:rollout|reward|tokens|policy|loss|buffer|time|critic|engine)/[a-z0-9_]+)`")
    assert {one for one in names if not any(pattern.fullmatch(one[1]) for pattern in known)} == set()


def test_page_of_losses_has_their_bounds() -> None:
    section = TEXTS["docs/algorithms.md"].partition("## Policy losses")[2]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    for name in policy_losses:
        loss = policy_losses.resolve(name)
        if loss.__module__.startswith("polyturn.algorithms"):
            (row, *_) = [row for row in rows if f"`{name}`" in row[1]]
            shown = [float(number) for number in re.findall(r"[\d.e-]+", row[-2])]
            parameters = inspect.signature(loss).parameters
            assert shown == [parameters[n].default for n in ("clip_low", "clip_high") if n in parameters], name


def test_reference_is_generated_with_a_meaning_for_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    reference = importlib.import_module("reference")
    pages = reference.pages()
    assert [page for page, text in pages.items() if len(text.splitlines()) < 20] == []
    rows = [row for row in schema_table(RunConfig) if row.type != "section"]
    assert [row.key for row in rows if not row.doc or f"`{row.key}`" not in pages["reference/config.md"]] == []
    assert set(reference.TOOL_ERRORS) == set(ToolFailure)
