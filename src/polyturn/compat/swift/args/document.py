"""The table of arguments as Markdown: docs/migrate/swift-args.md.

python -m polyturn.compat.swift.args.document > docs/migrate/swift-args.md
"""

from __future__ import annotations

import sys

from polyturn.compat.swift.args.arguments import table
from polyturn.compat.verl_config.document import rows_as_markdown

_HEAD = """\
# ms-swift's arguments

What becomes of every argument of `swift rlhf --rlhf_type grpo`. Made from `src/polyturn/compat/swift/args/keys.yaml` by
`python -m polyturn.compat.swift.args.document`. An argument that is not here is an error that names the nearest one.

"""


def argument_table() -> str:
    """Return the page of all arguments."""
    return _HEAD + "\n".join(rows_as_markdown(table().rows)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(argument_table())
