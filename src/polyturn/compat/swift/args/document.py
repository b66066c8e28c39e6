"""The table of arguments as Markdown: docs/migrate/swift-args.md.

python -m polyturn.compat.swift.args.document > docs/migrate/swift-args.md   (`make docs` does it)
"""

from __future__ import annotations

import sys

from polyturn.compat.swift.args.arguments import megatron_table, rollout_table, table
from polyturn.config.translate.document import rows_as_markdown

_HEAD = """\
# ms-swift's arguments

Every argument of `swift rlhf --rlhf_type grpo`, with its native keys. Generated from the tables in
`src/polyturn/compat/swift/args` by `python -m polyturn.compat.swift.args.document`. An unknown argument is an error that
names the nearest known one.

"""

_MEGATRON = (
    "", "## megatron rlhf", "", "Further arguments, and arguments with another meaning. Its batch size is global.", ""
)  # fmt: skip
_ROLLOUT = ("", "## swift rollout", "", "Keys under `serve` are those of the rollout server.", "")


def argument_table() -> str:
    """Return the page of all arguments."""
    own = [row for row in megatron_table().rows if row not in table().rows]
    parts = (
        rows_as_markdown(table().rows),
        _MEGATRON,
        rows_as_markdown(own),
        _ROLLOUT,
        rows_as_markdown(rollout_table().rows),
    )
    return _HEAD + "\n".join(line for part in parts for line in part) + "\n"


if __name__ == "__main__":
    sys.stdout.write(argument_table())
