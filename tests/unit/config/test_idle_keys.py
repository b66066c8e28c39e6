"""Keys without effect under the other values of a configuration: the log names each one that was set."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from polyturn.config.idle import READ_WITH
from polyturn.config.load import load_config, load_values
from polyturn.config.models import RunConfig
from polyturn.config.schema import keys_of

ONE_FOR_EACH_SECTION = [
    (["algorithm.aggregate.norm_length=512"], "algorithm.aggregate=seq-mean-token-sum-norm"),
    (["rollout.tools.breaker.failures=0", "rollout.tools.breaker.cooldown_s=2"], "rollout.tools.breaker.failures=3"),
    (["reward.rate.tokens_per_call=3"], "reward.rate.tokens_per_minute=100"),
    (["cluster.engines.count=3"], "cluster.address=auto"),
    (["algorithm.loss.correction={weight: none, cap: 3}"], "algorithm.loss.correction.weight=token"),
    (["algorithm.critic.optim.lr=1e-3"], "algorithm.advantage=gae"),
    (["algorithm.critic.optim.lr=1e-3"], "algorithm.advantage=mine.py:values"),
    (["evaluation.patience=3"], "evaluation.every=5"),
    (["algorithm.kl=[{horizon: 5, coef: 0.1}]"], "algorithm.kl.0.target=0.1"),
    (["policies={a: {model: {init: {}, tokenizer: x, revision: b}}}"], "policies.a.model={path: x, init: null}"),
    (["reward.overlong={penalty: 3, max_tokens: 50}"], "reward.overlong.buffer=10"),
    (["rollout.interaction_timeout_s=3"], "rollout.interactions=users.yaml"),
    (["env=a:b", "rollout.scheduler_kwargs={a: 1}"], "env=null"),
    (["rollout.sampling={temperature: 0, top_p: 0.5}"], "rollout.sampling.temperature=1"),
    (["reward.sandbox.token_env=KEY"], "reward.sandbox.url=http://127.0.0.1:1"),
    (["train.optim.schedule.min_lr_ratio=0.1"], "train.optim.schedule.name=cosine"),
    (["train.epochs=2", "train.steps=7"], "train.epochs=null"),
]


def said(caplog: pytest.LogCaptureFixture, overrides: Sequence[str]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_config(RunConfig, None, ["model.path=none", *overrides])
    return caplog.messages


@pytest.mark.parametrize(("idle", "read"), ONE_FOR_EACH_SECTION)
def test_idle_key_is_named_until_another_makes_it_matter(
    caplog: pytest.LogCaptureFixture, idle: list[str], read: str
) -> None:
    lines = said(caplog, idle)

    assert lines and all(" has no effect while " in line for line in lines)
    assert not any(" has no effect while " in line for line in said(caplog, [*idle, read]))


def test_idle_key_is_named_with_its_origin_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    origin = {("algorithm", "aggregate", "norm_length"): "actor.scale (in theirs.yaml)"}
    values = {"model": {"path": "none"}, "algorithm": {"aggregate": {"norm_length": 512}}}

    load_values(RunConfig, values, origin=origin)

    (message,) = caplog.messages
    for word in ("actor.scale (in theirs.yaml)", "512", "algorithm.aggregate.norm_length", "seq-mean-token-sum-norm"):
        assert word in message


def test_defaults_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, []) == []


def test_rules_name_existing_keys() -> None:
    for section, rules in READ_WITH.items():
        for dotted in (one for key, (other, _) in rules.items() for one in (key, other)):
            assert dotted.split(".")[0] in keys_of(section), (section, dotted)
