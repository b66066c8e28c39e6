"""Whole runs of a tiny model with each configurable part of the loss, and the settings that they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyturn import build
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.store.stored_run import open_store
from support.runs import call_command, trained_steps, write_tiny_run
from support.scripted_server import scripted_server

RUN = ["train.steps=2", "evaluation.data=null", "warm_start.conversations=null"]
LORA = "model.lora={rank: 2, alpha: 4}"
CORRECTION = "algorithm.loss.correction={reject: {token_k1: 5.0, seq_mean_k3: 0.5}, veto: 1.0e-4}"


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train, and return the metrics of each step."""
    called = call_command(main, "train", write_tiny_run(folder), *RUN, *overrides)
    assert called.code == 0, called.err
    return trained_steps(folder / "runs/tiny")


def write_unscored(folder: Path) -> None:
    """Write the tasks of the run with a data_source that has no reward, for `UNSCORED`."""
    tasks = write_tiny_run(folder).with_name("tasks.jsonl").read_text()
    (folder / "unscored.jsonl").write_text(tasks.replace('"tiny"', '"talk"'))


UNSCORED = ["data.train.files=unscored.jsonl", "train.group_size=1"]
CRITIC = ["algorithm.kl={place: reward, coef: 0.05, target: 1.0, horizon: 12}", "algorithm.critic.optim.lr=1e-3"]


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        *(([f"algorithm.loss={loss}"], lambda s: True) for loss in ("cispo", "gspo", "clip_cov")),
        (["algorithm.high_entropy_share=0.2"], lambda s: s["policy/high_entropy_threshold"] >= s["policy/entropy"]),
        (["algorithm.advantage=remax"], lambda s: s["tokens/greedy"] > 0 and s["buffer/greedy_failed"] == 0),
        (["algorithm.advantage=bilevel_gae", *CRITIC], lambda s: s["critic/value_loss"] > 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_run_trains_with_each_loss_and_estimator(tmp_path, settings, check):
    steps = train(tmp_path, *settings, "train.minibatches=2")
    assert len(steps) == 2
    assert all(check(s) and s["loss/grad_norm"] > 0 and s["loss/skipped_steps"] == 0 for s in steps)


def test_truncated_trajectories_are_dropped_and_counted(tmp_path):
    """Nearly all trajectories of this random model end at their limit."""
    called = call_command(main, "train", write_tiny_run(tmp_path), *RUN, "train.steps=1", "algorithm.drop_truncated=true")
    assert called.code == 0, called.err
    (step,) = (json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines())
    assert step["buffer/samples_truncated"] > 0 and step["tokens/dropped_truncated"] > 0
    assert sum(step[f"buffer/dropped_decile_{i}"] for i in range(10)) >= step["buffer/samples_truncated"]


def test_run_corrects_for_its_engine(tmp_path):
    """The embedded engine is the policy, so weights are 1 and nothing is rejected: the metrics only show float32's noise."""
    steps = train(tmp_path, CORRECTION)
    for step in steps:
        assert step["policy/correction_weight"] == pytest.approx(1.0, abs=1e-4)
        assert step["policy/correction_effective_share"] == pytest.approx(1.0, abs=1e-4)
        assert step["tokens/dropped_rejected"] == 0
        assert abs(step["policy/off_policy_kl"]) < 1e-4


def test_lora_trains_an_adapter_keeps_it_and_leaves_a_merged_model(tmp_path):
    steps = train(tmp_path, LORA, "algorithm.kl.coef=0.1", "train.checkpoint_every=1")
    assert max(s["policy/rollout_difference_max"] for s in steps) < 1e-4  # the engine samples from the adapted model
    run = tmp_path / "runs/tiny"
    kept = load_file(run / "checkpoints/step-000002/model/adapter_model.safetensors")
    assert kept and all("lora_" in name for name in kept)
    assert not (run / "checkpoints/step-000002/model/model.safetensors").exists()
    evaluated = call_command(main, "eval", tmp_path / "config.yaml", LORA, "--checkpoint", run)
    assert evaluated.code == 0, evaluated.err
    refused = call_command(main, "eval", tmp_path / "config.yaml", "--checkpoint", run / "checkpoints/step-000002")
    assert refused.code != 0 and "contains an adapter and model.lora is not set" in refused.err
    again = ("train", tmp_path / "config.yaml", *RUN, LORA, "algorithm.kl.coef=0.1", "train.steps=3", "--resume")
    settings = (run / "config.yaml").read_text()
    louder = call_command(main, *again, "model.lora.alpha=99")
    assert louder.code == 2 and "and model.lora has 99" in louder.err and (run / "config.yaml").read_text() == settings
    resumed = call_command(main, *again)
    assert resumed.code == 0, resumed.err


def test_policy_with_privileged_text_teaches_itself(tmp_path):
    (tmp_path / "hints.py").write_text("def hint(trajectory, group):\n    return 'Whisper, ' + trajectory.task.id\n")
    steps = train(tmp_path, "algorithm.self_distill={privileged: 'hints.py:hint', coef: 0.5, level: turn}")
    assert all(s["buffer/samples_taught"] == s["buffer/samples"] > 0 for s in steps)
    assert all(s["policy/teacher_gap"] != 0 and s["loss/grad_norm"] > 0 for s in steps)


def test_row_without_its_privileged_column_ends_the_start(tmp_path):
    called = call_command(main, "train", write_tiny_run(tmp_path), *RUN, "algorithm.self_distill.privileged=hint")
    assert called.code == 2 and "'mouse-0'" in called.err and "'hint'" in called.err
    assert not (tmp_path / "runs").exists()


def test_served_teacher_teaches_without_any_reward(tmp_path):
    write_unscored(tmp_path)
    config = load_config(RunConfig, write_tiny_run(tmp_path), []).config
    build.build_codec(build.ConfigSource(config=config, base=tmp_path)).tokenizer.save_pretrained(tmp_path / "theirs")

    def answer(path, body):
        if path == "/v1/models":
            return {"data": [{"id": "big", "max_model_len": 449}]}
        entries = [None, *({str(token): {"logprob": -0.25}} for token in body["prompt"][1:])]
        return {"choices": [{"prompt_logprobs": entries}]}

    with scripted_server(answer) as url:
        teacher = f"{{url: '{url}', tokenizer: theirs, data_sources: [talk]}}"
        alone = f"algorithm.served_teachers={{advantage_coef: 0.0, teachers: [{teacher}]}}"
        steps = train(tmp_path, alone, *UNSCORED, "train.groups_per_step=6")
        other = f"{{url: '{url}', tokenizer: theirs, data_sources: [math]}}"
        refused = call_command(
            main, "train", tmp_path / "config.yaml", *RUN, f"algorithm.served_teachers.teachers=[{other}]"
        )
    assert all(s["buffer/samples_taught"] == s["buffer/samples"] > 0 for s in steps)
    assert not any(name.startswith("reward/") for s in steps for name in s)
    # A policy of random weights gives each of 300 tokens about 1 / 300.
    assert all(s["policy/teacher_gap"] == pytest.approx(np.log(300) - 0.25, abs=0.3) for s in steps)
    assert refused.code == 2 and "'tiny'" in refused.err and "'math'" in refused.err


def test_served_teacher_that_is_away_ends_the_start(tmp_path):
    with scripted_server(lambda path, body: {}) as url:
        pass
    teachers = f"algorithm.served_teachers.teachers=[{{url: '{url}'}}]"
    called = call_command(main, "train", write_tiny_run(tmp_path), *RUN, teachers)
    assert called.code == 2 and url in called.err
    warm = call_command(main, "train", tmp_path / "config.yaml", *RUN, teachers, "rollout.sampling.temperature=0.7")
    assert warm.code == 2 and "0.7" in warm.err
    assert not (tmp_path / "runs").exists()


def test_teacher_teaches_the_same_without_any_reward(tmp_path):
    """The loss is only the KL, so a run without rewards trains like one with rewards, and reports none."""
    train(tmp_path / "first", "train.steps=1", "train.optim.lr=0.3")
    teacher = next((tmp_path / "first/runs/tiny").glob("checkpoints/step-*/model"))
    assert AutoModelForCausalLM.from_pretrained(teacher) is not None
    distill = f"algorithm.loss={{name: none, distill: {{teacher: {teacher}, estimator: k3+}}}}"
    write_unscored(tmp_path / "second")
    common = [distill, "train.group_size=1", "train.groups_per_step=8", "engine.deterministic=true"]
    steps = train(tmp_path / "second", *common, *UNSCORED)
    scored = train(tmp_path / "scored", *common)
    assert all(s["loss/grad_norm"] > 0 and s["policy/kl_to_teacher"] > 0 for s in steps)
    for name in ("policy/kl_to_teacher", "loss/grad_norm"):
        assert [s[name] for s in steps] == [s[name] for s in scored]
    assert all(s["loss/policy"] == 0 and s["buffer/samples_kept"] > 0 for s in steps)
    assert not [name for s in steps for name in s if name.startswith("reward/") or name == "rollout/success"]
    trajectories = list(open_store(tmp_path / "second/runs/tiny").trajectories())
    assert len(trajectories) == 16 and all(t.reward is None and not t.is_failed for t in trajectories)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.dynamic_sampling=2", "train.group_size=2"], "train.dynamic_sampling"),
        (["algorithm.kl={place: reward, coef: 0.1}"], "algorithm.kl"),
        (["algorithm.advantage=gae"], "'gae'"),
        (["evaluation.data={files: unscored.jsonl}"], "evaluation.data"),
        (["algorithm.loss=ppo_clip"], "no reward for the data_source 'talk'"),
    ],
)
def test_part_that_reads_rewards_is_refused_without_any(tmp_path, overrides, message):
    without = ["algorithm.loss=none", "algorithm.observation_coef=0.1", *UNSCORED]
    write_unscored(tmp_path)
    called = call_command(main, "train", write_tiny_run(tmp_path), *RUN, *without, *overrides)
    assert called.code == 2 and message in called.err and "Traceback" not in called.err
    assert not (tmp_path / "runs").exists()


def test_reference_can_be_another_model(tmp_path):
    train(tmp_path / "first", "train.steps=1", "train.optim.lr=0.05")
    other = next((tmp_path / "first/runs/tiny").glob("checkpoints/step-*/model"))
    steps = train(tmp_path / "second", "algorithm.kl.coef=0.1", f"model.reference={other}")
    assert steps[0]["policy/kl_to_reference"] > 1e-4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss=gspoo"], "Did you mean 'gspo'"),
        (["algorithm.loss=none"], "algorithm.loss.distill or algorithm.observation_coef"),
        (["algorithm.loss.correction={}", "algorithm.old_logprobs=engine"], "set old_logprobs to 'trainer'"),
        (["model.lora={target_modules: [query]}"], "its linear modules are"),
    ],
)
def test_impossible_loss_is_refused(tmp_path, overrides, message):
    called = call_command(main, "train", write_tiny_run(tmp_path), *RUN, *overrides)
    assert called.code != 0
    assert message in called.err and "Traceback" not in called.err
