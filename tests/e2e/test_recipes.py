"""The recipes of examples/recipes: every config loads and dry-runs, and one of each kind takes an optimizer step.

A tiny random model stands in for the real one, by `model.path`; what else is overridden is the size of the batch, the engine
and the number of ranks. GSM8K's real problems are used where they lie beside the checkout, and for two of the configs Qwen's
real vocabulary and templates, which take seconds to load.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from polyturn.cli.dry_run import device_plan
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.store.stored_run import open_store
from polyturn.testing.published import PUBLISHED
from polyturn.testing.tiny_models import tiny_model, tiny_tokenizer
from support.runs import call_command
from support.vision import VISION_TEMPLATE, tiny_vision_model, vision_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
SHARED = ROOT.parent / "shared" / "data"
CONFIGS = sorted(p for p in RECIPES.glob("*/*.yaml") if p.name != "tools.yaml")
FOLDERS = sorted({p.parent.name for p in CONFIGS})
TEMPLATES = {"qwen2": "qwen2_5.jinja", "qwen3": "qwen3.jinja"}
WITH_REAL_WORDS = ("gsm8k_tool/one_gpu", "gsm8k_interaction/qwen3_one_gpu")
SMALL = (
    *("num_threads=1", "engine.kind=embedded", "engine.launch=null", "engine.num_slots=16", "model.dtype=float32"),
    *("train.distributed.ranks=1", "train.groups_per_step=2", "train.group_size=2", "train.max_tokens_per_batch=4096"),
)
PROCESSOR = """
from support.vision import tiny_processor


def processor(tokenizer):
    return tiny_processor(tokenizer)
"""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


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
    for recipe in FOLDERS:
        command = re.search(r"^polyturn (data (?!index).*)$", (RECIPES / recipe / "README.md").read_text(), re.MULTILINE)
        assert command is not None, f"the README of {recipe} does not say how its data are made"
        words = shlex.split(command[1])
        words[words.index("--out") + 1] = str(base / recipe)
        done = call_command(main, *words, "--from", raw[words[1]])
        assert done.code == 0, done.err
    return {recipe: base / recipe for recipe in FOLDERS}


def overrides(config: Path, models: dict[str, Path], data: dict[str, Path]) -> list[str]:
    """Return what stands in for the real model, data and machine."""
    path = load_config(RunConfig, config, []).config.model.path
    assert path is not None
    kind = "vision" if "-VL-" in path else "qwen3" if "Qwen3" in path else "qwen2"
    if name_of(config) in WITH_REAL_WORDS and f"real_{kind}" in models:
        kind = f"real_{kind}"
    folder = data[config.parent.name]
    given = [f"model.path={models[kind]}", f"data.train.files={folder}/train.parquet"]
    given.append(f"evaluation.data.files={folder}/test.parquet")
    if kind == "vision":
        given.append(f"model.processor={models['stand_ins.py']}:processor")
    return [*given, *SMALL]


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_every_recipe_loads_and_dry_runs(config: Path, models: dict[str, Path], data: dict[str, Path]) -> None:
    done = call_command(main, "train", config, "--dry-run", *overrides(config, models, data))
    assert done.code == 0, done.err
    assert "8 to train on" in done.out


@pytest.mark.parametrize("config", [p for p in CONFIGS if "eight_gpus" in p.stem], ids=name_of)
def test_the_plan_of_devices_has_each_rank_and_server_and_says_what_is_shared(config: Path) -> None:
    loaded = load_config(RunConfig, config, []).config
    plan = device_plan(loaded)
    launch = loaded.engine.launch
    assert plan["rank 0"] == "GPU 0"
    assert len([name for name in plan if name.startswith("server")]) == (0 if launch is None else launch.replicas)
    if config.stem.startswith(("qwen2_5_7b", "qwen3_8b")):
        assert plan["rank 3"] == "GPU 3" and plan["server 0"] == "GPU 4" and "shared" not in plan
    elif launch is not None:
        assert "GPU 7 (rank 7, server 7)" in plan["shared"]


@pytest.mark.parametrize(("name", "billions"), [("Qwen/Qwen2.5-7B-Instruct", "7.62"), ("Qwen/Qwen3-8B", "8.19")])
def test_the_memory_of_the_largest_recipes_is_what_the_guide_says(name: str, billions: str) -> None:
    """Counted on the published config without weights: 16 bytes a parameter for bfloat16, masters, moments and gradients."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED[name]))
    parameters = sum(p.numel() for p in model.parameters())
    row = next(line for line in (ROOT / "docs/guides/scale.md").read_text().splitlines() if f"| {name} |" in line)
    assert f"{parameters / 1e9:.2f}" == billions
    cells = [f"{billions} B", f"{16 * parameters / 4 / 1e9:.0f} GB", f"{2 * parameters / 4 / 1e9:.0f} GB"]
    assert all(cell in row for cell in [*cells, f"{2 * parameters / 1e9:.0f} GB"])


@pytest.mark.parametrize("recipe", FOLDERS)
def test_eight_gpus_are_a_diff_of_at_most_five_lines(recipe: str) -> None:
    """Read as one file on top of the other: what the larger config says in lines of its own."""
    lines = (RECIPES / recipe / "eight_gpus.yaml").read_text().splitlines()
    said = [line for line in lines if line and not line.startswith("#")]
    assert len(said) <= 5
    config = load_config(RunConfig, RECIPES / recipe / "eight_gpus.yaml", []).config
    assert config.train.distributed.ranks == 8
    assert config.engine.launch is None or len(config.engine.launch.devices) == config.engine.launch.replicas == 8


@pytest.mark.parametrize("recipe", FOLDERS)
def test_the_readme_names_the_files_and_says_what_was_not_run(recipe: str) -> None:
    text = (RECIPES / recipe / "README.md").read_text()
    for path in CONFIGS:
        if path.parent.name == recipe:
            assert path.name in text
    assert "not been run on a GPU" in text


@pytest.fixture
def retrieval() -> Iterator[str]:
    """A retrieval server in a thread of its own, which finds the same passage for everything."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [[{"document": {"contents": "Books\nWriter 1 wrote it."}, "score": 1.0}] for _ in asked["queries"]]
            body = json.dumps({"result": found}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    thread.join()
    server.server_close()


STEPS = [(recipe, "qwen3_one_gpu" if recipe == "gsm8k_tool" else "one_gpu") for recipe in FOLDERS]
"""One config of each recipe: Qwen2.5 for one of the two on GSM8K, Qwen3 for the other."""


@pytest.mark.parametrize(("recipe", "name"), STEPS, ids=[f"{recipe}/{name}" for recipe, name in STEPS])
def test_each_recipe_takes_an_optimizer_step(
    recipe: str,
    name: str,
    models: dict[str, Path],
    data: dict[str, Path],
    tmp_path: Path,
    retrieval: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RETRIEVAL_URL", retrieval)
    config = RECIPES / recipe / f"{name}.yaml"
    talks = recipe in ("gsm8k_interaction", "thinking_tips")  # long enough turns that some end by themselves
    done = call_command(
        main,
        "train",
        config,
        *overrides(config, models, data),
        *(f"out={tmp_path}", "train.steps=1", "evaluation.before=false", "evaluation.data.limit=1"),
        *(f"rollout.limits.max_tokens_per_turn={300 if talks else 16}", "rollout.limits.max_turns=2"),
        *("rollout.limits.max_context=3072", "algorithm.drop_zero_variance=false", f"train.group_size={4 if talks else 2}"),
    )
    assert done.code == 0, done.err
    run = tmp_path / yaml.safe_load(config.read_text())["name"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss/total" in line]
    assert len(steps) == 1 and np.isfinite(steps[0]["loss/total"])
    assert steps[0]["rollout/failed"] == 0
    trained = list(open_store(run).trajectories(split="train"))
    assert len(trained) == (8 if talks else 4)
    if talks:
        answered = [t for t in trained if len(t.turns) == 2]
        assert answered and all(t.turns[0].observation[0].role == "user" for t in answered)
    if recipe == "vision":
        assert all(any(part["type"] == "image" for part in t.task.prompt[-1].content) for t in trained)
