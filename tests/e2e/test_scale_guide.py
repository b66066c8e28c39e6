"""docs/guides/scale.md: each step of the ladder is a diff, and its config loads and dry-runs.

A tiny random model and a handful of tasks stand in for the real ones, by overrides; everything else is the guide's.
"""

import json
import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.testing.tiny_models import tiny_tokenizer
from support.runs import call_command

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "scale.md"
STEPS = ["laptop", "one GPU", "eight GPUs", "Ray cluster"]
STAND_INS = [
    "model.path=null",
    "model.init={model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,"
    " head_dim: 8, intermediate_size: 32, max_position_embeddings: 2048, tie_word_embeddings: true}",
    "model.tokenizer={corpus: 'stand_ins.py:corpus', vocab_size: 300}",
    "data.train.files=tasks.jsonl",
    "evaluation.data.files=tasks.jsonl",
]


def applied(text, diff):
    """Apply a diff without line numbers: context and removed lines are searched from the previous match on."""
    lines, at = text.splitlines(), 0
    for change in diff.splitlines():
        sign, rest = change[0], change[1:]
        if sign == "+":
            lines.insert(at, rest)
            at += 1
            continue
        at = lines.index(rest, at)
        if sign == "-":
            del lines[at]
        else:
            at += 1
    return "\n".join(lines) + "\n"


def ladder():
    text = GUIDE.read_text().partition("## A laptop")[2]
    configs = [re.search(r"```yaml\n(.*?)```", text, re.DOTALL).group(1)]
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    for diff in diffs:
        configs.append(applied(configs[-1], diff))
    return dict(zip(STEPS, configs, strict=True))


CONFIGS = ladder()


@pytest.mark.parametrize("step", CONFIGS)
def test_each_config_dry_runs(step, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIGS[step])
    assert load_config(RunConfig, tmp_path / "run.yaml", []).config.model.path is not None
    (tmp_path / "stand_ins.py").write_text("def corpus():\n    return ['How many? #### 4', 'Think again.'] * 20\n")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + 2?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 2)},
            "extra_info": {"index": i, "interaction_kwargs": {"name": "gsm8k", "ground_truth": str(i + 2)}},
        }
        for i in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    on_cluster = ["--ray", "auto"] if step == "Ray cluster" else []
    done = call_command(main, "train", tmp_path / "run.yaml", *on_cluster, "--dry-run", *STAND_INS)
    assert done.code == 0 or "would not start on this machine" in done.err, done.err
    assert "episodes" in done.out


SIZES = {
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 151936),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 151936),
    "meta-llama/Llama-3.1-8B-Instruct": (4096, 14336, 32, 32, 128256),
}
"""Hidden width, that of the feed-forward layers, layers, heads and vocabulary, as their configs on the hub have them."""
PLANS = re.findall(r"```console\n\$ polyturn (train .*--dry-run.*)\n([^`]*)```", GUIDE.read_text())
"""Commands and their output; the guide leaves out lines."""


@pytest.mark.parametrize(("command", "printed"), PLANS, ids=["8 shared GPUs", "long", "32 GPUs", "8 GPUs"])
def test_plans_print_the_lines_of_the_guide(command, printed, tmp_path, monkeypatch):
    (name,) = re.findall(r"model\.path=(\S+)", command)
    width, inner, layers, heads, vocab = SIZES[name]
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    same = {"vocab_size": vocab, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    Qwen3Config(**sizes, **same, tie_word_embeddings=False).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.chdir(GUIDE.parents[2] / "examples" / "recipes")
    done = call_command(main, *command.replace(name, str(tmp_path)).split())
    assert done.code == 0, done.err
    lines = iter(first_words(done.out))
    assert [line for line in first_words(printed) if line not in lines] == []  # in this order


def first_words(text):
    """Return the first words of each line of a plan; its numbers may change."""
    return [line.split()[:2] for line in text.split("\n") if line.strip()]


def test_batch_smaller_than_the_ranks_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIGS["laptop"])
    done = call_command(main, "train", tmp_path / "run.yaml", "--nproc", 64, "--dry-run")
    assert done.code == 2
    assert "a batch of 32 trajectories" in done.err and "smaller than the 64 ranks" in done.err
