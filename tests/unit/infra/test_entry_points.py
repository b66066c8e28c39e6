"""Plug-ins of installed distributions are found by name, and the error of a broken one names its distribution."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, MissingAttributeError, MissingModuleError, UnknownNameError
from polyturn.infra.plugins import OWN, Registry, distribution_of, load_offered, offered
from polyturn.infra.stand_in import stand_ins
from support.refusals import refuses

ROOT = Path(__file__).parents[3]
OWN_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
NEEDS = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "otel": "opentelemetry", "tensorboard": "tensorboard"}
"""The libraries that trackers bring their numbers to."""

Install = Callable[..., None]

pytestmark = pytest.mark.timeout(280)  # the own parts import torch and its friends


@pytest.mark.parametrize("group", OWN_POINTS)
def test_own_parts_are_found_by_entry_point(group: str) -> None:
    for name in OWN_POINTS[group]:
        assert [distribution_of(point) for point in offered(group)[name]] == [OWN]
        if find_spec(NEEDS.get(name, "json")) is not None:
            assert load_offered(group, name, where="here") is not None
            continue
        with pytest.raises(MissingModuleError, match=rf"pip install 'polyturn\[{name}\]'$"):
            load_offered(group, name, where="here")


def test_entry_point_of_another_distribution_is_found(install: Install) -> None:
    losses: Registry[object] = Registry("losses")
    assert "mine" not in losses
    install("some-package", {"polyturn.losses": {"mine": "some_losses:mine"}}, some_losses="def mine(): return 7\n")
    assert "mine" in losses and "ppo_clip" in losses
    assert losses.resolve("mine")() == 7  # type: ignore[operator]
    refuses(lambda: losses.resolve("mime", key="algorithm.loss"), UnknownNameError, "algorithm.loss", "'mime'", "'mine'")


@pytest.mark.parametrize(
    ("target", "error", "key"),
    [
        ("no_such_module:x", MissingModuleError, "no_such_module"),
        ("some_losses:x", MissingAttributeError, "some_losses:x"),
        ("raising_losses:x", MissingModuleError, "RuntimeError: no card"),
    ],
)
def test_broken_entry_point_names_its_distribution(install: Install, target: str, error: type[Exception], key: str) -> None:
    install(
        "some-package",
        {"polyturn.losses": {"mine": target}},
        some_losses="",
        raising_losses="raise RuntimeError('no card')",
    )
    with pytest.raises(error, match=rf"^algorithm.loss.*'mine'.*some-package 1\.0.*{key}"):
        Registry("losses").resolve("mine", key="algorithm.loss")


@pytest.mark.parametrize("name", ["mine", "ppo_clip"])
def test_name_of_two_distributions_is_refused_with_both(install: Install, name: str) -> None:
    install("one-package", {"polyturn.losses": {name: "losses_of_one:x"}})
    install("two-package", {"polyturn.losses": {"mine": "losses_of_two:x"}})
    both = {"mine": r"(two|one)-package 1.0 and (two|one)-package 1.0", "ppo_clip": "polyturn and one-package 1.0"}[name]
    with pytest.raises(ConfigError, match=rf"'{name}'.*{both}"):
        Registry("losses").resolve(name)
    assert Registry("losses").resolve("gspo"), "the others are none the worse"


def test_unnamed_broken_entry_point_is_warned_of_and_left_out(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("some-package", {"polyturn.namespaces": {"other": "no_such_module:x"}})
    assert {one.name for one in stand_ins()} == {"verl", "swift"}
    assert caplog.text.count("some-package 1.0") == 1
    list(stand_ins())
    assert caplog.text.count("some-package 1.0") == 1


def test_name_registered_here_and_offered_elsewhere_is_refused(install: Install) -> None:
    losses: Registry[object] = Registry("losses")
    losses.register("mine")(len)
    install("some-package", {"polyturn.losses": {"mine": "some_losses:mine"}}, some_losses="mine = 7")
    refuses(lambda: losses.resolve("mine"), ConfigError, "'mine'", "len", "some-package 1.0")
    losses.register("mine", replace=True)(min)
    assert losses.resolve("mine") is min


def test_entry_point_of_the_wrong_kind_names_its_distribution(install: Install) -> None:
    from polyturn.environments.registry import find_adapter
    from polyturn.tracking.manager import tracker_spec

    points = {"polyturn.environments": {"mine": "some_parts:x"}, "polyturn.trackers": {"mine": "some_parts:x"}}
    install("some-package", points, some_parts="x = 7")
    refuses(lambda: find_adapter("mine:Thing"), ConfigError, "'mine'", "some-package 1.0", " is 7")
    refuses(lambda: tracker_spec("mine"), ConfigError, "tracking: 'mine'", "some-package 1.0", " is 7")
