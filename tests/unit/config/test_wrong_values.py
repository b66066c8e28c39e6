"""A mistake in a run's configuration is one sentence with the key, the value and what to write: one table for all keys.

Other packages test only that this sentence reaches the user. How files and overrides are read is in `test_load.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from polyturn.algorithms.estimator_options import NamedEstimatorOptions
from polyturn.algorithms.loss_options import NamedLossOptions
from polyturn.config.load import load_config, schema_table
from polyturn.config.models import RunConfig
from polyturn.config.schema import keys_of, kinds_of
from polyturn.config.unknown import RETIRED
from polyturn.core.errors import ConfigError
from polyturn.infra.plugins import import_attr

GUEST = {"policies": {"guest": {"model": {"path": "y"}}}}
WRONG = [
    # unknown keys of parts and sections, with the nearest
    ("train.stesp=3", "'train.stesp' 3 'train.steps'?"),
    ("train.lr=0.1", "'train.lr' mean 'train.optim.lr'"),
    ("optim.lr=1e-5", "'train.optim'"),
    ("grop_size=8", "'train.group_size'?"),
    ("rollout.max_turn=3", "'rollout.limits.max_turns'"),
    ("tran.steps=3", "'train'"),
    ("learning_rate=3e-5", "train.optim.lr=3e-05"),
    ("train.num_generations=4", "train.group_size=4"),
    ("train.batch_size=8", "train.groups_per_step=8 or train.group_size=8"),
    ("bf16=true", "model.dtype=bfloat16"),
    ("train.optim.beta=0.1", "'train.optim.betas'"),
    ("algorithm.advantage={name: gae, lma: 0.9}", "'algorithm.advantage.lam'?"),
    ("rollout.parser={name: hermes, reasonning: qwen3}", "mean 'rollout.parser.reasoning'"),
    ("train.optim.schedule={name: cosine, min_lr: 0.1}", "'train.optim.schedule.min_lr_ratio'?"),
    # keys of another kind of part
    ("engine.launch.replicas=2", "'engine.launch' engine.kind vllm or sglang 'embedded'"),
    ("engine={kind: vllm, num_slots: 8}", "'engine.num_slots' engine.kind embedded 'vllm'"),
    ("engine={kind: mine, max_in_flight: 8}", "'engine.max_in_flight' vllm or sglang 'mine'"),
    ("engine.kwargs={first: 3}", "'engine.kwargs' engine.kind own 'embedded'"),
    ("algorithm.advantage.lam=0.9", "algorithm.advantage.name gae or turn_gae or bilevel_gae"),
    # keys of another section
    ("data.train.path=tasks.jsonl", "'data.train.path' 'tasks.jsonl' 'model.path' data.train has 'files',"),
    ("train.checkpoint=5", "'train.checkpoint' 5 mean 'train.checkpoint_every'?"),
    ("train.save_every=5", "'train.save_every' 5 write train.checkpoint_every=5"),
    ("algorithm.norm_length=9", "'algorithm.aggregate.norm_length'?"),
    ("algorithm.clip_low=0.1", "mean 'algorithm.loss.clip_low'?"),
    ("policies.guest.model.reference=x", "'policies.guest.model.reference' 'model.reference'?"),
    # keys and values of former versions
    ("algorithm.kl_estimator=k1", "'algorithm.kl_estimator' 'k1' no longer write algorithm.kl.estimator"),
    ("engine.order=fifo", "'engine.order' 'fifo' no longer remove order of arrival"),
    ("warm_start.optim.warmup_ratio=0.1", "'warm_start.optim.warmup_ratio' no longer warmup_steps"),
    (
        "reward.routes={own/*: {name: 'a.py:f', kwargs: {bonus: 1}}}",
        "'reward.routes.own/*.kwargs' no longer beside the name",
    ),
    ("rollout.tools.breaker.min_episodes=2", "'rollout.tools.breaker.min_episodes' no longer remove"),
    ("policies.guest={model: {path: y}, train: true}", "'policies.guest.train' no longer a run trains one policy"),
    ("reward.batch.wait_s=null", "reward.batch.wait_s None no longer such as 1.0"),
    ("engine={kind: vllm, weights: shared_memory}", "engine.weights 'shared_memory' no longer use folder"),
    ("engine={kind: vllm, weights: disk}", "engine.weights 'disk' use folder, with engine.weights_folder"),
    ("engine={kind: vllm, weights: http}", "engine.weights 'http' use gloo"),
    ("engine={kind: vllm, weights: group}", "engine.weights 'group' use nccl between GPUs, or gloo"),
    # values of another type or form
    ("train.steps=many", "train.steps 'many' whole number"),
    ("train.steps=1.5", "train.steps 1.5 whole number"),
    ("train.optim.lr=fast", "train.optim.lr 'fast' it must be a number"),
    ("train.group_size=0", "train.group_size 0 at least 1"),
    ("train.group_size=yes", "train.group_size True"),
    ("rollout.sampling={top_p:0.9}", "'rollout.sampling.top_p:0.9' override space colon write top_p: 0.9"),
    ("rollout.scheduler_kwargs={a:{b:1}}", "'rollout.scheduler_kwargs.a.b:1' space colon write b: 1"),
    ("algorithm.loss=5", "algorithm.loss 5"),
    ("algorithm.advantage={name: gae, lam: x}", "algorithm.advantage.lam 'x'"),
    ("algorithm.aggregate=tokenmean", "algorithm.aggregate 'tokenmean' override"),
    ("algorithm.aggregate={name: tokenmean}", "algorithm.aggregate.name 'tokenmean'"),
    ("train.optim.schedule=cosinus", "train.optim.schedule 'cosinus'"),
    ("train.layout=dense", "train.layout 'dense'"),
    ("algorithm.advantage={name: hierarchical_grpo, within: solver}", "algorithm.advantage.within must be a list [solver]"),
    ("rollout={min_concurrent: 9, max_concurrent: 8}", "rollout min_concurrent 9 max_concurrent 8"),
    ("train.layout={shared_prefix: on}", "train.layout.shared_prefix"),
    ("engine.update=sleeping", "engine.update 'sleeping'"),
    ("engine=5", "engine 5"),
    ("evaluation.sets={a: {sampling: 5}}", "evaluation.sets.a.sampling 5"),
    ("reward.sandbox={a: b}", "'reward.sandbox.a'"),
    ("model.lora={target_modules: [1]}", "model.lora.target_modules.0 1"),
    ("evaluation=null", "evaluation None section remove it"),
    ("model=Qwen/x", "model section {path:"),
    ("data.train=rows.jsonl", "data.train section {files:"),
    ("data.train=[rows.jsonl]", "data.train section {files:"),
    ("rollout.tools=['a.py:b']", "rollout.tools section {functions:"),
    ("tracking=wandb", "tracking list [wandb]"),
    ("rollout.interactions={name: a}", "rollout.interactions {'name': 'a'} [{…}]"),
    ("model={init: {}, tokenizer: {corpus: [a b c]}}", "model.tokenizer.corpus ['a b c'] returns file.py:function"),
    ("name=off", "name YAML quotes"),
    ("name=5", "name 5 quotes"),
    # values out of their range
    ("train.optim.warmup_steps=.inf", "train.optim.warmup_steps inf"),
    ("train.optim.betas=[0.9, 1.0]", "train.optim.betas.1 1.0"),
    ("train.optim.eps=-1", "train.optim.eps -1"),
    ("train.optim.lr=-1", "train.optim.lr -1 more than 0"),
    ("reward.weights={outcome: .nan}", "reward.weights.outcome nan"),
    ("env={name: 'a.py:B', forfeit: .nan}", "env.forfeit nan"),
    ("data.sampler={name: mix, weights: {a: [[0, .inf]]}}", "data.sampler.weights.a.0.1 inf"),
    ("data.sampler={name: mix, weights: {a: 0}}", "one weight must be above 0"),
    ("algorithm.loss={name: 'a.py:f', correction: {negative_bound: .inf}}", "correction.negative_bound inf"),
    ("algorithm.loss={name: 'mine.py:f', correction: {cap: -1}}", "algorithm.loss.correction.cap -1"),
    ("algorithm.loss={name: clip_cov, clip_cov_lb: 5, clip_cov_ub: 1}", "clip_cov_lb clip_cov_ub below"),
    ("algorithm.loss={name: clip_cov, clip_cov_lb: 6}", "clip_cov_lb 6 clip_cov_ub 5"),
    ("algorithm.loss={name: clip_cov, clip_cov_ub: 0.5}", "clip_cov_lb 1 clip_cov_ub 0.5"),
    ("algorithm.kl={target: 1.5}", "coef 0"),
    ("algorithm.kl=[{coef: 0.1}, {coef: 0.2}]", "place"),
    ("rollout.tools.max_concurrency={search: 0}", "rollout.tools.max_concurrency.search 0"),
    ("engine.num_slots=4611686018427387904", "engine.num_slots 4611686018427387904"),
    ("model.lora.rank=4611686018427387904", "model.lora.rank 4611686018427387904"),
    *(
        (f"train.checkpoint_every={value}", "train.checkpoint_every")
        for value in ("-1", "ten", "0m", "10 m", "1d", "[10]", "null")
    ),
    *(
        (f"cluster.engines={{count: 2, resources: {{GPU: {value}}}}}", "cluster.engines.resources.GPU")
        for value in ("-1", ".nan", ".inf", "many")
    ),
]


@pytest.mark.parametrize(("override", "words"), WRONG, ids=[override for override, _ in WRONG])
def test_wrong_value_is_one_sentence_with_its_key(override: str, words: str) -> None:
    given = {"model": {"path": "x"}, **(GUEST if "guest" in override else {})}
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, None, [override], defaults=given)
    message = str(caught.value)
    assert [word for word in words.split() if word not in message] == [], message
    assert "\n" not in message


def test_retired_keys_are_gone_and_their_successors_exist() -> None:
    keys = {row.key for row in schema_table(RunConfig)}
    named = {name for text in RETIRED.values() for name in re.findall(r"[a-z]+(?:\.[a-z_]+)+", text)}
    assert [keys & RETIRED.keys(), named - keys] == [set(), set()]


def test_missing_section_is_named_with_its_keys() -> None:
    with pytest.raises(ConfigError, match=r"'model' is missing.*; give it keys \(path, revision, init, "):
        load_config(RunConfig, None, ["name=x"])


def test_paths_may_start_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["model.path=x", "out=~/runs", "warm_start.conversations=~/shown.jsonl"]
    config = load_config(RunConfig, None, overrides).config
    assert (config.out, config.warm_start.conversations) == (f"{tmp_path}/runs", f"{tmp_path}/shown.jsonl")
    (tmp_path / "mine.py").write_text("def score(trajectory): ...")
    assert import_attr("~/mine.py:score", base=tmp_path / "elsewhere").__name__ == "score"


def test_key_that_is_not_text_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'algorithm\.advantage\.3'"):
        load_config(RunConfig, None, ["model.path=x"], defaults={"algorithm": {"advantage": {"name": "grpo", 3: 4}}})


def numbers() -> dict[str, str]:
    """Return the keys that every run has and that are one number, with their types."""
    rows = [row for row in schema_table(RunConfig) if not row.of and "<" not in row.key and "[" not in row.key]
    types = {row.key: row.type.split(" | ") for row in rows if not row.key.startswith(("env", "data", "evaluation.data"))}
    found = {key: " ".join(of) for key, of in types.items() if of[0] in ("int", "float") and "str" not in of}
    assert len(found) > 60 and "train.steps" in found
    return found


def test_numbers_are_finite_and_fit_torch() -> None:
    for key, types in numbers().items():
        for value in ("true", ".nan", ".inf", *(() if "float" in types else ("9223372036854775808",))):
            with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
                load_config(RunConfig, None, ["model.path=x", f"{key}={value}"])


def test_bound_may_be_infinite() -> None:
    correction = "algorithm.loss.correction={cap: .inf, reject: {seq_mean_k1: [0.9, .inf]}}"
    load_config(RunConfig, None, ["model.path=x", "algorithm.loss={clip_low: .inf, dual_clip: .inf}", correction])


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-7"])
@pytest.mark.parametrize("union", [NamedEstimatorOptions, NamedLossOptions])
def test_no_option_of_a_part_is_a_number_without_meaning(union: Any, value: str) -> None:
    """A bound may be infinite, which means none, and some weights below 0; no value may make every loss NaN."""
    section = "advantage" if union is NamedEstimatorOptions else "loss"
    may_be = {"clip_low": ".inf", "clip_high": ".inf", "dual_clip": ".inf", "cap": ".inf"}
    signed = {"clip_cov_lb", "clip_cov_ub", "outcome_weight", "step_weight"}
    for options in get_args(union):
        name, *_ = kinds_of(options)["name"]
        for key, found in keys_of(options).items():
            if "float" not in str(found.annotation) or key in ("correction", "distill", "weights"):
                continue
            if may_be.get(key) == value or (value == "-7" and key in signed):
                continue
            with pytest.raises(ConfigError, match=key):
                load_config(RunConfig, None, ["model.path=x", f"algorithm.{section}={{name: {name}, {key}: {value}}}"])
