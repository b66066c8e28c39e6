"""Maps modules of other libraries to modules of polyturn. To add a library, add a `Namespace` to `NAMESPACES`.

The modules are imported only when user code imports their aliases.
"""

from __future__ import annotations

from pathlib import Path

from polyturn.compat.finder import Namespace
from polyturn.compat.not_offered import NAMES, SWIFT_NAMES, TRAINER

_NATIVE = {
    "verl.interactions.base": "polyturn.interactions.base",
    "verl.interactions.gsm8k_interaction": "polyturn.interactions.gsm8k",
    "verl.interactions.weather_interaction": "polyturn.interactions.weather",
    "verl.interactions.utils.interaction_registry": "polyturn.interactions.registry",
    "verl.tools.gsm8k_tool": "polyturn.tools.gsm8k",
    "verl.tools.geo3k_tool": "polyturn.tools.geo3k",
    "verl.tools.search_tool": "polyturn.tools.search",
    "verl.tools.mcp_base_tool": "polyturn.tools.mcp",
    "verl.tools.mcp_search_tool": "polyturn.tools.mcp",
    "verl.tools.image_zoom_in_tool": "polyturn.tools.zoom",
    "verl.utils.reward_score.gsm8k": "polyturn.rewards.gsm8k",
    "verl.utils.reward_score.geo3k": "polyturn.rewards.geo3k",
}
"""Modules of verl -> native modules of polyturn."""

_HERE = {
    "verl.utils.reward_score.math_verify": "polyturn.compat.verl.math_verify",
    "verl.utils.reward_score.prime_code.testing_util": "polyturn.compat.verl.prime_code",
    "verl.utils.reward_score.prime_math": "polyturn.compat.verl.prime_math",
    "verl.utils.reward_score.sandbox_fusion.utils": "polyturn.compat.verl.sandbox_fusion_utils",
    "verl.trainer.main_ppo": "polyturn.compat.verl.main_ppo",
    "verl.utils.reward_score.math_dapo": "polyturn.compat.verl.math_dapo",
    "verl.tools.base_tool": "polyturn.compat.verl.base_tool",
    "verl.tools.function_tool": "polyturn.compat.verl.function_tool",
    "verl.tools.sandbox_fusion_tools": "polyturn.compat.verl.sandbox_fusion_tools",
    "verl.tools.utils.search_r1_like_utils": "polyturn.compat.verl.search_r1_like_utils",
    "verl.tools.utils.mcp_clients.McpClientManager": "polyturn.compat.verl.mcp_clients",
    "verl.tools.utils.mcp_clients.utils": "polyturn.compat.verl.mcp_clients",
    "verl.experimental.reward_loop.reward_manager.limited": "polyturn.compat.verl.limited",
    "verl.experimental.reward_loop.reward_manager.base": "polyturn.compat.verl.reward_loop",
    "verl.experimental.reward_loop.reward_manager.naive": "polyturn.compat.verl.reward_loop",
    "verl.experimental.reward_loop.reward_manager.registry": "polyturn.compat.verl.reward_loop",
    "verl.experimental.reward.reward_loop.base": "polyturn.compat.verl.reward_loop",
    "verl.experimental.reward.reward_loop.naive": "polyturn.compat.verl.reward_loop",
    "verl.experimental.reward.reward_loop.registry": "polyturn.compat.verl.reward_loop",
    "verl.workers.rollout.replica": "polyturn.compat.verl.agent_loop",
    "verl.workers.rollout.schemas": "polyturn.compat.verl.rollout_schemas",
    "verl.utils.rollout_trace": "polyturn.compat.verl.rollout_trace",
    "verl.utils.torch_functional": "polyturn.compat.verl.torch_functional",
    "verl.trainer.ppo.core_algos": "polyturn.compat.verl.core_algos",
    "verl.trainer.config.algorithm": "polyturn.compat.verl.configs",
    "verl.workers.config.actor": "polyturn.compat.verl.configs",
    "verl.base_config": "polyturn.compat.verl.configs",
    "verl.utils.config": "polyturn.compat.verl.configs",
    "verl.utils.fs": "polyturn.compat.verl.hdfs_io",
    "verl.experimental.agent_loop.agent_loop": "polyturn.compat.verl.agent_loop",
    "verl.experimental.agent_loop.tool_parser": "polyturn.compat.verl.tool_parser",
    "verl.experimental.agent_loop.single_turn_agent_loop": "polyturn.compat.verl.single_turn_agent_loop",
    "verl.experimental.agent_loop.tool_agent_loop": "polyturn.compat.verl.tool_agent_loop",
    "verl.experimental.agent_loop.utils": "polyturn.compat.verl.agent_loop_utils",
    "verl.protocol": "polyturn.compat.verl.dataproto",
    "verl.utils.dataset.rl_dataset": "polyturn.compat.verl.rl_dataset",
    "verl.experimental.dataset.sampler": "polyturn.compat.verl.sampler",
    "verl.utils.model": "polyturn.compat.verl.torch_functional",
    "verl.utils.ray_utils": "polyturn.compat.verl.agent_loop_utils",
    "verl.utils.import_utils": "polyturn.compat.verl.import_utils",
    "verl.utils.chat_template": "polyturn.compat.verl.chat_template",
    "verl.utils.tokenizer.chat_template": "polyturn.compat.verl.chat_template",
    "verl.utils.tokenizer.tokenizer": "polyturn.compat.verl.tokenizer",
    "verl.utils.hdfs_io": "polyturn.compat.verl.hdfs_io",
    "verl.workers.reward_manager.naive": "polyturn.compat.verl.reward_manager",
    "verl.workers.reward_manager.batch": "polyturn.compat.verl.reward_manager",
    "verl.workers.reward_manager.dapo": "polyturn.compat.verl.reward_manager",
    "verl.workers.reward_manager.prime": "polyturn.compat.verl.reward_manager",
    "verl.workers.reward_manager.registry": "polyturn.compat.verl.reward_manager",
    "verl.workers.reward_manager.abstract": "polyturn.compat.verl.reward_manager",
    "verl.trainer.ppo.reward": "polyturn.compat.verl.reward_manager",
}
"""Modules of verl -> modules of this package, which only code written for verl needs."""

_BESIDE = {
    "verl.tools.schemas": ("polyturn.tools.schema", "polyturn.compat.verl.tool_schemas"),
    **dict.fromkeys(
        ("verl.tools.tool_registry", "verl.tools.utils.tool_registry"),
        ("polyturn.tools.registry", "polyturn.compat.verl.tool_registry"),
    ),
    **dict.fromkeys(
        ("verl.utils.reward_score.math", "verl.utils.reward_score.math_reward"),
        ("polyturn.rewards.math", "polyturn.compat.verl.math_reward"),
    ),
    "verl.utils.reward_score.search_r1_like_qa_em": (
        "polyturn.rewards.search_r1",
        "polyturn.compat.verl.search_r1_like_qa_em",
    ),
}
"""Modules of verl -> the native module, and the module of this package with the names that only verl's code needs."""

_SFT = "Supervised training is `polyturn sft CONFIG`."
_GENERATION = (
    "`polyturn rollout CONFIG` writes completions, `polyturn eval` scores them, `polyturn rescore` with another reward."
)
_TRAINER = f"The reason: {TRAINER}."
_INSTEAD = {
    **dict.fromkeys((f"verl.trainer.{name}" for name in ("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer")), _SFT),
    **dict.fromkeys((f"verl.trainer.main_{name}" for name in ("generation", "generation_server", "eval")), _GENERATION),
    **dict.fromkeys((f"verl.{name}" for name in ("single_controller", "models", "checkpoint_engine")), _TRAINER),
    **dict.fromkeys((f"verl.trainer.{name}" for name in ("ppo.ray_trainer", "ppo.v1", "constants_ppo")), _TRAINER),
    **dict.fromkeys((f"verl.workers.{name}" for name in ("fsdp_workers", "megatron_workers", "actor", "critic")), _TRAINER),
    **dict.fromkeys((f"verl.trainer.ppo.{name}" for name in ("metric_utils", "rollout_corr_helper")), _TRAINER),
    **dict.fromkeys((f"verl.utils.{name}" for name in ("metric", "py_functional", "tensordict_utils")), _TRAINER),
    "verl.model_merger": "The folder `model` of a checkpoint is a Hugging Face folder, and needs no merging.",
}

VERL = Namespace(
    root="verl",
    modules={**_NATIVE, **_HERE},
    packages={
        **_BESIDE,
        "verl": ("polyturn.compat.verl.dataproto",),
        "verl.utils": ("polyturn.compat.verl.tokenizer",),
        "verl.utils.profiler": ("polyturn.compat.verl.profiler",),
        "verl.utils.tokenizer": ("polyturn.compat.verl.tokenizer",),
        "verl.utils.dataset": ("polyturn.compat.verl.rl_dataset",),
        "verl.workers.reward_manager": ("polyturn.compat.verl.reward_manager", "polyturn.compat.verl.limited"),
        "verl.experimental.reward_loop": ("polyturn.compat.verl.reward_loop",),
        "verl.experimental.reward_loop.reward_manager": ("polyturn.compat.verl.reward_loop", "polyturn.compat.verl.limited"),
        "verl.experimental.reward.reward_loop": ("polyturn.compat.verl.reward_loop",),
        "verl.trainer.config": ("polyturn.compat.verl.configs",),
        "verl.workers.config": ("polyturn.compat.verl.configs",),
        "verl.utils.reward_score.sandbox_fusion": ("polyturn.compat.verl.code_scorers",),
        "verl.utils.reward_score.prime_code": ("polyturn.compat.verl.prime_code",),
        "verl.utils.reward_score": ("polyturn.compat.verl.reward_score",),
        "verl.experimental.agent_loop": tuple(
            f"polyturn.compat.verl.{name}" for name in ("agent_loop", "single_turn_agent_loop", "tool_agent_loop")
        ),
    },
    library=Path(__file__).parent / "verl" / "modules.txt",
    instead=_INSTEAD,
    names=NAMES,
)

_SWIFT = "polyturn.compat.swift"
_MULTI_TURN = (
    *(f"{_SWIFT}.{name}" for name in ("base", "turns", "schedulers", "gym_env", "openenv_wrapper")),
    "polyturn.serving.rollout_protocol",
)
_REWARDS = (f"{_SWIFT}.orm", f"{_SWIFT}.rm_plugin", f"{_SWIFT}.base", f"{_SWIFT}.schedulers")
_ENGINE = (f"{_SWIFT}.infer_engine", f"{_SWIFT}.template", f"{_SWIFT}.utils", "polyturn.serving.rollout_protocol")

SWIFT = Namespace(
    root="swift",
    modules={
        "swift.infer_engine.protocol": "polyturn.serving.rollout_protocol",
        "swift.llm.infer.protocol": "polyturn.serving.rollout_protocol",
        "swift.plugin.loss_scale.loss_scale": f"{_SWIFT}.loss_scale",
        "swift.llm.template.template.utils": f"{_SWIFT}.template",
        "swift.llm.template.utils": f"{_SWIFT}.template",
        "swift.template.utils": f"{_SWIFT}.template",
        "swift.rollout.gym_env": f"{_SWIFT}.gym_env",
        "swift.rollout.openenv_wrapper": f"{_SWIFT}.openenv_wrapper",
        "swift.plugin.env": f"{_SWIFT}.gym_env",
        "swift.plugin.context_manager": f"{_SWIFT}.gym_env",
        "swift.plugin.orm": f"{_SWIFT}.orm",
        "swift.plugin.prm": f"{_SWIFT}.orm",
        "swift.plugin.rm_plugin": f"{_SWIFT}.rm_plugin",
        "swift.rewards.orm": f"{_SWIFT}.orm",
        "swift.rewards.prm": f"{_SWIFT}.orm",
        "swift.rewards.rm_plugin": f"{_SWIFT}.rm_plugin",
    },
    packages={
        "swift": _ENGINE,
        "swift.infer_engine": _ENGINE,
        "swift.llm": _ENGINE,
        "swift.llm.infer": _ENGINE,
        "swift.llm.template": (f"{_SWIFT}.template", "polyturn.serving.rollout_protocol"),
        "swift.loss_scale": (f"{_SWIFT}.loss_scale",),
        "swift.plugin": (*_MULTI_TURN, f"{_SWIFT}.loss_scale", *_REWARDS),
        "swift.plugin.loss_scale": (f"{_SWIFT}.loss_scale",),
        "swift.plugin.multi_turn": _MULTI_TURN,
        "swift.rewards": _REWARDS,
        "swift.rollout": _MULTI_TURN,
        "swift.rollout.multi_turn": _MULTI_TURN,
        "swift.template": (f"{_SWIFT}.template",),
        "swift.utils": (f"{_SWIFT}.utils",),
    },
    names=SWIFT_NAMES,
)

NAMESPACES = {VERL.root: VERL, SWIFT.root: SWIFT}
"""Root name -> its namespace."""
