"""Names of verl that its replaced modules do not offer: importing one raises an ImportError with the reason.

    from verl.protocol import DataProtoFuture   ->   ImportError: cannot import 'DataProtoFuture': …

A module uses this by importing `__getattr__` from here. Whole modules that are not offered are listed in `namespaces.py`.
"""

from __future__ import annotations

from typing import Any

TRAINER = (
    "polyturn does not replace verl's trainer and workers, so a program built from them does not run; it replaces "
    "verl.trainer.main_ppo, with your own rewards, tools, interactions, agent loops, estimators and losses"
)
MEDIA = "polyturn's data loading and chat template read media; see `polyturn train --dry-run`"
REQUEST = "polyturn keeps a conversation as an episode with its sampled ids; tools and interactions get the messages"
METHODS = dict.fromkeys(
    (
        "chunk", "split", "reorder", "rename", "make_iterator", "sample_level_repeat", "unfold_column_chunks", "padding",
        "is_padding_enabled", "save_to_disk", "load_from_disk", "to_tensordict", "print_size", "get_data_info",
    ),
    "it sends a batch to workers or to a file, which polyturn does not do; index the batch, or read its columns",
)  # fmt: skip
"""Methods of `DataProto`."""
NAMES = {
    **dict.fromkeys(
        (
            "DataProtoConfig", "DataProtoFuture", "all_gather_data_proto", "deserialize_single_tensor",
            "deserialize_tensordict", "fold_batch_dim", "list_of_dict_to_dict_of_list", "serialize_single_tensor",
            "serialize_tensordict", "unfold_batch_dim", "union_numpy_dict", "union_tensor_dict", "union_two_dict",
            "AgentLoopManager", "AgentLoopWorker", "AgentLoopWorkerBase", "AsyncLLMServerManagerBase",
            "GlobalRequestLoadBalancer", "RolloutReplica", "RewardLoopManager", "RewardLoopWorker",
            "migrate_legacy_reward_impl", "get_rollout_replica_class", "RolloutCorrectionConfig", "RolloutConfig",
            "HFModelConfig", "OptimizerConfig", "CriticConfig", "FSDPEngineConfig", "FSDPCriticConfig",
            "McoreEngineConfig", "McoreCriticConfig", "CheckpointConfig", "CheckpointEngineConfig",
            "DistillationConfig", "TrainingWorkerConfig", "FSDPActorConfig", "McoreActorConfig", "FSDPOptimizerConfig",
            "validate_config", "update_dict_with_config", "import_external_libs", "is_nvtx_available",
            "load_extern_type", "load_reward_manager", "compute_reward", "compute_reward_async", "run_ppo",
            "TaskRunner", "create_rl_dataset", "auto_await", "parallel_put", "marked_timer", "DistProfiler",
            "DistProfilerExtension", "ProfilerConfig", "GPUMemoryLogger", "log_gpu_memory_usage",
            "build_vllm_profiler_args", "get_generation_config", "print_model_size", "update_model_config",
            "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup", "allgather_dict_tensors",
            "broadcast_dict_tensor", "AdaptiveKLController", "FixedKLController", "get_kl_controller",
            "compute_pf_ppo_reweight_data", "compute_policy_loss_bypass_mode", "_InternalAgentLoopOutput",
            "get_rollout_class", "RolloutMode", "RolloutReplicaRegistry", "compute_policy_loss", "convert_weight_keys",
            "load_valuehead_model", "normalize_model_name", "BaseRollout", "HFRollout", "as_torch_index",
            "group_mean_std", "optimizer",
        ),
        TRAINER,
    ),
    **dict.fromkeys(("process_image", "process_video", "extract_multi_modal_inputs"), MEDIA),
    "AsyncRolloutRequest": REQUEST,
}  # fmt: skip
"""Name of verl -> reason."""
SWIFT_NAMES = dict.fromkeys(
    (
        "get_model_processor", "get_template", "get_model_tokenizer", "infer_main", "InferArguments", "RLHFArguments",
        "rlhf_main", "sft_main", "SftArguments", "TrainArguments", "get_dist_setting", "is_dist", "parse_args",
        "EncodePreprocessor",
    ),
    "polyturn does not replace ms-swift's functions for training and inference; use `polyturn train`, `rollout` and "
    "`eval`, or `swift rlhf` through `polyturn run-as swift`",
)  # fmt: skip
"""Name of ms-swift -> reason."""


def refuse(name: str) -> Any:
    """Raise an error for a name that a module does not have."""
    if name in NAMES:
        raise ImportError(
            f"cannot import {name!r}: polyturn, which stands in for verl, does not offer it; {NAMES[name]}", name=name
        )
    raise AttributeError(f"there is no {name!r} here")


__getattr__ = refuse
"""The hook that Python calls for missing names of a module."""
