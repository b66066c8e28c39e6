"""Prepare problem sets with tools: Geometry3K with its figures, and questions to be answered by searching.

    prepare_geo3k(None, out=Path("data"))    problem, figure, answer  ->  a prompt with the figure, and the zoom tool on it
    prepare_search(None, out=Path("data"))   question, answers        ->  a prompt, the search tool, {"target": [...]}

As `data/prepare.py`: run once, by hand (`polyturn data geo3k`, `polyturn data search`); the columns are the documented ones.
A figure is written as a data URI into the row, so that the files can be moved and the zoom tool sees what the model sees.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.errors import DataError, one_line
from polyturn.tokens.hub import unreachable

GEO3K = "hiyouga/geometry3k"
"""The data source of the rows, and the dataset's name on the hub."""
SEARCH = "PeterJinGo/nq_hotpotqa_train"
"""The dataset of questions on the hub."""

_GEO3K_SYSTEM = (
    "You solve geometry problems about a figure. You may look at a region of the figure more closely by calling the tool "
    "`image_zoom_in_tool`. Reason first, inside <think> and </think>, and end with the final answer in \\boxed{}."
)
_SEARCH_SYSTEM = (
    "You answer questions. Reason about what you know and what you lack; whatever you lack you can look up by calling the "
    "tool `search`, as often as you need. End with the answer alone, without an explanation, inside <answer> and </answer>."
)


def prepare_geo3k(folder: Path | None, *, out: Path) -> list[Path]:
    """Write Geometry3K as `train.parquet` and `test.parquet`, each row with its figure and the zoom tool.

    Args:
        folder: Holds the dataset's parquet files, named by split; None fetches it from the hub.
        out: The folder to write to; it is made.

    Returns:
        The files written.

    Raises:
        DataError: a file is missing, a row is no problem, or the hub cannot be reached.
    """
    return _prepare(GEO3K, folder, out=out, row=_geo3k_row)


def prepare_search(folder: Path | None, *, out: Path) -> list[Path]:
    """Write questions as `train.parquet` and `test.parquet`, each row with the search tool.

    Args:
        folder: Holds `train*.parquet` and `test*.parquet` with the columns question and golden_answers, and data_source
            where they come from several sets; None fetches Natural Questions and HotpotQA from the hub.
        out: The folder to write to; it is made.

    Returns:
        The files written.

    Raises:
        DataError: a file is missing, a row is no question, or the hub cannot be reached.
    """
    return _prepare(SEARCH, folder, out=out, row=search_row)


def _geo3k_row(problem: Mapping[str, Any], *, index: int, split: str, where: str) -> dict[str, Any]:
    text, answer = problem.get("problem"), problem.get("answer")
    if not isinstance(text, str) or not isinstance(answer, str):
        raise DataError(f"{where}: a problem needs the texts 'problem' and 'answer', not {sorted(problem)}")
    figures = [_data_uri(item, where=where) for item in problem.get("images") or []]
    if len(figures) != max(1, text.count("<image>")):
        raise DataError(f"{where}: the problem points at {text.count('<image>')} figures and 'images' holds {len(figures)}")
    tools = {"image_zoom_in_tool": {"create_kwargs": {"image": figures[0]}}}
    return {
        "data_source": GEO3K,
        "prompt": [
            {"role": "system", "content": _GEO3K_SYSTEM},
            {"role": "user", "content": text if "<image>" in text else f"<image>\n{text}"},
        ],
        "images": figures,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "need_tools_kwargs": True, "tools_kwargs": tools},
    }


def search_row(problem: Mapping[str, Any], *, index: int, split: str, where: str) -> dict[str, Any]:
    """Return the row of a question that is answered by searching.

    Raises:
        DataError: it has no `question`, or no `golden_answers`.
    """
    question, answers = problem.get("question"), problem.get("golden_answers")
    if not isinstance(question, str) or not isinstance(answers, list) or not answers:
        raise DataError(f"{where}: a row needs a text 'question' and a list 'golden_answers', not {sorted(problem)}")
    source = f"searchR1_{problem.get('data_source') or 'questions'}"
    tools = {"search": {"create_kwargs": {"data_source": source}}}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": _SEARCH_SYSTEM}, {"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [str(a) for a in answers]}},
        "extra_info": {"split": split, "index": index, "need_tools_kwargs": True, "tools_kwargs": tools},
    }


def _prepare(name: str, folder: Path | None, *, out: Path, row: Callable[..., dict[str, Any]]) -> list[Path]:
    found = _from_hub(name) if folder is None else sorted(folder.glob("**/*.parquet"))
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for split in ("train", "test"):
        files = [path for path in found if path.name.startswith(split)]
        if not files:
            where = f"the dataset {name}" if folder is None else str(folder)
            raise DataError(f"{where} has no {split}*.parquet; it holds {[p.name for p in found] or 'no parquet file'}")
        rows = [
            row(problem, index=index, split=split, where=f"{path}, row {number}")
            for index, (path, number, problem) in enumerate(_rows(files))
        ]
        target = out / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), target)
        written.append(target)
    return written


def _rows(files: list[Path]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for path in files:
        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as parquet: {one_line(error)}") from error
        yield from ((path, number, problem) for number, problem in enumerate(rows))


def _from_hub(name: str) -> list[Path]:
    from huggingface_hub import snapshot_download  # only this path needs it, and it is slow to import

    why = unreachable()  # one attempt; the library itself would try for a minute
    try:
        folder = snapshot_download(name, repo_type="dataset", allow_patterns=["*.parquet"], local_files_only=why is not None)
    except Exception as error:
        raise DataError(
            f"{name} cannot be fetched from the Hugging Face hub ({why or one_line(error)[:200]}); download its parquet "
            "files and name their folder with --from"
        ) from error
    return sorted(Path(folder).glob("**/*.parquet"))


def _data_uri(item: Any, *, where: str) -> str:
    data = item.get("bytes") if isinstance(item, Mapping) else item
    if not isinstance(data, bytes):
        raise DataError(f"{where}: a figure must be bytes, or have 'bytes'; this one is {item!r:.80}")
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
