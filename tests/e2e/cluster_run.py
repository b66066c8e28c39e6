"""A tiny run for tests of many processes: every first turn calls a tool, and the tool records each of its runs.

A random model would never write a call, so the run's own parser reads any text as a call.
"""

import json

from transformers import AutoModelForCausalLM

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from support.runs import call_command, write_tiny_run

PLUGINS = '''

import os
import time
from pathlib import Path

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedTurn

HERE = Path(__file__).parent


class Always:
    """Reads every text as a call of `shout`."""

    def parse(self, text, *, id_prefix="call", tools=()):
        words = "squeak" if id_prefix == "call_0" else "squeak again"
        call = ToolCall(id=f"{id_prefix}_0", name="shout", arguments={"text": words}, raw=text)
        return ParsedTurn(text, (call,))


@polyturn.tool
def shout(text: str) -> str:
    """Say something loudly.

    Args:
        text: What to say.
    """
    with (HERE / "calls.log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    if text == "squeak again" and (HERE / "hold").exists():
        with (HERE / "held.log").open("a") as log:
            log.write(f"{os.getpid()}\\n")
        while (HERE / "hold").exists():
            time.sleep(0.01)
    if (HERE / "slow").exists():
        time.sleep(0.3)
    return text.upper()


def score(trajectory):
    return sum(map(int, trajectory.segments[0].token_ids)) % 7 / 7
'''


def write_run(folder):
    """Write the run; return its config."""
    config = write_tiny_run(folder)
    plugins = folder / "plugins.py"
    plugins.write_text(plugins.read_text() + PLUGINS)
    text = config.read_text().replace("rollout:\n", 'rollout:\n  parser: "plugins.py:Always"\n  sanity_every: 0\n')
    text = text.replace("data: {files: tasks.jsonl, limit: 2}", "before: false")
    # Only a turn that ends by itself is read as a tool call: this much training teaches to end turns.
    text = text.replace(
        "  conversations: conversations.jsonl", "  conversations: conversations.jsonl\n  steps: 30\n  optim: {lr: 0.01}"
    )
    config.write_text(text.replace("max_tokens_per_turn: 6", "max_tokens_per_turn: 24"))
    return config


def assert_each_call_ran_once(folder, name):
    """Compare the runs of the tool, all in one process, with the calls in the run's trajectories."""
    ran = [int(line) for line in (folder / "calls.log").read_text().split()]
    trajectories = list(open_store(folder / "runs" / name).trajectories())
    recorded = sum(len(turn.tool_results) for t in trajectories for turn in t.turns)
    assert len(ran) == recorded > 0
    assert len(set(ran)) == 1


def metrics_of(run):
    """Return the metrics of each step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss/grad_norm" in line]


ADAPTER = ["model.lora={rank: 2, alpha: 8}", "algorithm.kl.coef=0.01", "train.optim.lr=1e-2"]


def assert_adapter_trained(folder):
    """Check a run with ADAPTER: it learns from the engine's own samples, and its export has the adapter merged."""
    run = folder / "runs" / "tiny"
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["loss/grad_norm"] > 0 for step in steps)
    assert abs(steps[0]["policy/kl_to_reference"]) < 1e-4 < abs(steps[1]["policy/kl_to_reference"])
    assert all(step["policy/rollout_difference_max"] < 1e-4 for step in steps), "the engine samples with the adapter"
    assert (run / "checkpoints" / "step-000003" / "model" / "adapter_model.safetensors").is_file()
    exported = call_command(main, "export", run, "-o", folder / "exported")
    assert exported.code == 0, exported.err
    whole = AutoModelForCausalLM.from_pretrained(folder / "exported")
    assert not any("lora" in name for name in whole.state_dict()), "merged"
