"""The table of deliberate differences in the guide: every row is held by a test, and every row tells a difference."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.contract.differences import PROOFS

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "migrating.md"


def rows() -> list[list[str]]:
    """The cells of each row: subject, webdataset's behaviour, ours, and why."""
    table = (
        PAGE.read_text(encoding="utf-8").partition("<!-- differences -->\n")[2].partition("\n<!-- /differences -->")[0]
    )
    lines = table.splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_each_row_is_held_by_a_test() -> None:
    subjects = [subject for subject, *_ in rows()]
    assert sorted(subjects) == sorted(subject for proofs in PROOFS.values() for subject in proofs)
    for subject, webdataset, ours, why in rows():
        assert all((subject, webdataset, ours, why))
        assert webdataset != ours


@pytest.mark.parametrize("path", PROOFS)
def test_the_named_tests_exist(path: str) -> None:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert set(PROOFS[path].values()) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
