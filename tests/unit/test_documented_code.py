"""The code and the links of every page are true: Python runs, commands parse, links lead somewhere.

Blocks of one page run in one namespace, from top to bottom, in a folder where each run that the page opens is a small one.
Those in RUN_ELSEWHERE are only compiled here. Configurations have a file of their own, test_documented_configs.py.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperGroup

from polyturn.cli.dialects import GROUP
from polyturn.cli.main import app
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.core import errors
from polyturn.core.entry_points import offered
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rewards.gsm8k import compute_score
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.parquet_store import ParquetStore
from polyturn.testing import tiny
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.failures import ToolFailure
from polyturn.tools.gsm8k import Gsm8kTool

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
RUN_ELSEWHERE = {
    ("docs/guides/serve.md", 0): "test_the_client_of_the_guide_asks_a_server",
    ("docs/guides/testing.md", 0): "test_the_tests_that_a_page_shows_pass",
    ("docs/segments.md", 0): "test_the_schedulers_of_the_documentation_run",
}
"""Blocks that need what a page cannot bring, and the tests that run them."""
MAX_PICTURE = 150_000
MODEL = "Qwen/Qwen3-0.6B"
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for _, language, body in BLOCK.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def with_blocks(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, *languages)]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = ROOT / "scripts" / "docs" / "reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(reference: ModuleType) -> dict[str, str]:
    """The pages that are written from the code, by their places."""
    pages: dict[str, str] = reference.pages()
    return pages


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of one evaluation."""
    folder = tmp_path_factory.mktemp("recorded")
    with ParquetStore(folder) as store:
        for group in asyncio.run(RolloutPool(scripted_context(["#### 4"])).run([GroupSpec(id="g", task=task(), size=2)])):
            store.add(group, step=0, split="eval/greedy")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(code: str, model: str) -> str:
    """Return code that trains the same in a few seconds: with a small random model, for one step of four episodes."""
    if "polyturn.train(" not in code:
        return code
    few = re.sub(r"\bsteps=\d+", "steps=1, groups_per_step=2, max_tokens_per_turn=16", code)
    return re.sub(r"group_size=\d+", "group_size=2", few).replace(f'"{MODEL}"', repr(model))


@pytest.mark.parametrize("page", with_blocks("python"), ids=named)
def test_the_python_of_a_page_runs(page: Path, here: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch):
    for run in set(re.findall(r'polyturn\.Run\("([^"]+)"\)', page.read_text())):
        shutil.copytree(recorded, here / run)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    model = str(tiny(MODEL)) if MODEL in page.read_text() else MODEL
    for number, body in enumerate(blocks(page, "python")):
        code = compile(small(body, model), f"{named(page)} block {number}", "exec")
        if (named(page), number) not in RUN_ELSEWHERE:
            exec(code, module.__dict__)


def test_what_is_run_elsewhere_is_there():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/unit").rglob("test_*.py"))
    for (page, number), test in RUN_ELSEWHERE.items():
        assert len(blocks(ROOT / page, "python")) > number, page
        assert f"def {test}(" in tests


async def test_the_tests_that_a_page_shows_pass(monkeypatch: pytest.MonkeyPatch):
    """The reader's plug-ins are some of ours."""
    mine = ModuleType("mine")
    own = {"MyInteraction": Gsm8kInteraction, "MyTool": Gsm8kTool, "MyScheduler": MultiTurnScheduler}
    vars(mine).update(own, SCHEMA=Gsm8kTool({}).tool_schema, compute_score=compute_score)
    monkeypatch.setitem(sys.modules, "mine", mine)
    page: dict[str, Any] = {}
    exec(blocks(DOCS / "guides/testing.md", "python")[0], page)
    tests = [test for name, test in page.items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        await test()


def commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks that call polyturn or make, continued lines joined."""
    found = []
    for body in blocks(page, "bash", "sh", "console", "text", ""):
        for line in body.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ").removeprefix(".venv/bin/").partition(" #")[0].strip()
            if re.match(r"(polyturn|make) [a-z]", command):
                found.append(command)
    return found


COMMANDS = [(named(page), command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p}: {c[:50]}" for p, c in COMMANDS])
def test_a_command_of_a_page_parses(page: str, command: str, here: Path):
    program, *words = shlex.split(command.replace(" …", " "))
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [w for w in words if w not in targets and "=" not in w] == []
        return
    found = typer.main.get_command(app)
    while isinstance(found, TyperGroup) and words and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    if isinstance(found, TyperGroup):
        assert found.name == "config", f"{command}: there is no such command"
        return
    for option in (w for w in words[: words.index("--") if "--" in words else None] if w.startswith("-")):
        dialects = {f"--{name}" for name in offered(GROUP)} if found.name == "train" else set()
        known = {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help"} | dialects
        assert option.partition("=")[0] in known, f"{command}: {found.name} has no {option}; it has {sorted(known)}"
    required = [p for p in found.params if isinstance(p, TyperArgument) and p.required]
    assert len(words) >= len(required), command


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_of_a_page_leads_somewhere(page: Path, generated: dict[str, str]):
    written = {(DOCS / uri).resolve() for uri in generated}
    for target, anchor in LINK.findall(prose(page)):
        path = (page.parent / target).resolve() if target else page
        assert path in written or path.exists(), f"{named(page)}: {target}"
        if anchor and path.suffix == ".md" and path not in written:
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}
            assert anchor in slugs, f"{named(page)}: {target}#{anchor}; there are {sorted(slugs)}"


def test_every_function_that_one_sample_is_followed_through_exists():
    page = DOCS / "one-sample.md"
    links = re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)#([\w.]+)\)", page.read_text())
    assert len(links) >= 20
    for shown, target, name in links:
        assert shown == name
        body: list[ast.stmt] = ast.parse((page.parent / target).read_text()).body
        for part in name.split("."):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found = [node for node in body if isinstance(node, kinds) and node.name == part]
            assert found, f"{target} has no {name}"
            body = found[0].body


def test_the_site_lists_every_page(generated: dict[str, str]):
    listed = set(re.findall(r"([\w\-/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} | set(generated)


def test_the_reference_has_every_key_every_error_and_every_kind_of_tool_error(
    reference: ModuleType, generated: dict[str, str]
):
    for key, kind, _, meaning, _, _ in schema_table(RunConfig):
        assert kind == "section" or f"`{key}`" in generated["reference/config.md"]
        assert meaning, f"{key} has no meaning: a string under the field in config/models/"
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == errors.__name__:
            assert f"`{name}`" in generated["reference/errors.md"]
    assert set(ToolFailure) == set(reference.TOOL_ERRORS)


def test_pictures_are_small():
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < MAX_PICTURE, picture.name
