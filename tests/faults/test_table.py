"""The page about reliability says what the matrix holds, and its commands name tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.expectations import COLUMNS, ERROR, FAULTS, LATE, MODES, expected
from tests.faults.table import PAGE, filled
from wds_async import errors

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table() -> None:
    """``python -m tests.faults.table`` brings it up to date."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_the_errors_that_are_promised_are_there() -> None:
    cells = [expected(column, fault, mode) for column in COLUMNS for fault in FAULTS for mode in MODES]
    for cell in cells:
        if cell.kind in (ERROR, LATE):
            assert issubclass(getattr(errors, cell.error), errors.WdsError)
        else:
            assert cell.error == ""


NAMED = sorted(set(re.findall(r"(?:tests|benchmarks)/[\w/]+(?:\.py)?", PAGE.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("path", NAMED)
def test_what_the_page_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()
