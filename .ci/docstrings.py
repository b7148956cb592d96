"""Extension of griffe: the arguments in our docstrings, a paragraph each, become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"^(``[\w*]+``(?:, ``[\w*]+``)*: )", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes the text of each docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Make a list of the lines that begin with an argument."""
        if obj.docstring is not None:
            text = _ARGUMENT.sub(r"* \1", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?<!\n)\n(?=\* ``)", "\n\n", text)
