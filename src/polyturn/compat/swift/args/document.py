"""The table of arguments as Markdown: docs/migrate/swift-args.md.

python -m polyturn.compat.swift.args.document > docs/migrate/swift-args.md
"""

from __future__ import annotations

import sys

from polyturn.compat.swift.args.arguments import rollout_table, table
from polyturn.compat.verl_config.document import rows_as_markdown

_HEAD = """\
# ms-swift's arguments

What becomes of every argument of `swift rlhf --rlhf_type grpo`. Made from the tables in `src/polyturn/compat/swift/args` by
`python -m polyturn.compat.swift.args.document`. An argument that is not here is an error that names the nearest one.

"""

_ROLLOUT = ("", "## swift rollout", "", "Keys under `serve` are those of the rollout server.", "")


def argument_table() -> str:
    """Return the page of all arguments."""
    lines = [*rows_as_markdown(table().rows), *_ROLLOUT, *rows_as_markdown(rollout_table().rows)]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(argument_table())
