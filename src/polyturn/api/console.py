"""The log of a run, which goes to stderr and to a file in the run's folder, and the log levels of other libraries."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from polyturn.core.secrets import HideSecrets
from polyturn.infra.console import stderr_console

logger = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """Prints log records as plain lines, without secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(HideSecrets(os.environ))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            stderr_console().print(self.format(record), markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def log_to_console(level: str) -> None:
    """Send polyturn's log records of at least `level`, and warnings of other libraries, to the console."""
    root = logging.getLogger()
    if not any(isinstance(handler, ConsoleHandler) for handler in root.handlers):
        root.addHandler(ConsoleHandler())
    logging.getLogger("polyturn").setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def tell_start(name: str) -> None:
    """Log the start of a run."""
    logger.info("%s: checking the configuration, then loading PyTorch and the model", name)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Also append log records, with tracebacks, to a file within the context; secrets are masked as on the console."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(HideSecrets(os.environ))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def quiet_transformers() -> None:
    """Turn off warnings and progress bars of transformers, and keep the download bars of huggingface_hub."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").handlers.clear()  # its records reach the console through the root logger
    enable_progress_bars()
