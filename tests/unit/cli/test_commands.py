"""Every command once, on a tiny run: its output, and its files."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from polyturn.api import console as console_module
from polyturn.api.folders import keep_tokenizer, later_run, new_run_folder
from polyturn.build import model_folder
from polyturn.cli import train as train_command
from polyturn.cli.main import COMMANDS, app, guarded, main
from polyturn.core.errors import CheckpointError, ConfigError, one_line
from polyturn.evaluation.report import EvalReport
from polyturn.infra.folder_lock import hold_folder
from polyturn.store.stored_run import open_store
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tracking import console as progress_module
from support.refusals import refuses
from support.runs import Called, call_command, write_tiny_run

pytestmark = pytest.mark.timeout(300)
call = functools.partial(call_command, main)

GSM8K = {"question": "Tom has 2 pens and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Called]:
    """Return the config of a run that was trained once, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_tiny_run(folder)
    settings = ["warm_start.steps=2", "evaluation.every=1", "train.keep_checkpoints=1"]
    called = call("train", config, *settings)
    assert called.code == 0, called.err
    return config, called


def run_of(config: Path, name: str = "tiny") -> Path:
    return config.parent / "runs" / name


def is_quiet(called: Called) -> bool:
    """Return whether stderr has only our own lines: no bars and no warnings of other libraries."""
    foreign = ("Loading weights", "it/s]", "FutureWarning", "UserWarning", "`torch_dtype`", "generation flags", "Traceback")
    return not any(words in called.err for words in foreign)


def test_train_shows_a_table_and_its_files(trained: tuple[Path, Called]):
    config, called = trained
    run = run_of(config)
    assert "before and after" in called.out and "success" in called.out and "mean turns" in called.out
    names = ("time ", "curve", "checkpoint", "trajectories")
    facts = dict(line.split(None, 1) for line in called.out.splitlines() if line.startswith(names))
    assert (Path(facts["curve"]), Path(facts["checkpoint"])) == (run / "curve.png", run / "checkpoints" / "step-000003")
    assert float(facts["time"].partition(" generating, ")[2].split()[0]) > 0, "even three tiny steps are not 0 s of training"
    assert Path(facts["trajectories"]) == run / "trajectories" and (run / "curve.png").stat().st_size > 1000
    assert f"polyturn show {run}" in called.out
    assert is_quiet(called)


def test_table_of_three_sets_fits_eighty_columns():
    from rich.console import Console

    one = {**dict.fromkeys(train_command.ROWS, 0.123), "valid_tool_calls": float("nan")}
    sets = {"greedy": one, "temperature 1": {**one, "repaired": float("nan")}, "one turn": {**one, "success": 1.0}}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(train_command.report_table(sets, sets))
    shown = captured.get()
    assert "…" not in shown and max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "temperature 1" in shown and "100.0 → 100.0 %" in shown and "- → - %" in shown
    assert "valid tool calls" not in shown, "no set had a call"


def test_untouched_model_is_evaluated_before_a_warm_start(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    settings = ["warm_start.steps=1", "train.steps=1", "evaluation.before_warm_start=true"]
    called = call("train", config, *settings)
    assert called.code == 0, called.err
    run = open_store(run_of(config))
    assert len(list(run.trajectories(split="eval/untouched greedy"))) == 2
    first = json.loads((run_of(config) / "metrics.jsonl").read_text().splitlines()[0])
    assert "eval/untouched greedy/success" in first
    assert re.search(r"success +\S+ → \S+ → \S+ %", called.out)
    assert called.err.index("untouched greedy") < called.err.index("warm start: 1 of 1 steps")


def test_train_logs_each_step_and_evaluation(trained: tuple[Path, Called]):
    _, called = trained
    begins = [" ".join(line.split()[:2]) for line in called.err.splitlines()]
    assert [b for b in begins if b.startswith("step")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert begins.count("eval greedy") == 4
    assert begins.count("warm start:") == 1 and "warm start: 2 of 2 steps, loss" in called.err


def test_written_config_loads_to_the_same_config_again(trained: tuple[Path, Called]):
    config, _ = trained
    written = yaml.safe_load((run_of(config) / "config.yaml").read_text())
    assert written["train"]["steps"] == 3 and written["warm_start"]["steps"] == 2
    again = call("config", run_of(config) / "config.yaml")
    assert again.code == 0 and yaml.safe_load(again.out) == written


def test_dry_run_shows_task_and_cost_and_writes_nothing(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    called = call("train", config, "--dry-run")
    assert called.code == 0, called.err
    for words in (
        "group_size: 3",
        "first task     mouse-0",
        "How loud is mouse 0?",
        "parameters",
        "KV cache",
        "episodes",
        "each rank: gradients",
        "each rank: moments of AdamW",
        "each rank: activations",
        "without results of tools and users' messages; at most 2688 (rollout.limits.max_context)",
        "time of a step",
    ):
        assert words in called.out
    assert re.search(r"tokens +[\d.]+ MB\n", called.out), "the longest name stands apart from its value"
    assert not re.search(r"(\d+ ){20}", called.out), "ids are shown when they are asked for"
    assert re.search(r"(\d+ ){20}", call("train", config, "--dry-run", "--ids").out)
    assert "clip_low" not in called.out and "null" not in called.out, "a default is not news"
    assert "6 to train on; evaluation sets: greedy (2 tasks)" in called.out
    assert not (tmp_path / "runs").exists() and is_quiet(called)


def test_dry_run_tells_of_rows_and_settings_that_look_wrong(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    with (tmp_path / "tasks.jsonl").open("a") as tasks:
        rat = {"id": "rat", "data_source": "tiny", "prompt": "How loud is the rat?", "interactions": "coach"}
        tasks.write(json.dumps(rat) + "\n")
    called = call("train", config, "--dry-run", "reward.routes={tinny: plugins.py:score}")
    assert called.code == 0, called.err
    assert "data.train: 1 of 7 tasks name no interaction" in called.err
    assert "have the column 'interactions', which only" in called.err and "did you mean 'interaction'?" in called.err
    assert "reward.routes has 'tinny', and no task has such a data_source. Did you mean 'tiny'?" in called.err
    called = call("train", config, "--dry-run", "rollout.limits.max_context=10")
    assert called.code == 2 and "rollout.limits.max_context 10 allows 9; raise the limit" in called.err


def test_error_names_the_line_of_a_plugin_that_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    exec(compile("\n\ndef reset():\n    1 / 0\n", tmp_path / "maze.py", "exec"), names)

    def failing() -> None:
        try:
            names["reset"]()
        except ZeroDivisionError as problem:
            raise ConfigError(f"reset raised {one_line(problem)}") from problem

    with pytest.raises(SystemExit):
        guarded(failing)
    assert capsys.readouterr().err == "polyturn: reset raised ZeroDivisionError: division by zero (maze.py, line 4)\n"


def test_rollout_records_its_tasks(trained: tuple[Path, Called]):
    config, _ = trained
    called = call("rollout", config, "-n", 2, "--checkpoint", run_of(config))
    assert called.code == 0, called.err
    # A group is printed once it is complete, whichever comes first.
    assert sorted(line.split()[0] for line in called.out.splitlines() if line.startswith("g")) == [
        f"g{g}/{m}" for g in (0, 1) for m in (0, 1, 2)
    ]
    assert len(open_store(run_of(config, "tiny-rollout"))) == 6
    assert is_quiet(called)


def test_eval_takes_any_model_by_its_folder(trained: tuple[Path, Called]):
    config, _ = trained
    called = call("eval", config, "--model", model_folder(run_of(config)), "--json")
    assert called.code == 0, called.err
    found = json.loads(called.out)
    assert found["sets"]["greedy"]["statistics"]["all"]["num_tasks"] == 2
    assert str(model_folder(run_of(config))) in (Path(found["folder"]) / "config.yaml").read_text()


def test_eval_judges_a_checkpoint(trained: tuple[Path, Called]):
    config, _ = trained
    called = call("eval", config, "--checkpoint", run_of(config) / "checkpoints" / "step-000003")
    assert called.code == 0, called.err
    report = json.loads((run_of(config, "tiny-eval") / "report.json").read_text())
    assert report["greedy"]["num_trajectories"] == 2
    assert "mean reward" in called.out and "report.json" in called.out and is_quiet(called)
    during = [r for r in open_store(run_of(config)).table().to_pylist() if r["split"] == "eval/greedy" and r["step"] == 3]
    after = open_store(run_of(config, "tiny-eval")).table().to_pylist()
    assert [r["reward"] for r in after] == [r["reward"] for r in during], "the checkpoint is the model that was trained"


def test_sft_trains_on_conversations(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    called = call("sft", config, "warm_start.steps=2")
    assert called.code == 0, called.err
    assert (run_of(config, "tiny-sft") / "model" / "config.json").is_file()
    assert len((run_of(config, "tiny-sft") / "sft_metrics.jsonl").read_text().splitlines()) == 2
    nothing = call("sft", config)
    assert nothing.code == 2 and "warm_start.steps is 0" in nothing.err


def test_sft_trains_on_the_best_trajectories_of_a_run(trained: tuple[Path, Called]):
    config, _ = trained
    settings = ["warm_start.steps=1", f"warm_start.conversations={run_of(config)}", "name=rejection"]
    called = call("sft", config, *settings, "warm_start.min_reward=0.1")
    assert called.code == 0, called.err
    too_good = call("sft", config, *settings, "warm_start.min_reward=99")
    assert too_good.code == 2 and "has a reward of at least 99; the best has" in too_good.err


def test_show_lists_trajectories_and_shows_one(trained: tuple[Path, Called]):
    config, _ = trained
    listed = call("show", run_of(config), "--split", "train", "-n", 4)
    assert listed.code == 0 and len([x for x in listed.out.splitlines() if x.startswith("g")]) == 4
    assert re.search(r"18 trajectories; one of them: \S*polyturn show", listed.out)
    assert re.search(r"of these: (\d+ ended by \w+(, )?)+", listed.out), "why they ended, and how many"
    one = call("show", run_of(config), "g0/0")
    assert "How loud is mouse" in one.out and "turn 0" in one.out and "reward" in one.out
    assert re.search(r"task mouse-\d  of tiny .*interaction coach", one.out)
    assert re.search(r"stopped \w+  (a completion was cut|no turn is left|the model finished)", one.out)
    assert re.search(r"trained with advantage|not trained: every member of its group had the same reward", one.out)
    repeated = call("show", run_of(config), "eval-greedy-0/0")
    first, *others = map(int, re.findall(r"\d+", re.search(r"step \d+, group.*\n.*other steps: .*", repeated.out)[0]))
    again = call("show", run_of(config), "eval-greedy-0/0", "--step", others[-1])
    assert f"step {others[-1]}, group" in again.out and first not in others
    no_split = call("show", run_of(config), "--split", "eval")
    assert "no trajectories of the split 'eval'. Known: 'eval/greedy', 'train'." in no_split.err
    unknown = call("show", run_of(config), "g0/9")
    assert unknown.code == 2 and "no trajectory 'g0/9'" in unknown.err
    nowhere = call("show", config.parent / "nothing")
    assert nowhere.code == 2 and "there is no folder" in nowhere.err


def test_check_describes_a_template(trained: tuple[Path, Called]):
    config, _ = trained
    called = call("check", run_of(config) / "checkpoints" / "step-000003" / "model")
    assert called.code == 0, called.err
    assert "renders tools" in called.out and "<|im_end|>" in called.out and is_quiet(called)
    missing = call("check", run_of(config) / "checkpoints" / "step-000003" / "model", "--template", "none.jinja")
    assert missing.code == 2 and "none.jinja" in missing.err


def test_check_exits_with_1_for_an_unsafe_template(trained: tuple[Path, Called], tmp_path: Path):
    config, _ = trained
    model = run_of(config) / "checkpoints" / "step-000003" / "model"
    found = json.loads(call("check", model, "--json").out)
    assert found["strategy"] == "append" and found["violations"] == [] and found["control_tokens_from_text"] == 0
    assert found["properties"]["renders_tools"] is True and found["reason"] and found["template"] == str(model)
    assert found["parser"] == "hermes"
    template = tmp_path / "marked.jinja"
    template.write_text("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")
    marked = json.loads(call("check", model, "--template", template, "--json").out)
    assert marked["added_markers"] == ["<|user|>", "<|end|>"]
    template.write_text("{% for m in messages %}{{ m.content }}")
    broken = call("check", model, "--template", template, "--json")
    assert broken.code == 1 and json.loads(broken.out)["strategy"] == "none" and "not valid Jinja" in broken.out
    refused = json.loads(broken.out)
    assert refused.keys() == found.keys() and refused["properties"].keys() == found["properties"].keys()
    assert call("check", model, "--template", template).code == 1


def test_check_counts_the_findings_that_its_table_leaves_out(tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    template = tmp_path / "counts.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ messages | length }} {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    num = len(json.loads(call("check", tmp_path / "tokenizer", "--template", template, "--json").out)["findings"])
    assert num > 12 and f"and {num - 4} more" in call("check", tmp_path / "tokenizer", "--template", template).out


def test_config_lists_every_key_or_fills_one_file_in(tmp_path: Path):
    keys = call("config")
    assert keys.code == 0 and "rollout.limits.max_turns" in keys.out
    filled = call("config", write_tiny_run(tmp_path), "train.steps=7")
    assert yaml.safe_load(filled.out)["train"]["steps"] == 7


def test_help_of_rollout_says_what_is_counted():
    assert "Number of training tasks; each has" in " ".join(call("rollout", "--help").out.split())


def test_config_lists_the_keys_of_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollout").mkdir()  # a folder of that name is not a config
    found = call("config", "rollout.limits")
    assert found.code == 0 and "Completions of an episode" in found.out
    keys = {line.split()[0] for line in found.out.splitlines() if line[:1].strip()}
    assert keys - {"key"} and all(key.startswith("rollout.limits") for key in keys - {"key"})
    assert "rollout.limits.max_turns" in call("config", "rollout").out
    (wrong,) = call("config", "rollout.limit").err.splitlines()
    assert "'rollout.limit'" in wrong and "'rollout.limits'" in wrong
    assert "train.steps=3" in call("config", "train", "train.steps=3").err


@pytest.mark.parametrize("variant", ["tool", "interaction"])
def test_data_gsm8k_writes_its_files(tmp_path: Path, variant: str):
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(json.dumps(GSM8K) + "\n")
    called = call("data", "gsm8k", "--from", source, "--variant", variant, "--out", tmp_path / "out")
    assert called.code == 0, called.err
    assert [Path(line).name for line in called.out.splitlines()] == ["train.parquet", "test.parquet"]
    assert all(Path(line).is_file() for line in called.out.splitlines())


def test_ctrl_c_outside_training_exits_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # a first one lets the step under way end
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("polyturn.api.warm_starting.run_sft", interrupted)
    called = call("train", write_tiny_run(tmp_path), "warm_start.steps=5")
    assert called.code == 130 and "Traceback" not in called.err
    assert called.err.count("polyturn: interrupted") == 1, called.err


def test_second_run_gets_a_folder_of_its_own(tmp_path: Path):
    with ThreadPoolExecutor(4) as threads:  # at once, too
        made = list(threads.map(new_run_folder, [tmp_path / "runs" / "a"] * 4))
    assert {folder.name for folder in made} == {"a", "a-2", "a-3", "a-4"}
    assert later_run(tmp_path / "runs" / "a") == tmp_path / "runs" / "a-4", "of which a resumed run says that it is later"
    assert later_run(tmp_path / "runs" / "a-4") is None
    (tmp_path / "gone").symlink_to("nowhere")
    refuses(lambda: new_run_folder(tmp_path / "gone" / "a"), ConfigError, "cannot be made or written")


def test_file_system_without_locks_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with hold_folder(tmp_path), hold_folder(tmp_path):
        pass
    assert "so nothing keeps a second process from training" in caplog.text and "No locks available" in caplog.text


def test_older_step_is_taken_where_the_newest_has_no_model(tmp_path: Path, caplog: Any):
    for step, name in ((1, "config.json"), (2, "damaged")):
        model = tmp_path / "checkpoints" / f"step-00000{step}" / "model"
        model.mkdir(parents=True)
        (model / name).touch()
    assert model_folder(tmp_path) == tmp_path / "checkpoints" / "step-000001" / "model"
    assert re.search(r"no model in \S*step-000002; using the older one in \S*step-000001", caplog.text)


def test_checkpoint_is_named_by_run_folder_or_model(trained: tuple[Path, Called], tmp_path: Path):
    config, _ = trained
    model = run_of(config) / "checkpoints" / "step-000003" / "model"
    assert {model_folder(p) for p in (run_of(config), model.parent, model)} == {model}
    assert model_folder(None) is None
    refuses(lambda: model_folder(tmp_path), CheckpointError, "there is no model in")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    refuses(lambda: model_folder(tmp_path), CheckpointError, "there is no model in", "train.export")


def test_log_lines_and_progress_bars_share_one_console(monkeypatch: pytest.MonkeyPatch):
    """Rich prints a line above a bar of the same console; two consoles would write through one another."""
    from rich.console import Console

    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=60)
    for module in (console_module, progress_module):
        monkeypatch.setattr(module, "stderr_console", lambda: console)
    handler = console_module.ConsoleHandler()
    with progress_module.Progress("rollout", 3, pause_s=0.0) as bar:
        while "rollout" not in shown.getvalue():
            time.sleep(0.005)
        bar.advance()
        handler.emit(logging.LogRecord("polyturn", logging.INFO, "", 0, "step 1/3 [not markup]", None, None))
    assert "step 1/3 [not markup]\n" in shown.getvalue().replace("\x1b[0m", "")


def test_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    def failing(number: int) -> None:
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")

    with pytest.raises(SystemExit) as ended:
        guarded(lambda: failing(errno.ENOSPC))
    assert ended.value.code == 2
    said = "polyturn: the disk is full ([Errno 28] No space left on device: 'runs/a/metrics.jsonl'); free some space\n"
    assert capsys.readouterr().err == said
    with pytest.raises(IsADirectoryError):
        guarded(lambda: failing(errno.EISDIR))


def test_tokenizer_that_cannot_be_kept_is_one_sentence(tmp_path: Path):
    def full(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    parts: Any = SimpleNamespace(tokenizer=SimpleNamespace(save_pretrained=full))
    refuses(
        lambda: keep_tokenizer(parts, tmp_path), ConfigError, "cannot be made or written (Exception: No space left on device"
    )


def test_help_loads_nothing_heavy():
    code = "import sys\nfrom polyturn.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'ray', 'aiohttp', 'asyncio'} & set(sys.modules)))"
    environment = {**os.environ, "COLUMNS": "80"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "..." not in ended.stdout.replace("[ARGS]...", ""), "every command is told whole, in a line"
    assert ended.stdout.splitlines()[-1] == "[]"
    assert all(command in ended.stdout for command in ("train", "sft", "eval", "rollout", "show", "check", "config", "data"))


def test_list_of_commands_has_the_first_sentence_of_each_help():
    group = typer.main.get_command(app)
    for name, sentence in COMMANDS.items():
        shown = group.get_command(typer.Context(group), name).get_short_help_str(200)
        assert shown.rstrip(".") == sentence.rstrip("."), name


def test_before_and_after_table_shows_numbers_of_a_report():
    assert set(train_command.ROWS) <= {field.name for field in dataclasses.fields(EvalReport)}


def test_lists_load_no_config_and_configs_load_no_model():
    lists = {"torch", "transformers", "pydantic", "omegaconf", "jinja2", "duckdb", "aiohttp"}
    for modules, heavy in ("polyturn.cli.list_runs, polyturn.cli.show", lists), ("polyturn.api.given", {"torch"}):
        code = f"import sys, {modules}\nprint(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert heavy & set(loaded) == set()


@pytest.mark.parametrize("call", ["main(['train', 'config.yaml'])", "polyturn.train(config='config.yaml')"])
def test_run_logs_before_and_while_pytorch_is_imported(tmp_path: Path, call: str):
    write_tiny_run(tmp_path)
    script = f"""
import logging, os, sys, threading
import polyturn
from polyturn.cli.main import main

told_again = threading.Event()

class SlowTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":  # transformers asks for torch itself whether it is installed
            print("importing torch", flush=True)
            told_again.wait()
            os._exit(0)

class Lines(logging.Handler):
    def emit(self, record):
        print(record.getMessage().rstrip("0123456789s"), flush=True)
        if "PyTorch: " in record.getMessage():
            told_again.set()

sys.meta_path.insert(0, SlowTorch())
logging.getLogger("polyturn").addHandler(Lines())
logging.getLogger("polyturn").setLevel("INFO")
{call}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if "tokenizer" not in line]  # logged only if it takes long
    begins = "tiny: checking the configuration, then loading PyTorch and the model"
    assert said == [begins, "importing torch", "load PyTorch: "]
