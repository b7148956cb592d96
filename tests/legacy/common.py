"""What the tests of older classes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["deprecated"]


def deprecated(make: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Return ``make(*args, **kw)``, which warns of its age in the line of the caller's."""
    with pytest.warns(DeprecationWarning, match=f"^{make.__name__} is deprecated; use ") as caught:
        made = make(*args, **kw)
    assert [warning.filename for warning in caught] == [__file__]
    return made
