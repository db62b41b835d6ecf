"""What the terminal client says when it ends by a fault of its own."""

from __future__ import annotations

import traceback
from typing import Any

from rich.text import Text
from textual.app import App

from chatd.clean import clean


class FaultReport(App[Any], inherit_bindings=False):
    """Says where a fault is, and nothing of what the variables were: a key or a conversation would be among them."""

    def _fatal_error(self) -> None:
        # Textual's own shows every variable of every frame, and its text as it is.
        self.panic(Text(clean(traceback.format_exc())))
