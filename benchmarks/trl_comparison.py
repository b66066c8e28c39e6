"""Compares samples per second of multi-turn GRPO with a tool to TRL's GRPOTrainer, or ms-swift's.

    python benchmarks/trl_comparison.py                                    both games, two interleaved rounds
    python benchmarks/trl_comparison.py --threads 2                        two threads for torch on both sides
    python benchmarks/trl_comparison.py --model smollm2 --threads 2        SmolLM2-135M, a real model, in two other games
    python benchmarks/trl_comparison.py --model smollm2 --causes           also polyturn without one of its savings
    python benchmarks/trl_comparison.py --peer ms_swift                    against ms-swift
    python benchmarks/trl_comparison.py --sizes small --games even         a model of 5 M parameters in place of 0.3 M
    python benchmarks/trl_comparison.py --quick                            one short round of one game, to see that it runs

Both sides have the same model, tokens and batch. The model first memorizes the game of `_trl_game.py`, or, if it is a real
model, learns a few products with a calculator, so that both sides sample turns of the same lengths at temperature 1 and call
the same tool equally often. Then the sides alternate, and each trains for a few optimizer steps in a new process. The figure
is the median wall time of a step after the first two, with generation, tool calls, rewards and update. CPU seconds are
compared too, for shared machines. Both sides also give the seconds of generation in a step (`generate_s`) and the number of
positions, with padding, in the trainer's passes (`positions`). `--causes` trains again without shared prefixes, and with
rewards for right answers, so that groups with equal rewards are left out; otherwise rewards are random and every group is
trained. The peer runs in its environment of `scripts/environments/build.py`, with the same torch
and the micro-batch that is fastest for it (the first round tries several). Prints one JSON line. The comparison fails if
tokens or calls per sample differ by more than 3 % (even, calculator) or 10 % (ragged, sums).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from polyturn.training.observer_base import Observer

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "scripts" / "environments" / "build.py"
PLUGINS = "_trl_plugins.py"
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 256},
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "head_dim": 64, "intermediate_size": 768},
}
GROUPS, GROUP_SIZE, LR, WARM_STEPS = 4, 8, 1e-6, 2
SHARPER = 3.0
TARGET = 3.0
CLOCKS = ("wall", "cpu")
MOST_APART = {"even": 0.03, "ragged": 0.10, "calculator": 0.03, "sums": 0.10}
CAUSES: Mapping[str, Mapping[str, Any]] = {
    "no_shared_prefixes": {"train": {"layout": {"shared_prefix": "off"}}},
    "equal_rewards_left_out": {
        "reward": {"routes": {"boxes": f"{PLUGINS}:by_product"}},
        "algorithm": {"drop_zero_variance": True},
    },
}
"""Run of `--causes` -> the sections of the configuration that differ from the compared run."""
GAMES = {"random": ("even", "ragged"), "smollm2": ("calculator", "sums")}
QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "POLYTURN_LOG_LEVEL": "WARNING",
}


def config_of(*, model: Path, steps: int, size: str | None = None) -> dict[str, Any]:
    """Return a run's configuration: to train the one in `model`, or with a `size` to make it there."""
    import _trl_game as game

    is_real = size == "smollm2"
    if size in SIZES:
        shape = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES[size]}
        source: dict[str, Any] = {
            "init": {**shape, "max_position_embeddings": 2048, "tie_word_embeddings": True},
            "tokenizer": {"corpus": f"{PLUGINS}:corpus", "vocab_size": 300},
            "chat_template": str(model / "chat_template.jinja"),
        }
    elif is_real:
        source = {"path": size, "chat_template": str(model / "chat_template.jinja")}
    else:
        source = {"path": str(model)}
    return {
        "num_threads": int(os.environ["OMP_NUM_THREADS"]),
        "model": source,
        "data": {"train": {"generator": f"{PLUGINS}:tasks"}},
        "rollout": {
            "tools": {"functions": [f"{PLUGINS}:{tool.__name__}" for tool in game.tools()]},
            "limits": {"max_turns": 9, "max_tokens_per_turn": game.max_tokens(), "max_context": 2048},
        },
        "engine": {"num_slots": GROUPS * GROUP_SIZE},
        "reward": {"routes": {"boxes": f"{PLUGINS}:by_chance"}},
        "algorithm": {"drop_zero_variance": False},
        "warm_start": {
            "conversations": f"{PLUGINS}:demonstrations",
            "kwargs": {"num_conversations": 128 if is_real else 512},
            "steps": 16 if is_real else 150,
            "batch_size": 8,
            "optim": {
                "lr": 5e-5 if is_real else 3e-3,
                "warmup_steps": 4 if is_real else 10,
                "schedule": "cosine",
                "betas": [0.9, 0.98],
            },
        },
        "train": {
            "steps": steps,
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "optim": {"lr": LR, "weight_decay": 0.0},
        },
    }


def make_model(size: str, folder: Path) -> float:
    """Train a model until it knows the game, save it, and return the seconds.

    Args:
        size: A name in `SIZES`, which starts from random weights, or `smollm2`.
        folder: The folder to write the model to.
    """
    import _trl_game as game
    import torch

    from polyturn import build
    from polyturn.config.models import RunConfig
    from polyturn.tokens.train import CHAT_TEMPLATE
    from polyturn.training import hf
    from polyturn.training.options import SftOptions
    from polyturn.training.sft import run_sft

    folder.mkdir(parents=True)
    # The libraries render a tool's schema differently; with only its name, both prompts are the same.
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{{- tool | tojson", "{{- tool.function.name"))
    began = time.perf_counter()
    source = build.ConfigSource(config=RunConfig.model_validate(config_of(model=folder, steps=1, size=size)), base=HERE)
    parts, sft = build.build_parts(source), source.config.warm_start
    if game.kind() != "sums":
        policy = build.build_policy(parts, sft.optim.over(sft.steps), max_tokens_per_batch=sft.max_tokens_per_batch)
        run_sft(policy, build.warm_start_samples(parts), SftOptions(steps=sft.steps, batch_size=sft.batch_size))
    if size in SIZES:
        with torch.no_grad():  # larger logits: at temperature 1 almost every sampled token is the memorized one
            parts.model.get_parameter("model.norm.weight").mul_(SHARPER)
    hf.save_model(parts.model, folder, tokenizer=parts.context.codec.tokenizer)
    return time.perf_counter() - began


@dataclass
class Clock(Observer):
    """An observer that records the seconds between the ends of steps, and the tokens and calls of each step."""

    last: tuple[float, float] = (0.0, 0.0)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.last = time.perf_counter(), time.process_time()

    def on_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Any], trained: Any = None) -> None:
        """Record the seconds, tokens and calls of the step."""
        now = time.perf_counter(), time.process_time()
        self.wall_s.append(now[0] - self.last[0])
        self.cpu_s.append(now[1] - self.last[1])
        self.generate_s.append(metrics["time/generate_s"])
        self.positions.append(metrics.get("tokens/processed", 0.0) / (1 - metrics.get("tokens/padding_share", 0.0)))
        trajectories = [t for group in groups for t in group.trajectories]
        self.sampled.append(mean(t.num_sampled_tokens for t in trajectories))
        self.calls.append(mean(sum(len(turn.tool_results) for turn in t.turns) for t in trajectories))
        self.start()


def train_here(model: Path, steps: int, cause: str | None) -> dict[str, Any]:
    """Train `model` for `steps` in this process, perhaps with the settings of a cause; return the figures of the steps."""
    from polyturn import build
    from polyturn.config.models import RunConfig

    values = config_of(model=model, steps=steps)
    for section, changed in CAUSES[cause].items() if cause else ():
        values[section] = values[section] | changed
    source = build.ConfigSource(config=RunConfig.model_validate(values), base=HERE)
    parts, tasks = build.build_parts(source), build.build_run_tasks(source)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build.build_trainer(parts, tasks, folder=Path(folder), observer=clock)
        clock.start()
        asyncio.run(trainer.run())
    return {
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "generate_s": clock.generate_s,
        "positions": clock.positions,
        "sampled_per_sample": clock.sampled,
        "calls_per_sample": clock.calls,
        "samples": GROUPS * GROUP_SIZE,
    }


def in_process(command: Sequence[str], *, kind: str = "even", seed: int = 0, threads: int = 1) -> dict[str, Any]:
    """Run one side in a new process and return the JSON of its last line."""
    environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(threads), "GAME": kind, "GAME_SEED": str(seed)}
    done = subprocess.run(list(command), capture_output=True, text=True, env=environment, cwd=HERE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def compare(
    model: Path, *, kind: str, python: str, args: argparse.Namespace, micro_batches: Sequence[int]
) -> dict[str, Any]:
    """Return the samples per second of both sides over pairs of runs, and their ratio.

    Raises:
        SystemExit: the sides sampled different numbers of tokens or calls.
    """
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    theirs_command = [python, str(HERE / f"_{args.peer}_worker.py"), str(model), f"--groups={GROUPS}"]
    theirs_command += [f"--group-size={GROUP_SIZE}", f"--steps={args.steps}", f"--lr={LR}"]
    ours_command = [sys.executable, str(HERE / "trl_comparison.py"), "--train", str(model), f"--steps={args.steps}"]
    tried: dict[int, float] = {}
    for number in range(args.rounds):
        ours.append(in_process(ours_command, kind=kind, seed=number, threads=args.threads))
        _say("polyturn", ours[-1])
        for size in micro_batches if number == 0 else [min(tried, key=lambda k: tried[k])]:
            figures = in_process([*theirs_command, f"--micro-batch={size}"], kind=kind, seed=number, threads=args.threads)
            _say(f"{args.peer}, micro-batch {size}", figures)
            tried.setdefault(size, median(figures["wall_s"][WARM_STEPS:]))
            theirs.append({**figures, "micro_batch": size})
    best = min(tried, key=lambda k: tried[k])
    theirs = [figures for figures in theirs if figures["micro_batch"] == best]
    causes = {}
    for cause in CAUSES if args.causes else ():
        if cause != "equal_rewards_left_out" or kind in GAMES["smollm2"]:
            figures = in_process([*ours_command, f"--cause={cause}"], kind=kind, threads=args.threads)
            _say(cause, figures)
            causes[cause] = _figures([figures]) | {"step_s_ratio": round(1 / _ratio(figures, ours[0], "wall"), 2)}
    sides = {"polyturn": _figures(ours), args.peer: _figures(theirs)}
    for what in ("tokens_per_sample", "calls_per_sample"):
        apart = abs(sides["polyturn"][what] - sides[args.peer][what]) / max(sides[args.peer][what], 0.01)
        if apart > MOST_APART[kind]:
            raise SystemExit(f"{kind}: {what} of the sides are {apart:.1%} apart, so they cannot be compared: {sides}")
    return {
        **sides,
        "peer_micro_batch": best,
        **({"causes": causes} if causes else {}),
        "ratio": median(_ratio(a, b, "wall") for a, b in zip(ours, theirs, strict=True)),
        **{f"{clock}_ratio_of_rounds": [_ratio(a, b, clock) for a, b in zip(ours, theirs, strict=True)] for clock in CLOCKS},
    }


def _say(side: str, run: Mapping[str, Any]) -> None:
    """Print one run's seconds, so that an interrupted comparison leaves results."""
    print(f"{side}: {[round(s, 1) for s in run['wall_s']]} s a step", file=sys.stderr, flush=True)


def _ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any], clock: str) -> float:
    return round(median(theirs[f"{clock}_s"][WARM_STEPS:]) / median(ours[f"{clock}_s"][WARM_STEPS:]), 2)


def _figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    step_s = median(s for run in runs for s in run["wall_s"][WARM_STEPS:])
    return {
        "samples_per_s": round(runs[0]["samples"] / step_s, 2),
        "step_s": round(step_s, 3),
        "step_cpu_s": round(median(s for run in runs for s in run["cpu_s"][WARM_STEPS:]), 3),
        **{
            name: round(median(value for run in runs for value in run[name][WARM_STEPS:]), 1)
            for name in ("generate_s", "positions")
            if name in runs[0]
        },
        "tokens_per_sample": round(mean(n for run in runs for n in run["sampled_per_sample"]), 1),
        "calls_per_sample": round(mean(n for run in runs for n in run["calls_per_sample"]), 2),
    }


def interpreter_of(peer: str) -> str:
    """Return the interpreter of the peer's environment; build the environment if it is missing."""
    spec = importlib.util.spec_from_file_location("build_environments", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.build(peer))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round of the tiny model and the even game")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--causes", action="store_true", help="polyturn also without shared prefixes, and with real rewards")
    parser.add_argument("--peer", choices=("trl", "ms_swift"), default="trl")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides")
    parser.add_argument("--steps", type=int, default=5, help="of each run; the first two are not counted")
    parser.add_argument("--model", choices=sorted(GAMES), default="random", help="random weights, or a pretrained model")
    parser.add_argument("--models", type=Path, help="folder that keeps the models for another call")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["tiny"], help="of the model of random weights")
    parser.add_argument("--games", nargs="+", choices=sorted(MOST_APART), help="by default all games of the model")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cause", choices=sorted(CAUSES), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        print(json.dumps(train_here(args.train, args.steps, args.cause)))
        return
    if args.make is not None:
        print(json.dumps({"warm_start_s": round(make_model(args.make[0], Path(args.make[1])), 1)}))
        return
    if args.quick:
        args.rounds, args.steps, args.sizes, args.games = 1, 4, ["tiny"], GAMES[args.model][:1]
    games = args.games or GAMES[args.model]
    if strangers := sorted({*games} - {*GAMES[args.model]}):
        parser.error(f"--model {args.model} plays {' and '.join(GAMES[args.model])}, and not {' and '.join(strangers)}")
    python = interpreter_of(args.peer)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = args.models or Path(name)
        for size in args.sizes if args.model == "random" else [args.model]:
            model = None
            for kind in games:
                if model is None or args.model != "random":  # a pretrained model plays each game from its own weights
                    model = folder / f"{size}-{kind}"
                    if not model.exists():
                        command = [sys.executable, str(__file__), "--make", size, str(model)]
                        loaded = in_process(command, kind=kind, threads=args.threads)
                        print(f"{size}: learnt {kind} in {loaded['warm_start_s']} s", file=sys.stderr)
                micro = [GROUPS * GROUP_SIZE] if args.quick else [GROUPS * GROUP_SIZE, GROUP_SIZE]
                comparison = compare(model, kind=kind, python=python, args=args, micro_batches=micro)
                print(f"{size}, {kind}: {json.dumps(comparison)}", file=sys.stderr)
                results[f"{size}_{kind}"] = comparison
    worst = min(comparison["ratio"] for comparison in results.values())
    results |= {"peer": args.peer, "threads": args.threads, "worst_ratio": worst, "target": TARGET}
    print(json.dumps({"benchmark": "trl_comparison", **results}))


if __name__ == "__main__":
    main()
