"""Where the size of the terminal is known from: the terminal alone."""

from __future__ import annotations

import os


def forget_exported_size() -> None:
    """Take COLUMNS and LINES out of the environment.

    Textual believes them before it asks the terminal, at the start and at each change of its size; where a shell or
    `docker exec -e` exported them, the client would keep that size for ever.
    """
    for variable in ("COLUMNS", "LINES"):
        os.environ.pop(variable, None)
