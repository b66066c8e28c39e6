"""Plug-ins of installed distributions are found under their names, and a broken one is a sentence with its distribution."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyturn.core.entry_points import OWN, load_offered, offered
from polyturn.core.errors import ConfigError, MissingAttributeError, MissingModuleError, UnknownNameError
from polyturn.core.registry import Registry
from polyturn.core.stand_in import stand_ins

ROOT = Path(__file__).parents[3]
OWN_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
NEEDS = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "otel": "opentelemetry", "tensorboard": "tensorboard"}
"""The libraries that trackers bring their numbers to."""

Install = Callable[..., None]


@pytest.mark.parametrize("group", OWN_POINTS)
def test_each_part_of_our_own_is_found_by_its_entry_point(group: str) -> None:
    for name in OWN_POINTS[group]:
        assert [offer.distribution for offer in offered(group)[name]] == [OWN]
        if find_spec(NEEDS.get(name, "json")) is not None:
            assert load_offered(group, name, where="here") is not None
            continue
        with pytest.raises(MissingModuleError, match=rf"pip install 'polyturn\[{name}\]'$"):
            load_offered(group, name, where="here")


def test_the_metadata_of_another_distribution_are_read_when_it_is_on_the_path(install: Install) -> None:
    losses: Registry[object] = Registry("losses")
    assert "mine" not in losses
    install("some-package", {"polyturn.losses": {"mine": "some_losses:mine"}}, some_losses="def mine(): return 7\n")
    assert "mine" in losses and "ppo_clip" in losses
    assert losses.resolve("mine")() == 7  # type: ignore[operator]
    with pytest.raises(UnknownNameError, match=r"algorithm\.loss: there is no 'mime'\. Did you mean 'mine'"):
        losses.resolve("mime", key="algorithm.loss")


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("no_such_module:x", MissingModuleError, "needs no_such_module, which is not installed"),
        ("some_losses:x", MissingAttributeError, "cannot be found"),
        ("raising_losses:x", MissingModuleError, r"cannot be imported \(RuntimeError: no card\)"),
    ],
)
def test_one_that_cannot_be_loaded_is_told_with_its_distribution(
    install: Install, target: str, error: type[Exception], words: str
) -> None:
    install(
        "some-package",
        {"polyturn.losses": {"mine": target}},
        some_losses="",
        raising_losses="raise RuntimeError('no card')",
    )
    begins = rf"^algorithm.loss: 'mine', which some-package 1.0 offers as '{target}',.*"
    with pytest.raises(error, match=rf"{begins}{words}.*some-package$"):
        Registry("losses").resolve("mine", key="algorithm.loss")


@pytest.mark.parametrize("name", ["mine", "ppo_clip"])
def test_a_name_that_two_distributions_offer_is_told_with_both(install: Install, name: str) -> None:
    install("one-package", {"polyturn.losses": {name: "losses_of_one:x"}})
    install("two-package", {"polyturn.losses": {"mine": "losses_of_two:x"}})
    both = {"mine": r"(two|one)-package 1.0 and (two|one)-package 1.0", "ppo_clip": "polyturn and one-package 1.0"}[name]
    with pytest.raises(ConfigError, match=rf"'{name}' is offered by {both} .*uninstall all but one"):
        Registry("losses").resolve(name)
    assert Registry("losses").resolve("gspo"), "the others are none the worse"


def test_one_that_nobody_named_is_warned_of_and_left_out(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("some-package", {"polyturn.namespaces": {"other": "no_such_module:x"}})
    assert {one.name for one in stand_ins()} == {"verl", "swift"}
    assert caplog.text.count("some-package 1.0") == 1
    list(stand_ins())
    assert caplog.text.count("some-package 1.0") == 1


def test_a_name_that_is_registered_here_and_offered_elsewhere_is_told(install: Install) -> None:
    losses: Registry[object] = Registry("losses")
    losses.register("mine")(len)
    install("some-package", {"polyturn.losses": {"mine": "some_losses:mine"}}, some_losses="mine = 7")
    with pytest.raises(ConfigError, match=r"'mine' is <built-in function len>, and some-package 1.0 offers that name"):
        losses.resolve("mine")
    losses.register("mine", replace=True)(min)
    assert losses.resolve("mine") is min


def test_a_name_of_our_own_is_not_taken_by_accident() -> None:
    losses: Registry[object] = Registry("losses")
    with pytest.raises(ConfigError, match="losses: the name 'ppo_clip' is registered already, as <function ppo_clip"):
        losses.register("ppo_clip")(len)
    losses.register("ppo_clip", replace=True)(len)
    assert losses.resolve("ppo_clip") is len


def test_what_is_of_the_wrong_kind_is_told_with_its_distribution(install: Install) -> None:
    from polyturn.environments.registry import find_adapter
    from polyturn.tracking.manager import tracker_spec

    points = {"polyturn.environments": {"mine": "some_parts:x"}, "polyturn.trackers": {"mine": "some_parts:x"}}
    install("some-package", points, some_parts="x = 7")
    with pytest.raises(ConfigError, match=r"'mine', which some-package 1.0 offers as 'some_parts:x', is 7; it must be a cl"):
        find_adapter("mine:Thing")
    with pytest.raises(ConfigError, match=r"tracking: 'mine', which some-package 1.0 offers .* is 7; it must be a class"):
        tracker_spec("mine")
