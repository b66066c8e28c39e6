"""`train --dry-run --gpus N`: a layout that fits is shown, another is refused with the nearest one that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyturn.api.folders import open_source
from polyturn.build.memory_plan import (
    USABLE,
    Demand,
    GpuLayout,
    demand_of,
    layout_of,
    load_of,
    nearest,
    require_fit,
    with_split_context,
)
from polyturn.build.ranks import check_backend
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.training.memory import ModelSize, RankLoad
from polyturn.training.options import Degrees
from support.refusals import refuses
from support.runs import Called, call_command, write_tiny_run

GB = 10**9
SERVERS = ["cluster.engines={count: 2, resources: {GPU: 1}}", "train.distributed.ranks=2"]
EIGHT_BILLION = ModelSize(
    parameters=8 * GB,
    trained=8 * GB,
    layer=GB // 5,
    outside=GB,
    widest=GB // 2,
    element=2,
    hidden=4096,
    num_layers=36,
    vocab=150_000,
    kv_width=2048,
    cached=2048,
    kv_heads=8,
    kept=52 * 4096,
)


def plan(tmp_path: Path, *arguments: object) -> Called:
    return call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", *arguments)


def test_option_of_gpus_alone_is_refused(tmp_path: Path) -> None:
    assert "--gpu-memory has no effect without --gpus" in plan(tmp_path, "--gpu-memory", 1).err
    assert "--ids has no effect with --gpus" in plan(tmp_path, "--gpus", 1, "--ids").err
    assert "--gpus works only with --dry-run" in call_command(main, "train", write_tiny_run(tmp_path), "--gpus", 1).err
    assert "polyturn train CONFIG --dry-run --gpus N" in call_command(main, "plan", write_tiny_run(tmp_path)).err


def test_fitting_run_is_shown_by_process(tmp_path: Path) -> None:
    called = plan(tmp_path, *SERVERS, "model.dtype=bfloat16", "--gpus", 4, "--gpu-memory", 1)
    assert called.code == 0, called.err
    for words in ("2 ranks and 2 servers of 1 GPU", "float32 masters", "room for conversations", "over 50 GB/s"):
        assert words in called.out
    assert "fits on 4 of the 4 GPUs of 1 GB" in called.out


def test_offloaded_optimizer_leaves_the_gpus(tmp_path: Path) -> None:
    called = plan(tmp_path, "model.dtype=bfloat16", "train.optim.offload=true", "--gpus", 1, "--gpu-memory", 1)
    assert called.code == 0, called.err
    assert "offloaded optimizers of all ranks" in called.out
    assert "masters" not in called.out and "moments" not in called.out


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=float32"],
        ["model.dtype=bfloat16", "model.lora={rank: 4}"],
        ["model.dtype=bfloat16", "train.distributed.ranks=2", "train.distributed.tensor_parallel=2"],
        ["model.dtype=bfloat16", "train.backend=megatron"],
    ],
)
@pytest.mark.parametrize("key", ["train.optim.offload", "warm_start.optim.offload"])
def test_offload_that_makes_no_sense_is_refused(key: str, settings: list[str], tmp_path: Path) -> None:
    source, _ = open_source(write_tiny_run(tmp_path), [f"{key}=true", *settings])
    refuses(lambda: check_backend(source), ConfigError, key, settings[-1].partition("=")[0].rpartition(".")[2])


def test_too_many_gpus_are_refused_with_a_layout_that_fits(tmp_path: Path) -> None:
    called = plan(tmp_path, *SERVERS, "--gpus", 3, "--gpu-memory", 1)
    assert called.code != 0
    assert "takes 4 GPUs and there are 3" in called.err and "2 ranks and 1 server of 1 GPU would fit" in called.err


def test_gpus_too_small_for_any_layout_are_refused(tmp_path: Path) -> None:
    called = plan(tmp_path, *SERVERS, "--gpus", 8, "--gpu-memory", 0.1, "train.max_tokens_per_batch=10000000")
    assert called.code != 0 and "no layout on 8 GPUs fits" in called.err


def test_megatron_ranks_are_planned_by_their_split(tmp_path: Path) -> None:
    backend = ["train.backend=megatron", "train.distributed={ranks: 4, tensor_parallel: 2, expert_parallel: 2}"]
    config = write_tiny_run(tmp_path)
    of_backend, of_torch = (load_of(open_source(config, given)[0], tokens=10) for given in (backend, ["train.epochs=1"]))
    assert of_backend.megatron == Degrees(ranks=4, tensor_parallel=2, expert_parallel=2) and of_backend.ranks == 4
    assert of_torch.megatron is None and of_torch.expert_parallel == of_backend.expert_parallel == 1
    small = ["--gpus", 8, "--gpu-memory", 0.1, "train.max_tokens_per_batch=10000000"]
    called = call_command(main, "train", config, "--dry-run", *small, *backend)
    assert called.code != 0 and "raise tensor_parallel or pipeline_parallel" in called.err


@pytest.mark.parametrize("value", ["nan", "-1", "80GB"])
@pytest.mark.parametrize("option", ["--gpus", "--gpu-memory", "--link"])
def test_impossible_number_is_refused(tmp_path: Path, option: str, value: str) -> None:
    called = plan(tmp_path, option, value)
    assert called.code == 2 and f"Invalid value for '{option}'" in called.err


@pytest.mark.parametrize(
    ("gpus", "limit_gb", "found"),
    [(8, 60, GpuLayout(4, 4, 1)), (8, 40, GpuLayout(6, 2, 1)), (8, 12, None), (64, 12, GpuLayout(44, 6, 2)), (4, 40, None)],
)
def test_nearest_layout_adds_ranks_then_widens_servers(gpus: int, limit_gb: int, found: GpuLayout | None) -> None:
    demand = Demand(EIGHT_BILLION, RankLoad(tokens=1000, recomputes=True), context=8192)
    assert nearest(demand, GpuLayout(4, 6, 1), gpus=gpus, limit=limit_gb * GB) == found


def test_conversation_too_long_for_a_rank_is_split() -> None:
    demand = Demand(EIGHT_BILLION, RankLoad(tokens=131_072, recomputes=True), context=131_072)
    layout, limit = GpuLayout(6, 2, 1), 50 * GB
    assert nearest(demand, layout, gpus=16, limit=limit) is None
    assert with_split_context(demand, layout, gpus=16, limit=limit) == (4, GpuLayout(8, 2, 1))
    with pytest.raises(ConfigError, match=r"8 ranks and 2 servers .* fit with train.distributed.context_parallel: 4"):
        require_fit(demand, layout, gpus=16, limit=limit)
    assert with_split_context(demand, layout, gpus=16, limit=12 * GB) is None


def test_131k_tokens_of_8b_fit_on_eight_gpus() -> None:
    demand = Demand(EIGHT_BILLION, RankLoad(tokens=131_072, recomputes=True), context=131_072)
    layout, limit = GpuLayout(4, 4, 1), int(80 * GB * USABLE)
    assert not demand.fits(layout, limit=limit) and nearest(demand, layout, gpus=8, limit=limit) is None
    assert with_split_context(demand, layout, gpus=8, limit=limit) == (2, GpuLayout(6, 2, 1))
    split = demand._replace(load=replace(demand.load, context_parallel=4), row=4)
    require_fit(split, layout, gpus=8, limit=limit)


def test_ranks_with_the_same_samples_are_added_together(tmp_path: Path) -> None:
    wide = ["train.backend=megatron", "train.distributed={ranks: 8, tensor_parallel: 2, context_parallel: 4}"]
    row = demand_of(open_source(write_tiny_run(tmp_path), wide)[0]).row
    demand = Demand(EIGHT_BILLION, RankLoad(tokens=1000, recomputes=True), context=8192, row=row)
    assert row == 8 and nearest(demand, GpuLayout(4, 6, 1), gpus=64, limit=12 * GB) == GpuLayout(44, 6, 2)
    assert nearest(demand, GpuLayout(8, 6, 1), gpus=64, limit=12 * GB) == GpuLayout(48, 6, 2)


SHARED = ["engine={kind: vllm, update: sleep, num_slots: null}", "model.dtype=bfloat16"]


def test_shared_gpus_are_counted_by_phase(tmp_path: Path) -> None:
    called = plan(tmp_path, *SHARED, *SERVERS, "--gpus", 2, "--gpu-memory", 1)
    assert called.code == 0, called.err
    assert "2 ranks and 2 servers of 1 GPU, on the same GPUs" in called.out and "fits on 2 of the 2 GPUs" in called.out
    for words in ("each GPU in rollout", "each GPU as weights arrive", "each GPU in an update", "left to a server"):
        assert words in called.out


@pytest.mark.parametrize(
    ("limit_gb", "found"),
    [
        (90, GpuLayout(2, 2, 1, is_shared=True)),
        (60, GpuLayout(4, 4, 1, is_shared=True)),
        (30, GpuLayout(8, 4, 2, is_shared=True)),
        (15, None),
    ],
)
def test_nearest_shared_layout_adds_a_server_with_each_rank(limit_gb: int, found: GpuLayout | None) -> None:
    demand = Demand(EIGHT_BILLION, RankLoad(tokens=1000, recomputes=True), context=8192)
    assert nearest(demand, GpuLayout(2, 2, 1, is_shared=True), gpus=8, limit=limit_gb * GB) == found


def test_shared_gpus_too_small_are_refused_with_their_phase(tmp_path: Path) -> None:
    called = plan(tmp_path, *SHARED, *SERVERS, "--gpus", 2, "--gpu-memory", 0.1, "train.max_tokens_per_batch=10000000")
    assert called.code != 0 and "each GPU in an update holds" in called.err and "each GPU in rollout" not in called.err


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["train.distributed.ranks=4"], GpuLayout(4, 0, 0)),
        (["engine={kind: vllm, launch: {replicas: 2, devices: ['4,5', '6,7']}}"], GpuLayout(1, 2, 2)),
        (["engine={kind: vllm, update: sleep, launch: {}}"], GpuLayout(1, 1, 1, is_shared=True)),
        (["engine={kind: vllm, urls: ['http://a:1']}"], GpuLayout(1, 0, 0)),
        (["engine={kind: sglang}", "cluster.engines={count: 3, resources: {GPU: 4}}"], GpuLayout(1, 3, 4)),
    ],
)
def test_layout_is_that_of_the_config(settings: list[str], found: GpuLayout) -> None:
    assert layout_of(load_config(RunConfig, None, ["model.path=none", *settings]).config) == found
