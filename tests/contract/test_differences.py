"""The table of deliberate differences names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract import difference
from tests.contract.differences import DIFFERENCES, PAGE, filled

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.subject)
def test_the_named_test_exists(difference: object) -> None:
    path, _, name = difference.test.partition("::")  # type: ignore[attr-defined]
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_difference_is_told_once() -> None:
    subjects = [difference.subject for difference in DIFFERENCES]
    assert len(set(subjects)) == len(subjects)
    assert all(d.webdataset and d.ours and d.reason and d.webdataset != d.ours for d in DIFFERENCES)


def test_the_guide_has_the_table() -> None:
    """``python -m tests.contract.differences`` brings it up to date."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_each_difference_is_ordered() -> None:
    orders = {value for name, value in vars(difference).items() if name.isupper()} | {
        "design: the same seed gives the same stream",
        "design: a stable hash for seeds",
    }
    assert {d.order for d in DIFFERENCES} <= orders
