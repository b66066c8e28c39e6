"""From the `engine` section to a pool of servers: how many, where, in which order; nothing is started here."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyturn import build
from polyturn.build import parts
from polyturn.build.engine import build_engine
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.engines.dialect import ServerFacts
from polyturn.engines.following import FollowingPool
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.served import require_one_version
from polyturn.engines.vllm import VllmEngine
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training import lora
from support.models import tiny_model
from support.refusals import refuses
from support.runs import call_command, write_tiny_run
from support.vision import tiny_vision_model, vision_tokenizer

LAUNCH = ("engine.kind=vllm", "engine.num_slots=null", f"engine.launch.python={sys.executable}")


def build_pool(folder: Path, *overrides: str) -> EnginePool:
    loaded = load_config(RunConfig, write_tiny_run(folder), overrides)
    engine = build.build_parts(build.ConfigSource(config=loaded.config, base=folder)).engine
    assert isinstance(engine, EnginePool)
    return engine


def clients(pool: EnginePool) -> Iterator[RemoteEngine]:
    for replica in pool.replicas:
        assert isinstance(replica.engine, RemoteEngine)
        yield replica.engine


async def test_each_url_is_a_server_of_the_pool(tmp_path: Path) -> None:
    pool = build_pool(tmp_path, *LAUNCH[:2], "engine.urls=[http://a:1, http://b:2/]", f"engine.weights_folder={tmp_path}")
    assert [engine.url for engine in clients(pool)] == ["http://a:1", "http://b:2"]
    assert all(isinstance(engine, VllmEngine) for engine in clients(pool))
    await pool.close()


@pytest.mark.parametrize("lora", [(), ("engine.weights=adapter", "model.lora={rank: 2}")])
async def test_rollout_worker_asks_the_servers_of_the_controller(tmp_path: Path, lora: tuple[str, ...]) -> None:
    loaded = load_config(RunConfig, write_tiny_run(tmp_path), [*LAUNCH, "engine.max_in_flight=8", *lora])
    source = build.ConfigSource(config=loaded.config, base=tmp_path)
    pool = build.build_parts(source, has_weights=False, follows=2).engine
    assert isinstance(pool, FollowingPool)
    assert [engine.supervisor for engine in clients(pool)] == [None, None], "it starts none"
    assert [replica.slots for replica in pool.replicas] == [8, 8]
    await pool.close()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
async def test_only_nccl_to_vllm_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = (*LAUNCH[:2], "engine.urls=[http://192.0.2.7:1]")
    await build_pool(tmp_path / "gloo", *far).close()
    monkeypatch.setattr("polyturn.engines.served.choose_transport", lambda *at, **options: "nccl")
    with pytest.raises(
        ConfigError, match=r"resolves to nccl.*the package vllm.*engine\.weights to gloo.*engine\.weights_folder"
    ):
        build_pool(tmp_path / "nccl", *far)


async def test_ranks_of_a_cluster_send_over_nccl_if_they_have_gpus(tmp_path: Path) -> None:
    settings = ("engine.kind=sglang", "engine.num_slots=null", "engine.urls=[http://192.0.2.7:1]", "engine.weights=nccl")
    on_cluster = (*settings, "cluster.address=auto")
    with pytest.raises(ConfigError, match="nccl, which needs a GPU for the trainer"):
        build_pool(tmp_path / "cpu", *on_cluster)
    await build_pool(tmp_path / "gpu", *on_cluster, "cluster.rank_resources={GPU: 1}").close()


async def test_replicas_have_their_own_devices_and_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    pool = build_pool(
        tmp_path,
        *LAUNCH,
        "engine.launch.replicas=2",
        "engine.launch.devices=['0,1', '2,3']",
        f"engine.launch.log={log}",
        "engine.launch.max_restarts=5",
    )
    supervisors = [engine.supervisor for engine in clients(pool)]
    specs = [supervisor.spec for supervisor in supervisors if supervisor is not None]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2,3"]
    assert [spec.log for spec in specs] == [log, Path(f"{log}.1")]
    assert [supervisor.max_restarts for supervisor in supervisors if supervisor is not None] == [5, 5]
    await pool.close()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("train --dry-run rollout.sampling.temperature=0.001", "rollout.sampling.temperature"),
        ("train --dry-run evaluation.sets.greedy.sampling.temperature=0.001", "evaluation.sets.greedy.sampling.temperature"),
        ("eval evaluation.sets.greedy.sampling.temperature=0.001", "evaluation.sets.greedy.sampling.temperature"),
    ],
)
def test_temperature_that_vllm_would_raise_is_refused_at_the_start(tmp_path: Path, words: str, key: str) -> None:
    name, *options = words.split()
    called = call_command(main, name, write_tiny_run(tmp_path), *LAUNCH, *options)
    assert called.code == 2 and f"{key} is 0.001" in called.err and "0.01;" in called.err


SLEEP = (*LAUNCH, "engine.update=sleep")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("vllm", ["--enable-sleep-mode", "--gpu-memory-utilization", "0.4"]),
        ("sglang", ["--enable-memory-saver", "--mem-fraction-static=0.4"]),
    ],
)
async def test_server_on_a_shared_gpu_is_started_to_sleep(
    kind: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(parts, "on_gpu", lambda model: model)
    pool = build_pool(tmp_path, *SLEEP, f"engine.kind={kind}", f"engine.launch.args={flags[1:]}")
    (engine,) = clients(pool)
    assert engine.supervisor.spec.command[-len(flags) :] == tuple(flags)
    await pool.close()


def test_server_that_takes_a_whole_shared_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(parts, "on_gpu", lambda model: model)
    with pytest.raises(
        ConfigError, match=r"add --gpu-memory-utilization with the free share that `train --dry-run --gpus N`"
    ):
        build_pool(tmp_path, *SLEEP)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is not a mistake")
def test_server_that_sleeps_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.update is sleep, .* there is no CUDA .*; set engine.update to in_flight"):
        build_pool(tmp_path, *SLEEP)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([*LAUNCH[:2], "engine.urls=[http://a:1]"], "the run itself must start servers"),
        ([*LAUNCH, "engine.weights=adapter"], "drops a server's weights, .* set engine.weights to auto"),
        ([*LAUNCH, "engine.weights=nccl"], "does not support two processes on one GPU; use ipc"),
        ([], r"and only servers that the run starts \(engine.kind vllm, sglang\)"),
    ],
)
def test_engine_that_cannot_sleep_is_refused(settings: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        build_pool(tmp_path, *settings, "engine.update=sleep")


async def test_servers_of_several_versions_are_refused() -> None:
    model = ServedModel(vocab_size=8)
    engines = [VllmEngine(f"http://{name}:1", model) for name in "abc"]
    for engine, version in zip(engines, ("0.32.0", "0.32.0", "0.31.1"), strict=True):
        engine._facts = ServerFacts(seeded=True, max_context=None, version=version)
    require_one_version(EnginePool(engines[:2]))
    with pytest.raises(
        ConfigError, match=r"vllm 0\.31\.1 at http://c:1, vllm 0\.32\.0 at http://a:1; install one version on all"
    ):
        require_one_version(EnginePool(engines))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("engine.urls=[a:1]",), "write it with its scheme"),
        (("engine.urls=[http://a:1, http://a:1/]",), "names a server twice"),
        (("engine.urls=['http://a:80o0']",), "'http://a:80o0', which has no valid host or port"),
        (("engine.urls=['http://a..b:1']",), "'http://a..b:1', which has no valid host or port"),
        (("engine.urls=['http:///v1']",), "'http:///v1', which has no valid host or port"),
        (("engine.urls=[http://192.0.2.7:1]", "engine.weights=folder"), "192.0.2.7:1 is on another machine"),
        (("engine.weights=gloo", "engine.weights_folder=nowhere"), "a transfer of tensors uses no folder"),
        (("engine.weights_folder=nowhere",), "which is not a folder"),
        (("engine.weights=adapter",), "model.lora is not set, so there is no adapter to send"),
        (
            ("engine.weights=adapter", "model.lora={rank: 2}", "engine.urls=[http://192.0.2.7:1]"),
            "engine.weights is adapter, and http://192.0.2.7:1 is on another machine",
        ),
        (
            ("engine.kind=sglang", "engine.weights=adapter", "model.lora={rank: 2, target_modules: [q_proj, lm_head]}"),
            "engine.weights is adapter, and SGLang adapts .*, and model.lora also adapts lm_head",
        ),
        (("engine.launch.replicas=3", "engine.launch.devices=['0']"), "3 replicas and devices for 1"),
    ],
)
def test_engine_section_that_cannot_work_is_refused(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    launch = LAUNCH if not any("urls" in override for override in overrides) else LAUNCH[:2]
    with pytest.raises(ConfigError, match=says.replace("{", r"\{").replace("}", r"\}")):
        build_pool(tmp_path, *launch, *overrides)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_refused_servers_leave_no_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    refuses(lambda: build_pool(tmp_path, *LAUNCH[:2]), ConfigError, "vllm is not installed here")
    assert list(temporary.glob("polyturn-model-*")) == []


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("kind", "weights", "rank"), [("vllm", "adapter", "16"), ("sglang", "auto", "12")])
async def test_server_of_an_adapter_starts_without_it(
    tmp_path: Path, kind: str, weights: str, rank: str, trains: bool
) -> None:
    """A run that trains nothing sends nothing, and is served the whole model."""
    overrides = (*LAUNCH, f"engine.kind={kind}", f"engine.weights={weights}", "model.lora={rank: 12}")
    loaded = load_config(RunConfig, write_tiny_run(tmp_path), overrides)
    place = build.ConfigSource(config=loaded.config, base=tmp_path)
    made = build.build_parts(place if trains else build.untrained(place))
    assert isinstance(made.engine, EnginePool)
    (client,) = clients(made.engine)
    command, env = client.supervisor.spec.command, client.supervisor.spec.env
    served = load_file(
        Path(command[command.index("--model" if kind == "vllm" else "--model-path") + 1]) / "model.safetensors"
    )
    assert ("--enable-lora" in command) == trains
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in env) == (trains and kind == "vllm")
    assert not trains or command[command.index("--max-lora-rank") + 1] == rank
    if trains and kind == "sglang":
        at = command.index("--lora-target-modules")
        assert command[at + 1 : at + 8] == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert not any("lora" in name for name in served)
    await made.engine.close()


@pytest.mark.parametrize("flags", [(), ("--openai",)])
def test_served_sglang_model_has_its_adapter_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """No trainer sends these servers an adapter: one that sends weights to `polyturn serve` sends whole ones."""
    made, build_parts = [], build.build_parts

    def stop_after(source: build.ConfigSource) -> None:
        made.append(build_parts(source))
        raise ConfigError("made")

    monkeypatch.setattr(build, "build_parts", stop_after)
    settings = (*LAUNCH, "engine.kind=sglang", "model.lora={rank: 2}")
    called = call_command(main, "serve", *flags, "--config", write_tiny_run(tmp_path), *settings)
    assert "made" in called.err
    (client,) = clients(made[0].engine)
    assert client.supervisor is not None and "--enable-lora" not in client.supervisor.spec.command


@pytest.mark.parametrize("settings", ["engine.weights=folder", "model.lora.target_modules=[q_proj, lm_head]"])
async def test_sglang_gets_merged_weights_if_asked_or_needed(
    tmp_path: Path, settings: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = build_pool(tmp_path, *LAUNCH, "engine.kind=sglang", "model.lora={rank: 2}", settings)
    (client,) = clients(pool)
    assert client.supervisor is not None and "--enable-lora" not in client.supervisor.spec.command
    assert ("merged into the weights: SGLang adapts" in caplog.text) == ("lm_head" in settings)
    await pool.close()


@pytest.mark.parametrize(
    ("model", "targets", "merged_because"),
    [
        ("qwen3", "all-linear", None),
        ("qwen3_moe", "all-linear", None),
        ("deepseek_v3", "all-linear", "also adapts .*kv_a_proj_with_mqa"),
        ("experts", ["q_proj", "up_proj"], "in a model with experts"),
        ("vision", ["k_proj"], None),
        ("vision", ["q_proj"], "an encoder of images or sound"),
    ],
)
async def test_adapter_that_sglang_cannot_serve_is_refused_or_merged(
    tmp_path: Path, model: str, targets: str | list[str], merged_because: str | None
) -> None:
    if model == "vision":
        made: Any = tiny_vision_model(vision_tokenizer())
        made.base_model.visual.q_proj = torch.nn.Linear(4, 4)  # as some encoders name their layers
    else:
        made = tiny_model(64, kind="qwen3" if model == "experts" else model)
    if model == "experts":  # beside a dense feed-forward layer
        stacks = [torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False) for _ in range(2)]
        made.base_model.layers[0].mlp.experts = torch.nn.ParameterList(stacks)
    lora.add_lora(made, lora.LoraSettings(rank=2, target_modules=targets))
    for weights in ("auto", "adapter"):
        settings = (*LAUNCH, "engine.kind=sglang", f"engine.weights={weights}", "model.lora={rank: 2}")
        source = build.ConfigSource(config=load_config(RunConfig, write_tiny_run(tmp_path), settings).config, base=tmp_path)
        if weights == "auto":
            assert build.sends_adapter(source, made) == (merged_because is None)
        elif merged_because is not None:
            with pytest.raises(ConfigError, match=f"engine.weights is adapter, and SGLang adapts .*{merged_because}"):
                build_engine(source, made, tokenizer=tiny_tokenizer(), media=None, max_context=64, checkpoint=None)


@pytest.mark.parametrize("replica", ["", ".1"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_log_that_is_not_a_file_is_refused_early(
    tmp_path: Path, kind: str, replica: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader blocks the server once it is full."""
    log = Path(f"{tmp_path}/server.log{replica}")
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "device":
        log.symlink_to("/dev/full")
    else:
        log.mkdir()
    launched = (*LAUNCH, "engine.launch.replicas=2", f"engine.launch.log={tmp_path / 'server.log'}")
    monkeypatch.setattr(parts, "build_model", pytest.fail)
    with pytest.raises(ConfigError, match=r"server\.log.*not a regular file; name another engine\.launch\.log"):
        build_pool(tmp_path, *launched)
