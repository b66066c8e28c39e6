"""Configurations: what is merged with what, what is refused and in which words, and that no secret is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyturn.algorithms.estimator_options import GaeOptions
from polyturn.algorithms.loss_options import ClipOptions
from polyturn.algorithms.options import KlOptions
from polyturn.config.load import load_config, schema_table, write_resolved
from polyturn.config.models import RunConfig, TrainTokenizerConfig
from polyturn.config.parts import arguments_of
from polyturn.config.retired import successor
from polyturn.core.errors import ConfigError
from polyturn.data.options import MixOptions
from polyturn.engines.options import ServerOptions
from polyturn.infra.yaml_file import read_yaml
from polyturn.tokens.options import ParserOptions
from polyturn.training.options import ScheduleOptions


class Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Optim(Base):
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)


class Local(Base):
    kind: Literal["local"] = "local"
    slots: int = 4


class Server(Base):
    kind: Literal["server"]
    url: str
    api_key: str = ""


class Reward(Base):
    name: str
    weight: float = 1.0


class Run(Base):
    name: str = "run"
    note: str | None = None
    steps: int = 10
    engine: Local | Server = Local()
    optim: Optim = Optim()
    warm_start: Optim = Optim(lr=1e-4)
    rewards: list[Reward] = []
    sets: dict[str, Optim] = {"greedy": Optim()}
    files: str | list[str] | None = None
    extra: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Run:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; it must be 0 or more")
        return self


def load(folder: Path, text: str = "", *overrides: str) -> Run:
    return load_config(Run, config_file(folder, text), overrides).config


def config_file(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str = "", *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


# --- merging


def test_an_empty_file_is_all_defaults_and_no_file_is_allowed(tmp_path: Path) -> None:
    assert load(tmp_path) == Run()
    assert load_config(Run, None, ["steps=3"]).config.steps == 3


def test_defaults_files_lie_below_the_file_and_overrides_above(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    config_file(tmp_path, "steps: 1\nname: base\noptim: {lr: 1.0}", "more/base.yaml")
    config_file(tmp_path, "defaults: base.yaml\nname: middle\nfiles: [a, b]", "more/middle.yaml")
    config_file(tmp_path, "note: other", "other.yaml")
    config = load(
        tmp_path,
        "defaults: [more/middle.yaml, other.yaml]\noptim: {weight_decay: 0.5}\nfiles: [c]",
        "optim.betas=[0.1, 0.2]",
    )
    assert (config.steps, config.name, config.note) == (1, "middle", "other")
    assert config.optim == Optim(lr=1.0, weight_decay=0.5, betas=(0.1, 0.2))
    assert config.files == ["c"]


def test_given_defaults_lie_below_everything(tmp_path: Path) -> None:
    path = config_file(tmp_path, "optim: {lr: 2}")
    loaded = load_config(Run, path, defaults={"optim": {"lr": 1, "weight_decay": 1}})
    assert loaded.config.optim == Optim(lr=2, weight_decay=1)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=7", ("steps",), 7),
        ("+steps=7", ("steps",), 7),
        ("optim.lr=3e-4", ("optim", "lr"), 3e-4),
        ("note=null", ("note",), None),
        ("note=a=b", ("note",), "a=b"),
        ("note='7'", ("note",), "7"),
        ("note=", ("note",), None),
        ("files=[a, b]", ("files",), ["a", "b"]),
        ("extra.a.b=[1, {c: 2}]", ("extra",), {"a": {"b": [1, {"c": 2}]}}),
        ("note=run ${steps} of ${name}", ("note",), "run 10 of run"),
    ],
)
def test_overrides_are_yaml_values_at_dotted_keys(tmp_path: Path, override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = load(tmp_path, "", override)
    for step in path:
        found = getattr(found, step)
    assert found == value


def test_an_override_reaches_into_a_list_and_a_dict(tmp_path: Path) -> None:
    config = load(tmp_path, "rewards: [{name: a}, {name: b}]", "rewards.1.weight=0.5", "sets.t1.lr=1")
    assert [r.weight for r in config.rewards] == [1.0, 0.5]
    assert config.sets == {"t1": Optim(lr=1)}


def test_an_override_reaches_into_a_section_that_is_written_as_its_name(tmp_path: Path) -> None:
    class Game(Base):
        game: str | Reward | None = None

    config = load_config(Game, config_file(tmp_path, "game: chess"), ["game.weight=2"]).config
    assert config.game == Reward(name="chess", weight=2)


def test_a_mistake_in_a_section_that_could_be_a_name_is_one_sentence(tmp_path: Path) -> None:
    class Game(Base):
        game: str | Reward | list[str | Reward] | None = None

    with pytest.raises(ConfigError) as caught:
        load_config(Game, config_file(tmp_path, "game: {name: chess, wieght: 1}"))
    assert re.fullmatch(r"unknown key 'game.wieght', .* Did you mean 'game.weight'\?", str(caught.value))


def test_what_a_default_instance_sets_stays_when_another_key_of_it_is_configured(tmp_path: Path) -> None:
    config = load(tmp_path, "warm_start: {weight_decay: 0.5}")
    assert config.warm_start == Optim(lr=1e-4, weight_decay=0.5)


def test_a_union_takes_the_variant_that_its_literal_names(tmp_path: Path) -> None:
    assert load(tmp_path, "engine: {kind: server, url: x}").engine == Server(kind="server", url="x")
    assert load(tmp_path, "engine: {slots: 8}").engine == Local(slots=8)


def test_references_see_the_defaults_of_the_models(tmp_path: Path) -> None:
    config = load(tmp_path, "note: ${optim.lr}-${steps}\nextra: {a: '${steps}', b: '${.a}', c: '${optim}'}")
    assert config.note == "1e-06-10"
    assert config.extra["a"] == config.extra["b"] == 10
    assert config.extra["c"]["betas"] == [0.9, 0.99]


# --- refusals


def test_an_unknown_key_is_named_with_its_value_its_source_and_the_nearest_key(tmp_path: Path) -> None:
    assert refused(tmp_path, "optim: {lrr: 3}") == (
        "unknown key 'optim.lrr', set to 3 (in run.yaml). Did you mean 'optim.lr'?"
    )
    assert refused(tmp_path, "", "notee=3") == (
        "unknown key 'notee', set to 3 (from the override 'notee=3'). Did you mean 'note'?"
    )


def test_a_key_of_another_section_is_pointed_out(tmp_path: Path) -> None:
    assert refused(tmp_path, "slots: 3").endswith("Did you mean 'engine.slots'?")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rewards: [{name: a}, {name: b, wieght: 1}]", "'rewards.1.wieght'.* Did you mean 'rewards.1.weight'"),
        ("sets: {t1: {beta: 1}}", r"'sets.t1.beta'.* Did you mean 'sets.t1.betas'"),
        ("engine: {kind: server, url: x, apikey: z}", r"'engine.apikey'.* Did you mean 'engine.api_key'"),
        ("engine: {slotz: 1}", r"'engine.slotz'.* Did you mean 'engine.slots'"),
    ],
)
def test_unknown_keys_are_found_in_lists_dicts_and_unions(tmp_path: Path, text: str, key: str) -> None:
    message = refused(tmp_path, text)
    assert re.match(f"unknown key {key}", message)
    assert "\n" not in message


def test_every_problem_is_one_sentence(tmp_path: Path) -> None:
    message = refused(tmp_path, "steps: many\nrewards: [{weight: 2}]\noptim: {betas: [1]}", "files=3", "engine.slots=x")
    assert message.split("\n") == [
        "'optim.betas.1' is missing (in run.yaml); give it a value",
        "'rewards.0.name' is missing (in run.yaml); give it a value",
        "steps is 'many' (in run.yaml); it must be a valid integer, unable to parse string as an integer",
        "engine.slots is 'x' (from the override 'engine.slots=x'); it must be a valid integer, unable to parse string as an "
        "integer",
        "files is 3 (from the override 'files=3'); it must be a valid string or a valid list",
    ]


def test_a_models_own_check_speaks_for_itself(tmp_path: Path) -> None:
    assert refused(tmp_path, "steps: -1") == "steps is -1; it must be 0 or more"


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("", ["steps"], "the override 'steps' has no '='; write it as key.path=value"),
        ("", ["files=[1"], "the value in the override 'files=.1' cannot be read"),
        ("", ["steps.x=1", "steps.x.y=1"], "the override 'steps.x.y=1': steps.x is 1, which has no keys to set"),
        ("rewards: [{name: a}]", ["rewards.1.name=b"], "rewards is a list, '1' is not one of 0 to 0"),
        ("- 1", [], "run.yaml must hold keys with values, and it holds a list"),
        ("a: [1", [], "run.yaml line [12]: this is not YAML"),
        ("steps: 1\nsteps: 2", [], "run.yaml line 2: this is not YAML .found duplicate key steps"),
        ("note: '${oops'", [], "run.yaml cannot be read as a config"),
        ("note: ${nothing.there}", [], "note is '..nothing.there.' .in run.yaml., which cannot be resolved: .*not found"),
        ("note: ${name}\nname: ${note}", [], "cannot be resolved: .*"),
        ("note: ${oc.env:POLYTURN_NOT_SET}", [], "'POLYTURN_NOT_SET' not found.*give a fallback"),
        ("defaults: 3", [], "'defaults' in run.yaml must be a file name or a list of them, not 3"),
        ("defaults: rum.yaml", [], "the config 'rum.yaml' does not exist. Did you mean 'run.yaml'"),
        ("defaults: run.yaml", [], "go round in a circle: run.yaml -> run.yaml"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str, overrides: list[str], says: str) -> None:
    assert re.search(says, refused(tmp_path, text, *overrides))


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/run\.yaml' does not exist. Check the path"):
        load_config(Run, tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a config file"):
        load_config(Run, tmp_path)


# --- what is written

SECRET = "sk-0123456789"
SECRETS = """
engine: {kind: server, url: 'https://${oc.env:POLYTURN_HOST}/v1', api_key: '${oc.env:POLYTURN_KEY}'}
note: ${engine.api_key}
steps: ${oc.decode:${oc.env:POLYTURN_STEPS}}
extra: {copy: '${engine}', list: ['${note}'], fallback: '${oc.env:POLYTURN_NOT_SET,nothing}', plain: '${name}'}
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTURN_KEY", SECRET)
    monkeypatch.setenv("POLYTURN_HOST", "h.example")
    monkeypatch.setenv("POLYTURN_STEPS", "31415")


@pytest.mark.usefixtures("environment")
def test_what_comes_from_the_environment_is_used_and_never_written(tmp_path: Path) -> None:
    """Users rely on this: a run's folder can be shared."""
    loaded = load_config(Run, config_file(tmp_path, SECRETS))
    assert loaded.config.engine == Server(kind="server", url="https://h.example/v1", api_key=SECRET)
    assert (loaded.config.note, loaded.config.steps) == (SECRET, 31415)
    write_resolved(loaded.resolved, tmp_path / "out" / "config.yaml")
    text = (tmp_path / "out" / "config.yaml").read_text()
    assert not any(value in text for value in (SECRET, "h.example", "31415"))
    written = yaml.safe_load(text)
    assert written["engine"]["api_key"] == "${oc.env:POLYTURN_KEY}"
    assert written["extra"]["plain"] == "run"
    assert written["extra"]["fallback"] == "${oc.env:POLYTURN_NOT_SET,nothing}"
    assert written["optim"] == {"lr": 1e-6, "weight_decay": 0.0, "betas": [0.9, 0.99]}


@pytest.mark.usefixtures("environment")
def test_what_was_written_loads_again_to_the_same_config(tmp_path: Path) -> None:
    loaded = load_config(Run, config_file(tmp_path, SECRETS), [r"name='literal \${x}'", "sets.a.lr=2"])
    assert loaded.config.name == "literal ${x}"
    write_resolved(loaded.resolved, tmp_path / "again.yaml")
    assert load_config(Run, tmp_path / "again.yaml") == loaded


@pytest.mark.usefixtures("environment")
def test_an_error_does_not_show_a_secret_either(tmp_path: Path) -> None:
    message = refused(tmp_path, "steps: ${oc.env:POLYTURN_KEY}\nextr: {a: ['${oc.env:POLYTURN_KEY}']}")
    assert SECRET not in message
    assert "steps is '${oc.env:POLYTURN_KEY}'" in message
    assert "{'a': ['${oc.env:POLYTURN_KEY}']}" in message


class Derived(Base):
    key: str = ""
    header: str = Field("", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "header": f"Bearer {data['key']}"}


@pytest.mark.usefixtures("environment")
def test_a_value_that_a_validator_derives_from_the_environment_is_not_written(tmp_path: Path) -> None:
    loaded = load_config(Derived, config_file(tmp_path, "key: ${oc.env:POLYTURN_KEY}"))
    assert loaded.config.header == f"Bearer {SECRET}"
    assert SECRET not in str(loaded.resolved)


@pytest.mark.parametrize("value", ["0", "20", "30s", "10m", "0.5h"])
def test_checkpoints_come_by_steps_or_by_time(value: str):
    assert (
        str(load_config(RunConfig, None, ["model.path=x", f"train.checkpoint_every={value}"]).config.train.checkpoint_every)
        == value
    )


@pytest.mark.parametrize("value", ["-1", "ten", "0m", "10 m", "1d", "m", "[10]", "null"])
def test_what_is_neither_steps_nor_a_time_is_refused(value: str):
    with pytest.raises(ConfigError, match=r"train\.checkpoint_every"):
        load_config(RunConfig, None, ["model.path=x", f"train.checkpoint_every={value}"])


def test_aliases_that_repeat_one_another_are_counted_and_not_written_out(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"^\S+run.yaml has [0-9,]+ values where its aliases"):
        read_yaml(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match="nested deeper"):
        read_yaml(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a}\n")
    assert read_yaml(tmp_path / "run.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}


WORDS = [
    (row.key, word)
    for row in schema_table(RunConfig)
    for word in ("off", "on", "no", "yes")
    if repr(word) in row.type and "<" not in row.key and "[" not in row.key
]


@pytest.mark.parametrize(("key", "word"), WORDS)
def test_a_word_that_yaml_reads_as_a_truth_value_is_the_choice_that_it_spells(key: str, word: str) -> None:
    loaded = load_config(RunConfig, None, ["model.path=tiny", f"{key}={word}"])
    at: Any = loaded.resolved
    for part in key.split("."):
        at = at[part]
    assert at == word


def test_words_are_read_in_lists_and_unions_and_truth_values_stay_where_a_key_takes_them() -> None:
    class Words(BaseModel):
        many: list[Literal["on", "off"]] = []
        either: Literal["yes", "auto"] | None = None
        truth: bool | Literal["off"] = True

    written = ["many=[on,off]", "either=yes", "truth=off"]
    assert load_config(Words, None, written).config == Words(many=["on", "off"], either="yes", truth=False)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.distributed.strategy=megatron", "unknown key 'train.distributed.strategy'.*no key any more.*FSDP2"),
        ("+model.lora.rank_stabilized=true", "'model.lora.rank_stabilized'.*model.lora.alpha by the square root"),
        ("algorithm.kl_coef=0.1", "'algorithm.kl_coef'.*no key any more; write algorithm.kl"),
        ("algorithm.kl_in_reward.coef=0.1", "'algorithm.kl_in_reward'.*place: reward.*in a list"),
        ("policies.guest.train=true", "'policies.guest.train'.*a run trains one policy"),
        ("policies.guest.model.reference=x", "'policies.guest.model.reference'.*leave it out"),
        ("policies.guest.model.processor=none", "'policies.guest.model.processor'.*shown text only"),
        ("policies.guest.model.gradient_checkpointing=true", "'policies.guest.model.gradient_ch.*not trained"),
    ],
)
def test_a_retired_key_is_one_sentence_that_says_what_stands_in_its_place(override: str, says: str) -> None:
    given = {"model": {"path": "x"}, "policies": {"guest": {"model": {"path": "y"}}}}
    with pytest.raises(ConfigError, match=says) as problem:
        load_config(RunConfig, None, [override], defaults=given)
    assert len(str(problem.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["engine.launch.replicas=2"],
            "unknown key 'engine.launch'.* It is for engine.kind vllm or sglang, and that is 'embedded'",
        ),
        (
            ["engine.kind=vllm", "engine.num_slots=8"],
            "It is for engine.kind embedded, and that is 'vllm'; set kind, or leave num_",
        ),
        (["engine.kind=mine", "engine.max_in_flight=8"], "It is for engine.kind vllm or sglang, and that is 'mine'"),
    ],
)
def test_a_key_of_another_kind_is_refused_with_its_kind(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as problem:
        load_config(RunConfig, None, ["model.path=tiny", *overrides])
    assert len(str(problem.value).splitlines()) == 1


@pytest.mark.parametrize("engine", [{"kind": "embedded", "num_slots": 8}, {"kind": "vllm", "timeout_s": 5.0, "launch": {}}])
def test_the_configuration_of_an_older_run_loads_though_it_has_the_keys_of_every_kind(
    tmp_path: Path, engine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As when one section had them all, so that those of other kinds were written down without an effect."""
    caplog.set_level("INFO")
    every = {"urls": [], "kwargs": {}, "max_in_flight": 256, "order": "longest_first", "weights": "auto", "launch": None}
    every |= {"weights_folder": None, "prefill_chunk": 256, "process": "auto", "deterministic": False}
    values = {"model": {"path": "tiny"}, "engine": {**every, **engine}}
    folder = tmp_path / "run"
    write_resolved(values, folder / "config.yaml")
    loaded = load_config(RunConfig, folder)
    now = loaded.config.engine
    assert all(getattr(now, key) == value for key, value in engine.items() if key != "launch")
    other = "engine.prefill_chunk" if engine["kind"] == "vllm" else "engine.max_in_flight"
    assert other in caplog.text
    (tmp_path / "mine.yaml").write_text((folder / "config.yaml").read_text().partition("\n")[2])
    with pytest.raises(ConfigError, match=rf"{other}.* It is for engine.kind"):
        load_config(RunConfig, tmp_path / "mine.yaml")


EARLIER = {
    "model": {
        "init": {"model_type": "qwen3"},
        "tokenizer": None,
        "train_tokenizer": {"corpus": "a.py:f", "vocab_size": 400},
    },
    "warm_start": {"optim": {"schedule": "cosine", "warmup_steps": 0, "warmup_ratio": 0.1, "min_lr_ratio": 0.2}},
    "reward": {
        "function": "a.py:f",
        "routes": {"own/*": {"name": "b.py:f", "kwargs": {"bonus": 0.5}}},
        "batch_size": 8,
        "batch_wait_s": 0.05,
    },
    "rollout": {"parser": "hermes", "reasoning_parser": None, "calls_in_reasoning": True},
    "algorithm": {
        "advantage": "gae",
        "advantage_kwargs": {"whiten_batch": True},
        "norm_by_std": True,
        "gamma": 0.9,
        "lam": None,
        "loss": "gspo",
        "loss_kwargs": {},
        "clip_low": 0.1,
        "clip_dual": 3.0,
        "correction": None,
        "kl_coef": 0.1,
        "kl_horizon": 10_000.0,
        "kl_in_reward": {"coef": 0.0, "estimator": "k1", "target": None, "horizon": 10_000.0},
    },
    "data": {"sampler": None, "sampler_kwargs": {}, "mix": {"weights": {"a": 2.0}, "by_success": 0.5}},
    "train": {"distributed": {"ranks": 2, "strategy": "fsdp"}},
}


def test_the_configuration_of_an_older_run_loads_though_it_has_keys_that_are_retired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run wrote every key down. What was set moves to the key in its place; a default of its time says nothing."""
    caplog.set_level("INFO")
    write_resolved(EARLIER, tmp_path / "config.yaml")
    config = load_config(RunConfig, tmp_path).config
    assert config.algorithm.advantage == GaeOptions(name="gae", gamma=0.9, whiten_batch=True)
    assert config.algorithm.loss == ClipOptions(name="gspo", clip_low=0.1), "which never read clip_dual"
    assert config.algorithm.kl == KlOptions(coef=0.1) and config.train.distributed.ranks == 2
    assert config.model.tokenizer == TrainTokenizerConfig(corpus="a.py:f", vocab_size=400)
    assert arguments_of(config.reward.routes["own/*"]) == {"bonus": 0.5} and config.reward.batch.size == 8
    assert config.rollout.parser == ParserOptions(name="hermes", calls_in_reasoning=True)
    optim, schedule = config.warm_start.optim, ScheduleOptions(name="cosine", min_lr_ratio=0.2)
    assert (optim.lr, optim.warmup_steps, optim.schedule) == (1e-4, 0.1, schedule)
    assert config.data.sampler == MixOptions(weights={"a": 2.0}, by_success=0.5)
    assert "algorithm.gamma" in caplog.text and "algorithm.advantage.gamma" in caplog.text


@pytest.mark.parametrize(
    ("had", "says"),
    [
        ({"train": {"distributed": {"strategy": "megatron"}}}, "'train.distributed.strategy', set to 'megatron'.* FSDP2"),
        ({"algorithm": {"kl_in_reward": {"coef": 0.1, "estimator": "k1"}}}, "'algorithm.kl_in_reward'.*place: reward"),
        ({"algorithm": {"gama": 0.9}}, "unknown key 'algorithm.gama'"),
    ],
)
def test_what_an_older_run_was_set_to_and_no_key_says_any_more_is_refused(
    had: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_resolved({"model": {"path": "tiny"}, **had}, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=says) as problem:
        load_config(RunConfig, tmp_path)
    assert len(str(problem.value).splitlines()) == 1


def test_null_takes_a_key_of_another_kind_out_of_a_file() -> None:
    given = {"model": {"path": "x"}, "engine": {"num_slots": 8}}
    loaded = load_config(RunConfig, None, ["engine.kind=vllm", "engine.num_slots=null"], defaults=given)
    assert loaded.config.engine == ServerOptions(kind="vllm") and "num_slots" not in loaded.resolved["engine"]


def _numbers() -> dict[str, str]:
    """Return the keys that every run has and that are one number, with their types."""
    rows = [row for row in schema_table(RunConfig) if not row.of and "<" not in row.key and "[" not in row.key]
    types = {row.key: row.type.split(" | ") for row in rows if not row.key.startswith(("env", "data", "evaluation.data"))}
    found = {key: " ".join(of) for key, of in types.items() if of[0] in ("int", "float") and "str" not in of}
    assert len(found) > 60 and "train.steps" in found
    return found


def test_no_number_is_a_truth_value_or_not_finite_or_larger_than_torch_can_hold() -> None:
    for key, types in _numbers().items():
        for value in ("true", ".nan", ".inf", "9223372036854775808"):
            if value[0] == "9" and "float" in types:
                continue
            with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
                load_config(RunConfig, None, ["model.path=x", f"{key}={value}"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.group_size=yes", "train.group_size is True"),
        ("train.optim.warmup_steps=.inf", "train.optim.warmup_steps is inf"),
        ("train.optim.betas=[0.9, 1.0]", "train.optim.betas.1 is 1.0"),
        ("train.optim.eps=-1", "train.optim.eps is -1"),
        ("reward.weights={outcome: .nan}", "reward.weights.outcome is nan"),
        ("env={name: 'a.py:B', forfeit: .nan}", "env.forfeit is nan"),
        ("data.sampler={name: mix, weights: {a: [[0, .inf]]}}", "data.sampler.weights.a.0.1 is inf"),
        ("data.sampler={name: mix, weights: {a: 0}}", "give one of them a weight above 0"),
        ("algorithm.loss={name: 'a.py:f', correction: {negative_bound: .inf}}", "correction.negative_bound is inf"),
        ("rollout.tools.max_concurrency={search: 0}", "rollout.tools.max_concurrency.search is 0"),
        ("model.lora={target_modules: [1]}", "model.lora.target_modules.0 is 1"),
        ("algorithm.kl={target: 1.5}", "its coef is 0"),
        ("engine.num_slots=4611686018427387904", "engine.num_slots is 4611686018427387904"),
        ("model.lora.rank=4611686018427387904", "model.lora.rank is 4611686018427387904"),
        ("engine.process=owm", "engine.process is 'owm'"),
    ],
)
def test_a_wrong_number_or_word_is_one_sentence_with_its_key(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, None, ["model.path=x", override])
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_bound_may_be_infinite() -> None:
    correction = "algorithm.loss.correction={cap: .inf, reject: {seq_mean_k1: [0.9, .inf]}}"
    load_config(RunConfig, None, ["model.path=x", "algorithm.loss={clip_low: .inf, dual_clip: .inf}", correction])


def test_the_table_says_which_kind_a_key_is_for() -> None:
    kinds = {row.key: row.of for row in schema_table(RunConfig)}
    found = {key.removeprefix("engine."): of for key, of in kinds.items() if key in ENGINE_KEYS}
    assert found == {"kind": "", "update": "", "num_slots": "embedded", "launch.python": "vllm, sglang", "kwargs": "another"}
    assert kinds["train.distributed.tensor_parallel"] == "torch or megatron"


ENGINE_KEYS = ("engine.kind", "engine.update", "engine.num_slots", "engine.launch.python", "engine.kwargs")


def test_no_retired_key_is_one_that_there_is() -> None:
    assert [row.key for row in schema_table(RunConfig) if successor(row.key) is not None] == []


def test_a_kl_in_each_place_is_a_list_and_two_in_one_place_are_refused() -> None:
    both = "algorithm.kl=[{coef: 0.1}, {coef: 0.2, place: reward}]"
    algorithm = load_config(RunConfig, None, ["model.path=x", both]).config.algorithm
    assert [(kl.coef, kl.name) for kl in (algorithm.kl_in("loss"), algorithm.kl_in("reward"))] == [(0.1, "k3"), (0.2, "k1")]
    with pytest.raises(ConfigError, match="two of them have the same place"):
        load_config(RunConfig, None, ["model.path=x", "algorithm.kl=[{coef: 0.1}, {coef: 0.2}]"])


def test_a_configuration_is_read_and_checked_without_torch_and_transformers() -> None:
    """A process that neither trains nor serves, and the command line before it does, must start at once."""
    script = """
import sys
from pathlib import Path
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig, TrainTokenizerConfig
load_config(RunConfig, None, ["model.path=x", "train.optim.lr=1e-3",
    "algorithm.loss={correction: {cap: 3}}", "model.lora.rank=4"])
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table_shows_the_defaults_of_the_place_where_a_section_stands() -> None:
    rows = {row.key: row.default for row in schema_table(RunConfig)}
    found = [rows[f"{section}.optim.lr"] for section in ("train", "warm_start", "algorithm.critic")]
    assert [float(text) for text in found] == [1e-6, 1e-4, 1e-5]
    assert rows["rollout.limits.timeout_s"] == "7200.0"
