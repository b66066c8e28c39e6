"""The quickstart's own tool and interaction work as written; every documented command exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from polyturn.cli.main import main
from polyturn.config.models import DataConfig, RolloutConfig
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.data.dataset import TaskDataset
from polyturn.infra.plugins import import_attr
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from support.runs import call_command, write_tiny_run

ROOT = Path(__file__).parents[2]
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


def block(language: str, *, beginning: str) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", QUICKSTART, re.DOTALL) if b.startswith(beginning)]
    assert len(found) == 1, f"the quickstart has {len(found)} {language} blocks that begin with {beginning!r}"
    return str(found[0])


async def test_quickstart_tool_and_interaction_run(tmp_path: Path):
    code, config = block("python", beginning="# shop.py"), block("yaml", beginning="# config.yaml")
    (tmp_path / "shop.py").write_text(code)
    (tmp_path / "tasks.jsonl").write_text(block("json", beginning='{"prompt"'))
    read = yaml.safe_load(config)
    data, rollout = DataConfig(**read["data"]), RolloutConfig(**read["rollout"])
    assert data.train.files is not None

    tasks: list[Task] = list(TaskDataset.open(data.train.files, split="train", base=tmp_path))
    tools = [import_attr(name, base=tmp_path) for name in rollout.tools.functions]
    interactions = initialize_interactions_from_config({"interaction": rollout.interactions}, base=tmp_path)
    calls = ["lampe", "lamp"]
    says = [f'<tool_call>\n{{"name": "price", "arguments": {{"item": "{item}"}}}}\n</tool_call>' for item in calls]
    context = scripted_context(["It costs 41.", *says, "It costs 40."], tools=tools, interactions=interactions)
    t = await run_episode(context, tasks[0], id="e")

    observed: list[Message] = [m for turn in t.turns for m in turn.observation]
    assert [m.role for m in observed] == ["user", "tool", "tool", "user"]
    assert "no item 'lampe'" in observed[1].text, "a tool's own error is what the model reads"
    assert observed[2].text == "40"
    assert t.turns[0].info == {"answer": "It costs 41."}
    assert t.reward.total == 1.0


SHORT = ["rollout.limits.max_tokens_per_turn=8", "num_threads=1"]


@pytest.mark.parametrize("more", [["--dry-run"], []], ids=["dry run", "training"])
def test_quickstart_trains_when_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]):
    """With two steps, and a tiny model in place of the downloaded one."""
    (tmp_path / "tiny").mkdir()
    tiny = write_tiny_run(tmp_path / "tiny")
    made = call_command(main, "train", tiny, "train.steps=1", "model.init.max_position_embeddings=4096")
    assert made.code == 0, made.err
    model = next((tmp_path / "tiny").rglob("step-*/model"))
    folder = tmp_path / "pasted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, language, beginning in (
        ("shop.py", "python", "# shop.py"),
        ("config.yaml", "yaml", "# config.yaml"),
        ("tasks.jsonl", "json", '{"prompt"'),
    ):
        Path(name).write_text(block(language, beginning=beginning))
    done = call_command(main, "train", "config.yaml", f"model.path={model}", "train.steps=2", *SHORT, *more)
    assert done.code == 0, done.err
    assert ("What does the lamp cost?" in done.out) == bool(more)


def test_documented_commands_exist():
    from polyturn.cli import config, data
    from polyturn.cli import main as command_line

    known = {name for name in command_line.COMMANDS if name not in ("data", "config")}
    for group in (config.main, data.main):
        # `polyturn config` alone is the group's command "print"
        known |= {f"{group.name} {name}".removesuffix(" print") for name in group.commands}
    named = set(re.findall(r"^\| `polyturn ((?:data|config) [a-z]\w+|[a-z-]+)", COMMANDS, re.MULTILINE))
    assert named == known
