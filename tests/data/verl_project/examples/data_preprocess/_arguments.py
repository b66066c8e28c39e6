"""The command line that the scripts of this folder share."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Literal

from polyturn.data.prepare import prepare_gsm8k

logger = logging.getLogger(__name__)


def prepare(*, variant: Literal["tool", "interaction"], description: str) -> None:
    """Read the arguments and write train.parquet and test.parquet."""
    logging.basicConfig(level="INFO", format="%(message)s")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/gsm8k"), help="Folder to write to.")
    parser.add_argument("--local_dir", type=Path, help="The earlier name of --local_save_dir.")
    parser.add_argument(
        "--local_dataset_path", type=Path, help="Folder with train.jsonl and test.jsonl; without it, the Hugging Face hub."
    )
    parser.add_argument("--hdfs_dir", help="Not available: copy the folder yourself.")
    parser.add_argument("--system", help="The system prompt, in place of the built-in one.")
    parser.add_argument("--instruction", help="What is asked behind every question, in place of the built-in sentence.")
    arguments = parser.parse_args()
    if arguments.hdfs_dir is not None:
        parser.error(f"--hdfs_dir {arguments.hdfs_dir}: files are not copied to HDFS; copy the written folder yourself")
    if arguments.local_dir is not None:
        logger.warning("--local_dir is deprecated; write --local_save_dir")
    folder = (arguments.local_dir or arguments.local_save_dir).expanduser()
    source = arguments.local_dataset_path
    written = prepare_gsm8k(
        None if source is None else source.expanduser(),
        variant=variant,
        out=folder,
        system=arguments.system,
        instruction=arguments.instruction,
    )
    for path in written:
        logger.info("%s", path)
