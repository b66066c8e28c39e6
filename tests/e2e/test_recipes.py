"""The recipes of examples/recipes: each dry-runs for one GPU and for eight, and takes an optimizer step.

A tiny random model replaces the real one, by `model.path`; other overrides set the size of the batch, the engine and the
number of ranks. GSM8K's real problems are used where they lie beside the checkout, and for one of the recipes Qwen's
real vocabulary and templates, which take seconds to load.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from polyturn.api.dry_run import device_plan
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.sandbox.python.isolation import Isolation, find_isolation
from polyturn.store.stored_run import open_store
from polyturn.testing.published import PUBLISHED
from polyturn.testing.tiny_models import tiny_tokenizer
from support.models import tiny_model
from support.runs import call_command, trained_steps
from support.scripted_server import scripted_server
from support.vision import VISION_TEMPLATE, tiny_vision_model, vision_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
SHARED = ROOT.parent / "shared" / "data"
OVERLAYS = ("one_gpu", "eight_gpus", "eight_gpus_shared", "thirty_two_gpus", "qwen3")
"""What lies below all recipes, or above any."""
NAMES = sorted(p.stem for p in RECIPES.glob("*.yaml") if p.stem not in OVERLAYS)
WITH_DATA = dict(
    re.findall(r"^\| `(\w+)\.yaml` .*\| `polyturn (data [^`]+)` \|$", (RECIPES / "README.md").read_text(), re.MULTILINE)
)
"""Recipe -> the command that makes its data, as the README has it."""
TEMPLATES = {"qwen2": "qwen2_5.jinja", "qwen3": "qwen3.jinja"}
WITH_REAL_WORDS = ("gsm8k_tool",)
SMALL = (
    *("num_threads=1", "engine.kind=embedded", "engine.launch=null", "engine.num_slots=16", "model.dtype=float32"),
    *("train.distributed.ranks=1", "train.groups_per_step=2", "train.group_size=2", "train.max_tokens_per_batch=4096"),
)
QUICK = "gsm8k_tool"
"""The recipe that `make test` dry-runs and trains; the others are slow."""
PROCESSOR = """
from support.vision import tiny_processor


def processor(tokenizer):
    return tiny_processor(tokenizer)
"""


def problems(folder: Path) -> Path:
    """Return a folder with GSM8K's files: the real ones cut to 8 problems each, or made-up ones."""
    folder.mkdir()
    for split in ("train", "test"):
        real = SHARED / "gsm8k" / f"{split}.jsonl"
        lines = real.read_text().splitlines()[:8] if real.is_file() else []
        made = [json.dumps({"question": f"What is {i} + 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"}) for i in range(8)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines or made))
    return folder


def figures(folder: Path) -> Path:
    """Return a folder with problems in the form of Geometry3K."""
    folder.mkdir()
    for split in ("train", "test"):
        rows = []
        for i in range(8):
            data = io.BytesIO()
            Image.new("RGB", (56, 56), (30 * i, 90, 60)).save(data, "PNG")
            images = [{"bytes": data.getvalue(), "path": None}]
            rows.append({"images": images, "problem": "<image>Find x.", "answer": str(i)})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


def questions(folder: Path) -> Path:
    """Return a folder with questions in the form of nq_hotpotqa_train."""
    folder.mkdir()
    rows = [{"question": f"Who wrote book {i}?", "golden_answers": [f"Writer {i}"], "data_source": "nq"} for i in range(8)]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


SOURCES = {"gsm8k": problems, "geo3k": figures, "search": questions}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save tiny models, each with a tokenizer and a chat template; "real_…" have Qwen's where they are at hand."""
    base = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    for kind, template in TEMPLATES.items():
        tiny_model(tokenizer, kind, hidden=16, layers=1).save_pretrained(base / kind)
        tokenizer.save_pretrained(base / kind)
        if SHARED.is_dir():
            real = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2")
            real.chat_template = (SHARED / "chat_templates" / template).read_text()
            tiny_model(real, kind, hidden=16, layers=1).save_pretrained(base / f"real_{kind}")
            real.save_pretrained(base / f"real_{kind}")
    seeing = vision_tokenizer(chat_template=VISION_TEMPLATE)
    tiny_vision_model(seeing, layers=1, max_positions=8192).save_pretrained(base / "vision")
    seeing.save_pretrained(base / "vision")
    (base / "stand_ins.py").write_text(PROCESSOR)
    return {p.name: p for p in base.iterdir()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write every recipe's data by the command that its README names."""
    base = tmp_path_factory.mktemp("data")
    raw = {name: make(base / f"raw_{name}") for name, make in SOURCES.items()}
    for recipe, command in WITH_DATA.items():
        words = shlex.split(command)
        words[words.index("--out") + 1] = str(base / recipe)
        done = call_command(main, *words, "--from", raw[words[1]])
        assert done.code == 0, done.err
    return {recipe: base / recipe for recipe in WITH_DATA}


def overrides(recipe: str, models: dict[str, Path], data: dict[str, Path], *above: str) -> list[str]:
    """Return `above` and the overrides that replace the real model, data and machine."""
    path = load_config(RunConfig, RECIPES / f"{recipe}.yaml", above).config.model.path
    assert path is not None
    kind = "vision" if "-VL-" in path else "qwen3" if "Qwen3" in path else "qwen2"
    if recipe in WITH_REAL_WORDS and f"real_{kind}" in models:
        kind = f"real_{kind}"
    given = [*above, f"model.path={models[kind]}"]
    if recipe in data:
        given += [f"data.train.files={data[recipe]}/train.parquet", f"evaluation.data.files={data[recipe]}/test.parquet"]
    if recipe == "shop":
        given += ["data.train.kwargs.num_tasks=8", "evaluation.data.kwargs.num_tasks=2"]
        user = "{model: policy, max_tokens: 16, max_user_turns: 2, stop_marker: null}"  # no endpoint here
        name = "polyturn.interactions.simulated_user.SimulatedUser"
        given.append(f"rollout.interactions=[{{name: customer, class_name: {name}, config: {user}}}]")
    if kind == "vision":
        given.append(f"model.processor={models['stand_ins.py']}:processor")
    return [*given, *SMALL]


@pytest.mark.parametrize("recipe", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in NAMES])
def test_recipe_dry_runs(recipe: str, models: dict[str, Path], data: dict[str, Path]) -> None:
    needs(recipe)
    done = call_command(main, "train", RECIPES / f"{recipe}.yaml", "--dry-run", *overrides(recipe, models, data))
    assert done.code == 0, done.err
    assert f"{4000 if recipe == 'games' else 8} to train on" in done.out


def needs(recipe: str) -> None:
    """Skip a recipe whose environment is not installed."""
    if recipe == "games":
        pytest.importorskip("textarena")
    if recipe == "sandbox" and find_isolation()[0] is Isolation.NONE:
        pytest.skip(f"code cannot be isolated here: {find_isolation()[1]}")


@pytest.mark.parametrize("recipe", [name for name in NAMES if name != "vision"])
def test_ranks_and_servers_have_a_gpu_each(recipe: str) -> None:
    config = load_config(RunConfig, RECIPES / f"{recipe}.yaml", [str(RECIPES / "eight_gpus.yaml")]).config
    plan = device_plan(config)
    assert [plan[f"rank {n}"] for n in range(4)] == [f"GPU {n}" for n in range(4)]
    assert [plan[f"server {n}"] for n in range(4)] == [f"GPU {n}" for n in range(4, 8)]
    assert "shared" not in plan


@pytest.mark.parametrize(
    ("name", "layout", "line"),
    [
        pytest.param(
            "Qwen/Qwen2.5-7B-Instruct", "eight_gpus", "each GPU of a server, at least: weights", marks=pytest.mark.slow
        ),
        pytest.param("Qwen/Qwen3-8B", "eight_gpus", "GPU 7", marks=pytest.mark.slow),
        ("Qwen/Qwen3-8B", "eight_gpus_shared", "each GPU in an update: total"),
    ],
)
def test_plan_of_a_large_model_needs_no_weights(
    name: str, layout: str, line: str, models: dict[str, Path], data: dict[str, Path], tmp_path: Path
) -> None:
    """The folder has no weights, and vLLM need not be installed."""
    config = AutoConfig.for_model(**PUBLISHED[name])
    config.save_pretrained(tmp_path / "large")
    tiny_tokenizer().save_pretrained(tmp_path / "large")
    above = [str(RECIPES / file) for file in ("qwen3.yaml", f"{layout}.yaml")]
    given = [f"model.path={tmp_path / 'large'}"]
    given += [f"{key}.files={data['gsm8k_tool']}/test.parquet" for key in ("data.train", "evaluation.data")]
    done = call_command(main, "train", RECIPES / "gsm8k_tool.yaml", "--dry-run", *above, *given)
    assert done.code == 0 or "would not start on this machine" in done.err, done.err
    counted = {"Qwen/Qwen2.5-7B-Instruct": "7.62 B", "Qwen/Qwen3-8B": "8.19 B"}[name]
    lines = (counted, "rank 3", "server 3", line, "not measured")
    assert [words for words in lines if words not in done.out] == []
    assert "the allocator keeps" not in done.out  # which a CPU has, and these name GPUs


@pytest.fixture
def retrieval() -> Iterator[str]:
    """A retrieval server that finds the same passage for every query."""
    passage = {"document": {"contents": "Books\nWriter 1 wrote it."}, "score": 1.0}
    with scripted_server(lambda path, asked: {"result": [[passage] for _ in asked["queries"]]}) as url:
        yield f"{url}/retrieve"


@pytest.mark.parametrize("recipe", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in NAMES])
def test_recipe_takes_an_optimizer_step(
    recipe: str,
    models: dict[str, Path],
    data: dict[str, Path],
    tmp_path: Path,
    retrieval: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(recipe)
    monkeypatch.setenv("RETRIEVAL_URL", retrieval)
    config = RECIPES / f"{recipe}.yaml"
    above = [str(RECIPES / "qwen3.yaml")] if recipe == "gsm8k_tool" else []
    talks = recipe in ("gsm8k_user", "thinking_tips")  # long enough turns that some end by themselves
    done = call_command(
        main,
        "train",
        config,
        *overrides(recipe, models, data, *above),
        *(f"out={tmp_path}", "train.steps=1", "evaluation.before=false", "evaluation.limit_during=1"),
        *(f"rollout.limits.max_tokens_per_turn={300 if talks else 16}", "rollout.limits.max_turns=2"),
        *("rollout.limits.max_context=3072", "algorithm.drop_zero_variance=false", f"train.group_size={4 if talks else 2}"),
    )
    assert done.code == 0, done.err
    run = tmp_path / recipe
    steps = trained_steps(run)
    assert len(steps) == 1 and np.isfinite(steps[0]["loss/total"])
    assert steps[0]["rollout/failed"] == 0
    trained = list(open_store(run).trajectories(split="train"))
    assert len(trained) == (8 if talks else 4)
    if talks:
        answered = [t for t in trained if len(t.turns) == 2]
        assert answered and all(t.turns[0].observation[0].role == "user" for t in answered)
    if recipe == "vision":
        assert all(any(part["type"] == "image" for part in t.task.prompt[-1].content) for t in trained)
