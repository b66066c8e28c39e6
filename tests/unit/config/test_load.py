"""Configurations: how they merge, which files are refused, and that no secret is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyturn.config.load import load_config, schema_table, write_resolved
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.infra.yaml_file import read_yaml
from support.refusals import refuses


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


def test_empty_file_and_no_file_give_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == Run()
    assert load_config(Run, None, ["steps=3"]).config.steps == 3


def test_file_overrides_defaults_files_and_overrides_win(tmp_path: Path) -> None:
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


def test_file_overrides_given_defaults(tmp_path: Path) -> None:
    path = config_file(tmp_path, "optim: {lr: 2}")
    loaded = load_config(Run, path, defaults={"optim": {"lr": 1, "weight_decay": 1}})
    assert loaded.config.optim == Optim(lr=2, weight_decay=1)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=7", ("steps",), 7),
        ("+steps=7", ("steps",), 7),
        ("++steps=7", ("steps",), 7),
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
def test_override_is_a_yaml_value_at_a_dotted_key(tmp_path: Path, override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = load(tmp_path, "", override)
    for step in path:
        found = getattr(found, step)
    assert found == value


def test_override_that_removes_a_key_is_answered_with_null(tmp_path: Path) -> None:
    refuses(lambda: load(tmp_path, "", "~optim.lr"), ConfigError, "'~optim.lr'", "write optim.lr=null")


def test_override_reaches_into_a_list_and_a_dict(tmp_path: Path) -> None:
    config = load(tmp_path, "rewards: [{name: a}, {name: b}]", "rewards.1.weight=0.5", "sets.t1.lr=1")
    assert [r.weight for r in config.rewards] == [1.0, 0.5]
    assert config.sets == {"t1": Optim(lr=1)}
    config = load(tmp_path, "rewards: [{name: a, weight: 3}, b]", "rewards.0={name: c}", "rewards.1={weight: 2}")
    assert config.rewards == [Reward(name="c", weight=3), Reward(name="b", weight=2)], "mappings are merged"


def test_override_reaches_into_a_section_written_as_a_name(tmp_path: Path) -> None:
    class Game(Base):
        game: str | Reward | None = None

    config = load_config(Game, config_file(tmp_path, "game: chess"), ["game.weight=2"]).config
    assert config.game == Reward(name="chess", weight=2)


def test_mistake_in_a_section_or_name_is_one_sentence(tmp_path: Path) -> None:
    class Game(Base):
        game: str | Reward | list[str | Reward] | None = None

    with pytest.raises(ConfigError) as caught:
        load_config(Game, config_file(tmp_path, "game: {name: chess, wieght: 1}"))
    assert re.fullmatch(r"unknown key 'game.wieght', .* Did you mean 'game.weight'\?", str(caught.value))


def test_default_instance_keeps_its_other_keys(tmp_path: Path) -> None:
    config = load(tmp_path, "warm_start: {weight_decay: 0.5}")
    assert config.warm_start == Optim(lr=1e-4, weight_decay=0.5)


def test_union_takes_the_variant_of_its_literal(tmp_path: Path) -> None:
    assert load(tmp_path, "engine: {kind: server, url: x}").engine == Server(kind="server", url="x")
    assert load(tmp_path, "engine: {slots: 8}").engine == Local(slots=8)


def test_reference_sees_defaults_of_models(tmp_path: Path) -> None:
    config = load(tmp_path, "note: ${optim.lr}-${steps}\nextra: {a: '${steps}', b: '${.a}', c: '${optim}'}")
    assert config.note == "1e-06-10"
    assert config.extra["a"] == config.extra["b"] == 10
    assert config.extra["c"]["betas"] == [0.9, 0.99]


# --- refusals


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("optim: {lrr: 3}", [], "'optim.lrr' 3 run.yaml 'optim.lr'?"),
        ("", ["notee=3"], "'notee' 3 'notee=3' 'note'?"),
        ("slots: 3", [], "'slots' 'engine.slots'?"),
        ("rewards: [{name: a}, {name: b, wieght: 1}]", [], "'rewards.1.wieght' 'rewards.1.weight'?"),
        ("sets: {t1: {beta: 1}}", [], "'sets.t1.beta' 'sets.t1.betas'?"),
        ("engine: {kind: server, url: x, apikey: z}", [], "'engine.apikey' 'engine.api_key'?"),
        ("engine: {slotz: 1}", [], "'engine.slotz' 'engine.slots'?"),
        ("steps: -1", [], "steps is -1"),
        ("", ["steps"], "'steps' key.path=value"),
        ("", ["files=[1"], "'files=[1'"),
        ("", ["steps.x=1", "steps.x.y=1"], "'steps.x.y=1'"),
        ("rewards: [{name: a}]", ["rewards.1.name=b"], "rewards '1' 0"),
        ("rewards: [{name: a}]", ["rewards.².name=b"], "rewards '²' 0"),
        ("- 1", [], "run.yaml list"),
        ("a: [1", [], "run.yaml YAML"),
        ("steps: 1\nsteps: 2", [], "run.yaml line 2 duplicate steps"),
        ("optim:\n\tlr: 1", [], "run.yaml line 2 tab spaces"),
        ("note: '${oops'", [], "run.yaml"),
        ("note: ${nothing.there}", [], "note ${nothing.there} run.yaml"),
        ("note: ${name}\nname: ${note}", [], "note resolved"),
        ("note: ${oc.env:POLYTURN_NOT_SET}", [], "'POLYTURN_NOT_SET' fallback"),
        ("defaults: 3", [], "'defaults' run.yaml 3"),
        ("defaults: rum.yaml", [], "'rum.yaml' 'run.yaml'?"),
        ("defaults: ~nobody-here/run.yaml", [], "~nobody-here/run.yaml exist"),
        ("defaults: run.yaml", [], "circle run.yaml"),
    ],
)
def test_wrong_file_or_override_is_one_sentence(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    message = refused(tmp_path, text, *overrides)
    assert [word for word in words.split() if word not in message] == [], message
    assert "\n" not in message.strip()


def test_every_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    message = refused(tmp_path, "steps: many\nrewards: [{weight: 2}]\noptim: {betas: [1]}", "files=3", "engine.slots=x")
    keys = (
        "'optim.betas.1' is missing",
        "'rewards.0.name' is missing",
        "steps is 'many'",
        "engine.slots is 'x'",
        "files is 3",
    )
    assert [key in line for key, line in zip(keys, message.split("\n"), strict=True)] == [True] * 5


@pytest.mark.parametrize(("path", "words"), [("nowhere/run.yaml", "does not exist"), (".", "is a folder")])
def test_missing_file_and_folder_are_refused(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(Run, tmp_path / path)


# --- written files

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
def test_environment_is_used_and_never_written(tmp_path: Path) -> None:
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
def test_written_config_loads_to_the_same_config(tmp_path: Path) -> None:
    loaded = load_config(Run, config_file(tmp_path, SECRETS), [r"name='literal \${x}'", "sets.a.lr=2"])
    assert loaded.config.name == "literal ${x}"
    write_resolved(loaded.resolved, tmp_path / "again.yaml")
    again = load_config(Run, tmp_path / "again.yaml")
    assert (again.config, again.resolved) == (loaded.config, loaded.resolved)


@pytest.mark.usefixtures("environment")
def test_error_shows_no_secret(tmp_path: Path) -> None:
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
def test_value_derived_from_the_environment_is_not_written(tmp_path: Path) -> None:
    loaded = load_config(Derived, config_file(tmp_path, "key: ${oc.env:POLYTURN_KEY}"))
    assert loaded.config.header == f"Bearer {SECRET}"
    assert SECRET not in str(loaded.resolved)
    write_resolved(loaded.resolved, tmp_path / "again.yaml")
    assert load_config(Derived, tmp_path / "again.yaml").config == loaded.config


@pytest.mark.usefixtures("environment")
def test_text_that_contains_an_environment_value_keeps_its_rest(tmp_path: Path) -> None:
    values = (
        "name: ${oc.env:POLYTURN_HOST}\nnote: h.example/data \\${x}\nengine: {kind: server, url: 'https://h.example/v1'}"
    )
    loaded = load_config(Run, config_file(tmp_path, values))
    write_resolved(loaded.resolved, tmp_path / "again.yaml")
    assert "h.example" not in (tmp_path / "again.yaml").read_text()
    assert load_config(Run, tmp_path / "again.yaml").config == loaded.config


def test_aliases_that_multiply_are_refused(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"^\S+run.yaml has [0-9,]+ values where its aliases"):
        read_yaml(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("a: &a [*a]\n")
    refuses(lambda: read_yaml(tmp_path / "run.yaml"), ConfigError, "nested deeper")
    (tmp_path / "run.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a}\n")
    assert read_yaml(tmp_path / "run.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}


@pytest.mark.parametrize("text", ["3", "'3'", "true"])
def test_file_with_one_value_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    refuses(lambda: read_yaml(tmp_path / "run.yaml"), ConfigError, "run.yaml", "one value")


@pytest.mark.parametrize(("sets", "key"), [("5: {lr: 1}", "5"), ("on: {lr: 1}", "True")])
def test_non_text_key_is_named(tmp_path: Path, sets: str, key: str) -> None:
    message = refused(tmp_path, f"sets: {{{sets}}}")
    assert message == f"sets has the key {key} (in run.yaml); a key must be a text; write it in quotes"


WORDS = [
    (row.key, word)
    for row in schema_table(RunConfig)
    for word in ("off", "on", "no", "yes")
    if repr(word) in row.type and "<" not in row.key and "[" not in row.key
]


@pytest.mark.parametrize(("key", "word"), WORDS)
def test_off_and_on_are_choices_where_a_key_takes_them(key: str, word: str) -> None:
    loaded = load_config(RunConfig, None, ["model.path=tiny", f"{key}={word}"])
    at: Any = loaded.resolved
    for part in key.split("."):
        at = at[part]
    assert at == word


def test_off_and_on_are_read_in_lists_and_unions() -> None:
    class Words(BaseModel):
        many: list[Literal["on", "off"]] = []
        either: Literal["yes", "auto"] | None = None
        truth: bool | Literal["off"] = True

    written = ["many=[on,off]", "either=yes", "truth=off"]
    assert load_config(Words, None, written).config == Words(many=["on", "off"], either="yes", truth=False)


def test_null_takes_a_key_of_another_kind_out() -> None:
    given = {"model": {"path": "x"}, "engine": {"num_slots": 8}}
    loaded = load_config(RunConfig, None, ["engine.kind=vllm", "engine.num_slots=null"], defaults=given)
    assert loaded.config.engine == ServerOptions(kind="vllm") and "num_slots" not in loaded.resolved["engine"]


def test_null_from_the_environment_takes_a_key_of_another_kind_out(tmp_path: Path) -> None:
    text = "engine: {kind: local, url: '${oc.env:POLYTURN_NOT_SET,null}'}"
    assert load(tmp_path, text).engine == Local()


def test_table_names_the_kind_of_a_key() -> None:
    kinds = {row.key: row.of for row in schema_table(RunConfig)}
    found = {key.removeprefix("engine."): of for key, of in kinds.items() if key in ENGINE_KEYS}
    assert found == {"kind": "", "update": "", "num_slots": "embedded", "launch.python": "vllm, sglang", "kwargs": "another"}
    assert kinds["train.distributed.tensor_parallel"] == "torch or megatron"


ENGINE_KEYS = ("engine.kind", "engine.update", "engine.num_slots", "engine.launch.python", "engine.kwargs")


@pytest.mark.parametrize("value", ["0", "20", "30s", "10m", "0.5h"])
def test_checkpoints_come_by_steps_or_by_time(value: str) -> None:
    config = load_config(RunConfig, None, ["model.path=x", f"train.checkpoint_every={value}"]).config
    assert str(config.train.checkpoint_every) == value


def test_kl_of_each_place_may_be_in_one_list() -> None:
    both = "algorithm.kl=[{coef: 0.1}, {coef: 0.2, place: reward}]"
    algorithm = load_config(RunConfig, None, ["model.path=x", both]).config.algorithm
    assert [(kl.coef, kl.name) for kl in (algorithm.kl_in("loss"), algorithm.kl_in("reward"))] == [(0.1, "k3"), (0.2, "k1")]


def test_config_loads_without_torch_and_transformers() -> None:
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


def test_table_shows_defaults_of_each_section() -> None:
    rows = {row.key: row.default for row in schema_table(RunConfig)}
    found = [rows[f"{section}.optim.lr"] for section in ("train", "warm_start", "algorithm.critic")]
    assert [float(text) for text in found] == [1e-6, 1e-4, 1e-5]
    assert rows["rollout.limits.timeout_s"] == "7200.0"
