"""An installed distribution offers an engine, an estimator, a loss, a tracker, an environment and a dialect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.tracking.jsonl import read_metrics
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)

PARTS = '''
import numpy as np
from polyturn.algorithms.losses import ppo_clip
from polyturn.config.dialect import ConfigDialect
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine
from polyturn.environments import Adapter
from polyturn.tracking.base import RunTracker


class Babbler(BaseEngine):
    """Says the first tokens of its vocabulary, with the logprob of a uniform policy."""

    def __init__(self, setup, *, first=10):
        super().__init__()
        self.vocab, self.first, self.version, self.num = setup.model.config.vocab_size, first, 0, 0

    @property
    def capabilities(self):
        return EngineCapabilities(seeded=True, logprobs=True, shares_weights=True, shares_loop=True)

    async def generate(self, request):
        with self.busy.running():
            self.num += 1
            ids = np.arange(4, dtype=np.int32) + self.first + self.num % 7
            return Completion(
                token_ids=ids,
                logprobs=np.full(4, -np.log(self.vocab), np.float32),
                finish_reason=FinishReason.LENGTH,
                policy_versions=((0, self.version),),
            )

    async def abort(self, request_id):
        pass

    async def update_weights(self, version, *, weights=None):
        self.version = version

    def read_metrics(self):
        return {"engine/babbled": float(self.num)}


def not_an_engine(setup):
    return 7


def centred(rewards_G, samples_G, *, scale=1.0):
    mean = np.mean(rewards_G)
    return [[np.where(s.loss_weights != 0, scale * (r - mean), 0.0) for s in of] for r, of in zip(rewards_G, samples_G)]


def doubled(logprobs_T, old_logprobs_T, advantages_T):
    found = ppo_clip(logprobs_T, old_logprobs_T, advantages_T)
    return found._replace(loss_T=2 * found.loss_T, stats={**found.stats, "doubled": found.loss_T.detach() * 0 + 1})


class Notes(RunTracker):
    def __init__(self, run, *, file):
        self.path = run.folder / file

    def log(self, step, values):
        with self.path.open("a") as file:
            file.write(f"{step} {values['reward/mean']}\\n") if "reward/mean" in values else None


class Quiet:
    """Ends when it is told something."""

    def reset(self, seed):
        return f"Say {seed}."

    def step(self, action):
        return "Thank you.", 1.0 if "a" in action else 0.25, True, False, {}

    def close(self):
        pass


class Rooms(Adapter):
    def make(self):
        return Quiet()


def train_terse(path, overrides, *, resume, dry_run):
    """`{steps: 1, like: config.yaml}` is a native run with so many steps."""
    import yaml

    from polyturn.cli.train import run

    told = yaml.safe_load(path.read_text())
    run(path.parent / told["like"], [f"train.steps={told['steps']}", *overrides], resume=resume, dry_run=dry_run)


TERSE = ConfigDialect(title="terse", usual_keys=frozenset({"like", "steps"}), train=train_terse)
'''

POINTS = {
    "polyturn.engines": {"babbler": "made_parts:Babbler", "seven": "made_parts:not_an_engine"},
    "polyturn.estimators": {"centred": "made_parts:centred"},
    "polyturn.losses": {"doubled": "made_parts:doubled"},
    "polyturn.trackers": {"notes": "made_parts:Notes"},
    "polyturn.environments": {"rooms": "made_parts:Rooms"},
    "polyturn.config_dialects": {"terse": "made_parts:TERSE", "odd": "made_parts:doubled"},
}


@pytest.fixture
def config(install: Callable[..., None], tmp_path: Path) -> Path:
    """A run beside an installed distribution."""
    install("made-plugins", POINTS, made_parts=PARTS)
    return for_any_engine(write_tiny_run(tmp_path))


def for_any_engine(config: Path) -> Path:
    """Leave out the settings that only the embedded engine has."""
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("engine:")))
    return config


def test_engine_estimator_loss_and_tracker_of_a_distribution(config: Path, tmp_path: Path) -> None:
    called = call(
        "train",
        config,
        "engine={kind: babbler, kwargs: {first: 20}}",
        "algorithm.advantage=centred",
        "algorithm.advantage={scale: 2.0}",
        "algorithm.loss=doubled",
        "tracking=[{name: notes, file: notes.txt}]",
        "train.steps=2",
    )
    assert called.code == 0, called.err
    [run] = (tmp_path / "runs").iterdir()
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss/total" in line]
    assert len(steps) == 2
    assert all(line["engine/babbled"] > 0 and line["policy/doubled"] == 1.0 for line in steps)
    assert len((run / "notes.txt").read_text().splitlines()) >= 2


def test_environment_of_a_distribution_is_played(config: Path, tmp_path: Path) -> None:
    plain = ["rollout.tools.functions=[]", "rollout.interactions=null", "data.train=null", "evaluation.data=null"]
    called = call("train", config, "env={name: 'rooms:quiet', tasks: 4}", *plain, "train.steps=1", "reward.routes={}")
    assert called.code == 0, called.err
    [run] = (tmp_path / "runs").iterdir()
    [line] = [line for line in read_metrics(run / "metrics.jsonl") if "reward/mean" in line]
    assert 0.25 <= line["reward/mean"] <= 1.0


def test_dialect_of_a_distribution_is_trained_and_recognised(config: Path, tmp_path: Path) -> None:
    told = tmp_path / "terse.yaml"
    told.write_text("{steps: 1, like: config.yaml}")
    called = call("train", "--terse", told, "engine.kind=babbler")
    assert called.code == 0, called.err
    assert len(list((tmp_path / "runs").iterdir())) == 1
    called = call("train", told)
    assert called.code == 2 and "has the keys of terse, not polyturn's; add --terse" in called.err
    called = call("config", "migrate", told)
    assert called.code == 2 and "which cannot be converted; train from it directly" in called.err
    called = call("train", "--terse", "--verl", told)
    assert called.code == 2 and "--terse and --verl are two dialects" in called.err
    called = call("train", "--dialect", "ters", told)
    assert called.code == 2 and "there is no 'ters'. Did you mean 'terse'" in called.err
    called = call("train", "--odd", told)
    assert called.code == 2 and "'odd', which made-plugins 1.0 offers" in called.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.kind=babler", ["engine.kind", "'babler'", "'babbler'"]),
        ("engine.kind=seven", ["'seven'", "made-plugins 1.0", "made_parts:not_an_engine"]),
        ("engine={kind: babbler, kwargs: {frist: 3}}", ["'babbler'", "'frist'", "'first'"]),
        ("engine={kind: seven, num_slots: 3}", ["engine.kind embedded", "'seven'"]),
        ("algorithm.advantage=centered", ["algorithm.advantage", "'centered'", "'centred'"]),
        ("algorithm.loss=double", ["algorithm.loss", "'doubled'"]),
        ("tracking=[{name: nots}]", ["tracking", "'notes'"]),
        ("env=room:quiet", ["'room'", "'rooms'"]),
    ],
)
def test_unknown_name_comes_with_the_nearest_installed(config: Path, override: str, words: list[str]) -> None:
    called = call("train", config, override)
    shown = " ".join(called.err.split())
    assert called.code == 2 and [word for word in words if word not in shown] == [], shown


def test_broken_distribution_is_one_sentence_with_its_name(install: Callable[..., None], tmp_path: Path) -> None:
    install("broken-plugins", {"polyturn.engines": {"broken": "broken_parts:x"}}, broken_parts="raise OSError('no card')")
    called = call("train", for_any_engine(write_tiny_run(tmp_path)), "engine.kind=broken")
    said = " ".join(called.err.split())
    assert called.code == 2 and "broken-plugins 1.0" in said and "OSError: no card" in said
    assert "Traceback" not in said
