"""Plug-in files written for ms-swift run as they are: loaded by name, driven by the native loop, byte for byte the same."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn import compat
from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.gym_env import ContextManager, Env, context_managers, envs
from polyturn.compat.swift.orm import orms
from polyturn.compat.swift.schedulers import multi_turns
from polyturn.compat.swift.turn_weights import OUTPUTS
from polyturn.core.errors import ConfigError, MissingModuleError
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import to_source
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.engines.scripted import ScriptedEngine
from polyturn.infra.plugins import import_attr, load_plugins
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from support.compat_parts import play_swift
from support.refusals import refuses

FILES = Path(__file__).parents[2] / "data" / "swift_plugins"
MAPS = {
    0: "GFFF/FFSF/FFHF/FFFF",
    1: "FHFF/SFFF/GFHF/FFFF",
    5: "FSFH/FHFF/HFHF/FFGF",
}


@pytest.fixture(scope="module", autouse=True)
def _files() -> Iterator[None]:
    folders = list(sys.path)
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES.glob("*.py")}
    compat.install("swift")
    load_plugins(sorted(FILES.glob("*.py")))
    yield
    sys.path[:] = folders
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES.glob("*.py")} == before


async def play(scheduler: str, says: list[str], row: Task, *, max_turns: int | None = 3, **options: Any) -> Trajectory:
    return await play_swift(scheduler, says, row=row, max_turns=max_turns, options=options)


def infos(trajectory: Trajectory) -> Mapping[str, Any]:
    return {k: v for turn in trajectory.turns for k, v in turn.info.items() if k != OUTPUTS}


def said(trajectory: Trajectory) -> list[str]:
    return [m.text for m in trajectory.messages if m.role == "assistant"]


# --- FrozenLake ---------------------------------------------------------------------------------------------------------


def frozen(seed: int) -> Task:
    return task("<placeholder>", extra={"env_config": {"name": "frozen_lake", "seed": seed}})


@pytest.mark.parametrize(("seed", "board"), MAPS.items())
async def test_frozen_lake_has_the_maps_of_ms_swift(seed: int, board: str) -> None:
    trajectory = await play("gym_scheduler", ["<action>nowhere</action>"], frozen(seed), max_turns=1)
    shown = next(m.text for m in trajectory.messages if m.role == "user")
    assert shown.replace(" ", "").replace("\n", "/") == board.replace("S", "P")


async def test_won_frozen_lake_ends_with_infos_and_turn_scores() -> None:
    trajectory = await play(
        "gym_scheduler", ["<action>UP</action>", "I go left", "<action>left</action>"], frozen(0), max_turns=None
    )
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert infos(trajectory) == {"total_reward": 1.0, "step_rewards": [0, 0, 1.0], "gym_done": True}
    assert trajectory.turn_scores == (0.0, 0.0, 1.0)
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    (segment,) = trajectory.segments
    sampled = [s for s in segment.spans if s.source is SpanSource.SAMPLED]
    assert len(sampled) == 3 and all(s.loss_weights.all() for s in sampled), "the tokens of every turn are trained"


# --- ReAct --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "result"),
    [
        ("1+1", "Result: 2"),
        ("abc", "Error: expression contains disallowed characters."),
        ("1/0", "Calculation error: division by zero"),
    ],
)
async def test_react_results_continue_the_message_and_are_masked(written: str, result: str) -> None:
    call = f"Action: calculator\nAction Input: {written}\n"
    trajectory = await play("tool_call_scheduler", [call, "The answer is 20"], task())
    assert said(trajectory) == [f"{call}{result}The answer is 20"]
    assert infos(trajectory) == {"tool_results": result}
    (segment,) = trajectory.segments
    codec = tiny_codec()
    parts = [(s.source, codec.decode(s.ids), bool(s.loss_weights.any())) for s in segment.spans[1:]]
    ended = codec.decode(np.array(codec.stop_token_ids[:1], np.int32))
    assert parts == [
        (SpanSource.SAMPLED, call, True),
        (SpanSource.OBSERVATION, result, False),
        (SpanSource.SAMPLED, f"The answer is 20{ended}", True),
    ]


async def test_reply_without_a_known_call_ends_or_is_answered() -> None:
    ended = await play("tool_call_scheduler", ["no tool"], task())
    assert (len(ended.turns), infos(ended)) == (1, {})
    unknown = await play("tool_call_scheduler", ["Action: foo\nAction Input: 1\n", "ok"], task())
    assert infos(unknown) == {"tool_results": "unknown tool foo"}


async def test_stop_word_cuts_invented_observations() -> None:
    call = "Action: calculator\nAction Input: 1+1\n"
    trajectory = await play(
        "tool_call_scheduler", [f"{call}Observation: 7 surely", "It is 2"], task(), stop_words=["Observation:"]
    )
    assert said(trajectory) == [f"{call}Result: 2It is 2"]
    assert trajectory.metrics["dropped_cut"] > 0


# --- Sudoku -------------------------------------------------------------------------------------------------------------


class FakeSudoku:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.closed = 0
        self.moves: list[str] = []

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"messages": [{"content": "an empty grid"}]}, {}

    def step(self, action: Mapping[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        self.moves.append(action["message"])
        return ("invalid" if action["message"] == "[9 9 9]" else "placed"), 0.0, len(self.moves) == 3, {}

    def close(self) -> None:
        self.closed += 1


async def test_sudoku_scores_its_parts_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeSudoku] = []

    def create(self: Any, config: Mapping[str, Any]) -> FakeSudoku:
        made.append(FakeSudoku(config))
        return made[-1]

    monkeypatch.setattr(multi_turns["sudoku_scheduler"], "_create_env", create)
    trajectory = await play("sudoku_scheduler", ["[1 1 1]", "[1 1 1]", "hm"], task(extra={"env_config": {}}), max_turns=5)
    assert [e.closed for e in made] == [1]
    assert made[0].moves == ["[1 1 1]", "[1 1 1]"]
    assert trajectory.stop_reason is StopReason.ENV_DONE
    assert trajectory.turn_scores[:2] == pytest.approx((1 + 1 + 0 + 1 / 51, 1 + 0 - 2 + 1 / 51))
    assert trajectory.turn_scores[2] == -1.0
    assert infos(trajectory)["gym_done"] is True and "empty_cell_reward" in infos(trajectory)


def test_openenv_reply_is_json_or_a_message() -> None:
    scheduler = multi_turns["openenv_scheduler"]()
    assert scheduler.parse_action('```json\n{"a":1}\n```') == {"a": 1}
    assert scheduler.parse_action("hey") == {"message": "hey"}
    assert scheduler.parse_action("[1]") == {"message": "[1]"}
    assert scheduler.format_observation({"é": 1}) == '{"é": 1}'
    assert scheduler.format_observation('a "b"') == '"a \\"b\\""'
    assert scheduler.format_observation({(1, 2): 3}) == "{(1, 2): 3}"
    assert scheduler.max_concurrent_envs == 4


# --- DeepEyes -----------------------------------------------------------------------------------------------------------


async def test_crop_is_in_the_next_turn_and_the_record() -> None:
    vision = pytest.importorskip("support.vision")
    codec = Codec(vision.vision_tokenizer())
    media = MediaProcessor(vision.tiny_processor(codec.tokenizer), codec)
    image = to_source("image", np.zeros((64, 64, 3), np.uint8))
    row = Task(
        id="t",
        data_source="openai/gsm8k",
        prompt=(Message(role="user", content=({"type": "image", "image": image}, {"type": "text", "text": "Color?"})),),
    )
    call = '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 40, 40]}}</tool_call>'
    ends = codec.stop_token_ids[:1]
    script = ScriptedEngine([[*codec.encode(text), *ends] for text in (call, "<answer>black</answer>")])
    context = dataclasses.replace(
        scripted_context(
            [], scheduler=SwiftScheduler("deepeyes_scheduler", max_turns=3), rewards={"*": lambda trajectory: 1.0}
        ),
        engine=script,
        codec=codec,
        media=media,
    )
    trajectory = await run_episode(context, row, id="e0")
    assert trajectory.error is None
    assert [len(m.media) for m in trajectory.messages] == [1, 0, 1, 0]
    assert len(trajectory.segments[0].media) == 2
    assert len(infos(trajectory)["images"]) == 2


async def test_unreadable_call_is_reported_to_the_model() -> None:
    trajectory = await play("deepeyes_scheduler", ["<tool_call>zoom</tool_call>", "<answer>4</answer>"], task())
    told = [m.text for m in trajectory.messages if m.role == "user"][1]
    assert told.startswith("Error: Invalid tool call format: ")


# --- rewards ------------------------------------------------------------------------------------------------------------


def test_registered_rewards_score_as_described() -> None:
    countdown = orms["external_countdown"]()
    assert countdown(["<answer>1+2*3</answer>", "<answer>1+2</answer>", "7"], target=[7] * 3, nums=[[1, 2, 3]] * 3) == [
        1,
        0,
        0,
    ]
    assert orms["gsm8k_accuracy"]()(["so \\boxed{1,024}", "#### 3"], solution=["#### 1024", "#### 4"]) == [1.0, 0.0]
    assert orms["gsm8k_format"]()(["\\boxed{1}", "1"]) == [1.0, 0.0]


# --- loading ------------------------------------------------------------------------------------------------------------


OTHER_LAKE = "from swift.rollout.gym_env import Env, envs\nclass Lake(Env):\n    pass\nenvs['frozen_lake'] = Lake\n"


@pytest.mark.parametrize(
    ("name", "source", "error", "words"),
    [
        ("gsm8k_plugin.py", "x = 1\n", ConfigError, "'gsm8k_plugin'"),
        ("another_lake.py", OTHER_LAKE, ConfigError, "'frozen_lake'.*frozen_lake_plugin.*another_lake"),
        (
            "broken_plugin.py",
            "import no_such_library_at_all\n",
            MissingModuleError,
            r"broken_plugin\.py.*ModuleNotFoundError",
        ),
        ("not_there.py", None, MissingModuleError, "not_there"),
    ],
)
def test_impossible_plugin_files_are_named(
    name: str, source: str | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / name).write_text(source)
    with pytest.raises(error, match=words):
        load_plugins([name], base=tmp_path)


def test_plugin_finds_files_beside_it_and_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "helper_of_a_plugin.py").write_text("VALUE = 3\n")
    (tmp_path / "plugin_and_class.py").write_text(
        "from helper_of_a_plugin import VALUE\nfrom swift.plugin import MultiTurnScheduler, multi_turns\n"
        "class Mine(MultiTurnScheduler):\n    pass\nmulti_turns['mine_twice'] = Mine\n"
    )
    (module,) = load_plugins([tmp_path / "plugin_and_class.py"])
    assert module.VALUE == 3
    assert load_plugins([tmp_path / "plugin_and_class.py"]) == [module]
    assert import_attr("plugin_and_class.py:Mine", base=tmp_path) is multi_turns["mine_twice"]


def test_registered_classes_are_checked_when_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lake(Env):
        async def rest(self, config: Any) -> Any: ...
        async def step(self, action: Any) -> Any: ...
        async def close(self) -> None: ...

    class Short(ContextManager):
        def manage_contexts(self, history: Any, trajectory_id: str) -> Any: ...

    monkeypatch.setitem(envs, "lake", Lake)
    monkeypatch.setitem(context_managers, "short", Short)
    refuses(lambda: envs.find("lake"), ConfigError, "envs['lake']", "`rest`", "`reset`")
    refuses(lambda: context_managers.find("short"), ConfigError, "context_managers['short']", "`manage_contexts`")


@pytest.mark.parametrize("register", [orms.update, orms.__ior__])
def test_name_of_another_plugin_is_refused_in_updates(register: Any, tmp_path: Path) -> None:
    class Ours: ...

    (tmp_path / "other_rewards.py").write_text("class Theirs: ...\n")
    register({"of_two_files": import_attr("other_rewards.py:Theirs", base=tmp_path)})
    try:
        refuses(lambda: register({"of_two_files": Ours}), ConfigError, "'of_two_files'", "Theirs", "Ours")
    finally:
        del orms["of_two_files"]
