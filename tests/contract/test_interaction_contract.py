"""One suite for every interaction that is shipped: the documented signatures, ids, and independence of episodes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.protocols import Interaction
from polyturn.interactions.base import BaseInteraction, ViewInteraction
from polyturn.interactions.checks import ChecksItself
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.human_user import HumanUser
from polyturn.interactions.replayed_user import ReplayedUser
from polyturn.interactions.simulated_user import SimulatedUser
from polyturn.interactions.weather import WeatherInteraction
from support.refusals import refuses

SHIPPED = [BaseInteraction, Gsm8kInteraction, WeatherInteraction]
MESSAGES = [{"role": "user", "content": "6 * 12?"}, {"role": "assistant", "content": "#### 72"}]


@pytest.fixture(params=SHIPPED, ids=lambda cls: cls.__name__)
def partner(request: pytest.FixtureRequest) -> Any:
    return request.param({"name": "mine", "extra": 1})


def test_interaction_keeps_its_config_and_name(partner: Any) -> None:
    assert isinstance(partner, Interaction)
    assert partner.config["extra"] == 1
    assert partner.name == "mine"
    assert type(partner)({}).name == "interaction_agent"


async def test_given_id_is_returned_or_a_new_one_made(partner: Any) -> None:
    assert await partner.start_interaction("episode-1") == "episode-1"
    made = {await partner.start_interaction() for _ in range(2)}
    assert len(made) == 2
    assert all(len(i) == 36 for i in made)
    for instance_id in [*made, "episode-1"]:
        await partner.finalize_interaction(instance_id)


async def test_interaction_takes_every_key_and_returns_four_values(partner: Any) -> None:
    kwargs = {"name": "mine", "query": "6 * 12?", "ground_truth": "72", "anything": [1]}
    instance_id = await partner.start_interaction("e", **kwargs)
    done, content, score, metadata = await partner.generate_response(instance_id, MESSAGES, **kwargs)
    assert isinstance(done, bool)
    assert isinstance(content, str)
    assert isinstance(score, float)
    assert isinstance(metadata, dict)
    assert isinstance(await partner.calculate_score(instance_id), float)
    assert await partner.finalize_interaction(instance_id) is None


@pytest.mark.parametrize("method", ["start_interaction", "generate_response", "calculate_score", "finalize_interaction"])
def test_every_method_is_async_and_takes_further_kwargs(partner: Any, method: str) -> None:
    function = getattr(partner, method)
    assert inspect.iscoroutinefunction(function)
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


USERS = [
    (SimulatedUser, {"model": "policy"}, {"goal": "Eat."}),
    (ReplayedUser, {}, {"turns": ["Yes."]}),
    (HumanUser, {"on_deadline": "end"}, {}),
]
"""Interactions that refuse settings and rows that nothing reads: (class, config, what the row gives)."""


@pytest.mark.parametrize(("cls", "config", "row"), USERS, ids=lambda given: getattr(given, "__name__", ""))
async def test_users_keep_ids_names_and_signatures(cls: Any, config: dict[str, Any], row: dict[str, Any]) -> None:
    partner = cls({"name": "mine", **config})
    assert isinstance(partner, Interaction) and isinstance(partner, ViewInteraction) and isinstance(partner, ChecksItself)
    assert partner.name == "mine" and cls(config).name == "interaction_agent"
    assert await partner.start_interaction("episode-1", **row) == "episode-1"
    made = [await partner.start_interaction(name="mine", query="?", **row) for _ in range(2)]
    assert len(set(made)) == 2
    for instance_id in ["episode-1", *made]:
        assert isinstance(await partner.calculate_score(instance_id), float)
        await partner.finalize_interaction(instance_id)
    for method in ("start_interaction", "generate_response", "calculate_score", "finalize_interaction", "respond"):
        function = getattr(partner, method)
        assert inspect.iscoroutinefunction(function)
        assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    refuses(lambda: cls({**config, "surplus": 1}), ConfigError, "'surplus'")


async def test_base_class_answers_every_turn_alike() -> None:
    base = BaseInteraction({})
    assert await base.generate_response("x", []) == (False, "Your current result seems acceptable.", 0.8, {})
    assert await base.calculate_score() == 0.0
    assert await base.finalize_interaction() is None
