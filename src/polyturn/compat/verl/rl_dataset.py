"""verl.utils.dataset: `RLHFDataset`, the base class of `data.custom_cls`, and the tasks of its rows.

    class Mine(RLHFDataset):
        def __getitem__(self, item):
            row = super().__getitem__(item)         {"raw_prompt": [{"role": "user", …}], "index": 7, "tools_kwargs": {}, …}
            return {**row, "agent_name": "tool_agent"}

    custom_tasks(cls="mine.py:Mine", files=["train.parquet"], split="train", config={…})[7]   ->   Task(…)

Unlike `polyturn.data.dataset`, it needs the package `datasets`. A row's prompt is tokenized only if `return_raw_chat` is
false, because a run renders messages itself.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import Dataset

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.tokenizer import hf_processor, hf_tokenizer
from polyturn.compat.verl.torch_functional import compute_position_id_with_mask, postprocess_data
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, one_line, raised_at
from polyturn.core.task import Task
from polyturn.data.rows import task_from_row
from polyturn.data.sequences import TaskSequence
from polyturn.infra.plugin_shape import has_parameter
from polyturn.infra.plugins import import_attr
from polyturn.tools.registry import initialize_tools_from_config

logger = logging.getLogger(__name__)

_KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_POINTER = re.compile("(<image>|<video>|<audio>)")
_OF_A_BATCH = ("raw_prompt", "raw_prompt_ids", "full_prompts", "multi_modal_data", "multi_modal_inputs")
"""Keys of a row that are not copied to its task."""


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as columns: stacked tensors [B, …], and arrays [B] of objects for everything else."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in data_list:
        for key, value in row.items():
            columns[key].append(value)
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else np.fromiter(values, object, len(values))
        for key, values in columns.items()
    }


class RLHFDataset(Dataset[dict[str, Any]]):
    """The rows of parquet or JSON files as dicts, with further fields for a rollout."""

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Read the files; `config` is the section `data` of a run."""
        files: list[Any] = list(data_files) if isinstance(data_files, list | tuple | ListConfig) else [data_files]
        self.data_files, self.original_data_files = list(files), list(files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.cache_dir = str(Path(os.path.expanduser(config.get("cache_dir", "~/.cache/verl/rlhf"))))
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key, self.video_key = config.get("image_key", "images"), config.get("video_key", "videos")
        self.image_patch_size = config.get("image_patch_size", 14)
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.return_multi_modal_inputs = config.get("return_multi_modal_inputs", True)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.filter_prompts = config.get("filter_prompts", True)
        self.num_workers = config.get("filter_overlong_prompts_workers", 1)
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs") or {})
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.use_shm, self.serialize_dataset = config.get("use_shm", False), False
        self.shuffle, self.seed = config.get("shuffle", False), config.get("seed")
        self.tool_config_path = config.get("tool_config_path")
        self.tool_schemas: list[dict[str, Any]] | None = None
        if self.tool_config_path:
            tools = initialize_tools_from_config(self.tool_config_path)
            self.tool_schemas = [t.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for t in tools]
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Set the local paths of the files; `~` is expanded, and nothing is downloaded."""
        files = self.original_data_files if use_origin_parquet else self.data_files
        self.data_files = [str(Path(os.path.expanduser(file))) if str(file).startswith("~") else file for file in files]

    def _read_files_and_tokenize(self) -> None:
        """Read the files into `self.dataframe`, a dataset of the package `datasets`; override it for other formats."""
        try:
            import datasets
        except ImportError as problem:
            raise ConfigError(
                f"{type(self).__name__} reads its files with the package datasets, which is not installed: "
                "pip install 'polyturn[verl]'"
            ) from problem
        parts = []
        for file in self.data_files:
            kind = _KINDS.get(Path(file).suffix)
            if kind is None:
                raise DataError(f"{file} ends in none of {', '.join(_KINDS)}; write its rows to such a file")
            parts.append(datasets.load_dataset(kind, data_files=file)["train"])
        self.dataframe = datasets.concatenate_datasets(parts)
        if 0 < self.max_samples < len(self.dataframe):
            rows = np.arange(len(self.dataframe))
            if self.shuffle:
                rows = np.random.default_rng(self.seed).permutation(rows)
            self.dataframe = self.dataframe.select(rows[: self.max_samples].tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows whose prompt fits, including the tools of `tool_config_path`, if the config enables the filter."""
        if not self.filter_overlong_prompts:
            return dataframe

        def fits(row: dict[str, Any]) -> bool:
            return len(self._render(self._messages(dict(row)), tokenize=True)) <= self.max_prompt_length

        kept = dataframe.filter(fits)
        if dropped := len(dataframe) - len(kept):
            logger.warning(
                "%d of %d rows are dropped: their prompts are longer than max_prompt_length %d (filter_overlong_prompts)",
                dropped, len(dataframe), self.max_prompt_length,
            )  # fmt: skip
        return kept

    def resume_dataset_state(self) -> None:
        """Read the files again."""
        self._download(use_origin_parquet=True)
        self._read_files_and_tokenize()

    def split(self, num_splits: int) -> list[RLHFDataset]:
        """Return `num_splits` datasets with equally many adjacent rows; the rows that remain are dropped with a warning.

        Raises:
            DataError: `num_splits` is not a number from 1 to the number of rows.
        """
        num_rows = len(self.dataframe)
        if not isinstance(num_splits, int) or not 1 <= num_splits <= num_rows:
            raise DataError(f"num_splits is {num_splits!r}; it must be a number from 1 to {num_rows}, the number of rows")
        size, dropped = divmod(num_rows, num_splits)
        if dropped:
            logger.warning("%d of %d rows are dropped, because %d splits are equally long", dropped, num_rows, num_splits)
        splits = [copy.copy(self) for _ in range(num_splits)]
        for i, one in enumerate(splits):
            one.dataframe = self.dataframe.select(range(i * size, (i + 1) * size))
        return splits

    def __len__(self) -> int:
        return len(self.dataframe)

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Remove the messages from a row and return them."""
        key = {"key": self.prompt_key} if has_parameter(self._build_messages, "key") else {}  # since verl 0.9
        messages = self._build_messages(row, **key)
        row.pop(self.prompt_key, None)
        return messages

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[dict[str, Any]]:
        """Return the messages in the column `key` of a row; without `key`, remove them from the prompt's column.

        `<image>`, `<video>` and `<audio>` become parts if the row has such columns.
        """
        messages = [dict(message) for message in (example.pop(self.prompt_key) if key is None else example[key])]
        if self.image_key in example or self.video_key in example:
            for message in messages:
                if isinstance(message["content"], str):
                    pieces = [piece for piece in _POINTER.split(message["content"]) if piece]
                    message["content"] = [
                        {"type": p[1:-1]} if _POINTER.fullmatch(p) else {"type": "text", "text": p} for p in pieces
                    ]
        return messages

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        messages = self._messages(row)
        if not self.return_raw_chat and self.processor is None:
            row |= self._tokenized(messages)
        row["raw_prompt"] = messages
        row["dummy_tensor"] = torch.tensor([0], dtype=torch.uint8)
        extra = row["extra_info"] = row.get("extra_info") or {}
        row["index"] = extra.get("index", 0)
        row["tools_kwargs"] = extra.get("tools_kwargs", {})
        row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        return row

    def _tokenized(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        text = self._render(messages, tokenize=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        padded, mask = postprocess_data(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_length=self.max_prompt_length,
            pad_token_id=self.tokenizer.pad_token_id,
            left_pad=True,
            truncation=self.truncation,
        )
        row = {
            "input_ids": padded[0],
            "attention_mask": mask[0],
            "position_ids": compute_position_id_with_mask(mask)[0],
            "raw_prompt_ids": padded[0][mask[0].bool()].tolist(),
        }
        return {**row, "full_prompts": text} if self.return_full_prompt else row

    def _render(self, messages: list[dict[str, Any]], *, tokenize: bool) -> Any:
        options = {"tools": self.tool_schemas, **self.apply_chat_template_kwargs}
        options |= {"return_dict": False} if tokenize else {}
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=tokenize, **options)


def get_dataset_class(data_config: Any) -> type[Dataset[Any]]:
    """Return the class of `custom_cls` in the section `data`; the default is `RLHFDataset`.

    Raises:
        TypeError: the class is not a dataset.
    """
    custom = data_config.get("custom_cls") or {}
    if custom.get("path") is None:
        return RLHFDataset
    return _dataset_class(f"{str(custom['path']).removeprefix('pkg://')}:{custom['name']}")


def _dataset_class(name: str) -> type[Dataset[Any]]:
    dataset_class = import_attr(name)
    if not isinstance(dataset_class, type) or not issubclass(dataset_class, Dataset):
        raise TypeError(f"The custom dataset class {name!r} must inherit from torch.utils.data.Dataset")
    return dataset_class


def custom_tasks(
    *,
    cls: str,
    files: Sequence[str],
    split: str,
    config: Mapping[str, Any],
    model: str | None = None,
    template: str | None = None,
    max_samples: int = -1,
) -> Sequence[Task]:
    """Return the tasks of a user's own dataset class.

    Args:
        cls: `file.py:Class` or `package.module:Class`, called with verl's arguments.
        files: The class's argument `data_files`.
        split: Prefix of the ids of tasks without an id.
        config: The section `data`.
        model: The model of the tokenizer, and of the processor if it has one.
        template: A chat template that replaces the tokenizer's.
        max_samples: Number of rows that the class keeps; -1 keeps all.

    Raises:
        ConfigError: the name is not a dataset class, or it cannot be created.
    """
    tokenizer: Any = None
    processor: Any = None
    try:
        user_dataset: Any = _dataset_class(cls)
        if model is not None:
            tokenizer, processor = hf_tokenizer(model), hf_processor(model)
        if tokenizer is not None and template is not None:
            tokenizer.chat_template = template
        section: DictConfig = OmegaConf.create(dict(config))
        most = {"max_samples": max_samples} if has_parameter(user_dataset.__init__, "max_samples") else {}
        dataset = user_dataset(data_files=list(files), tokenizer=tokenizer, config=section, processor=processor, **most)
    except (ConfigError, DataError):
        raise
    except Exception as problem:
        raise ConfigError(f"data.custom_cls {cls} raised {one_line(problem)}{raised_at(problem)}") from problem
    return _Rows(dataset, split=split, source=f"{cls} over {', '.join(map(str, files))}")


class _Rows(TaskSequence):
    """The rows of a dataset as tasks."""

    def __init__(self, dataset: Any, *, split: str, source: str) -> None:
        self._dataset = dataset
        self._split = split
        self._source = source

    def __len__(self) -> int:
        return len(self._dataset)

    def _task(self, index: int) -> Task:
        where = f"{self._source}, row {index}"
        try:
            row = self._dataset[index]
        except Exception as problem:
            raise DataError(f"{where}: __getitem__ raised {one_line(problem)}{raised_at(problem)}") from problem
        if not isinstance(row, Mapping):
            at = defined_at(type(self._dataset).__getitem__)
            raise DataError(f"{where}: __getitem__ returned {row!r:.100}; return a dict{at}")
        prompt = row.get("raw_prompt", row.get("prompt"))
        if prompt is None:
            at = defined_at(type(self._dataset).__getitem__)
            raise DataError(f"{where}: it has no raw_prompt (the messages), only {sorted(map(str, row))}{at}")
        kept = {k: v for k, v in row.items() if k not in _OF_A_BATCH and not isinstance(v, torch.Tensor)}
        for kind, items in (row.get("multi_modal_data") or {}).items():
            kept.setdefault(f"{kind}s", items)
        values = {key: kept.pop(key, None) for key in ("tools_kwargs", "interaction_kwargs")}
        extra = {**(kept.get("extra_info") or {}), **{key: value for key, value in values.items() if value}}
        columns = {**kept, "prompt": prompt, "extra_info": extra}
        return task_from_row(columns, index=index, split=self._split, source=self._source)
