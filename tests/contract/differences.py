"""Where wds_async deliberately differs from webdataset 1.0.2: both behaviours, the reason, the test that holds ours.

Data, so that the documentation can print it; `test_differences` checks that every named test exists. A row is
allowed only where its ``order`` says so: `FAULT` stands for a behaviour of webdataset that is known as a fault or
surprise, anything else names the page of the design. What differs and is not here is a bug of ours.
"""

from __future__ import annotations

from pathlib import Path

from tests.contract.difference import Difference
from tests.contract.rows_caches import CACHES, FIELDS, MIXES
from tests.contract.rows_data import CACHING, DECODING, READING, WRITING
from tests.contract.rows_opening import OPENING, REFUSALS
from tests.contract.rows_pipelines import PIPELINES, SHARDS

__all__ = ["DIFFERENCES", "PAGE", "Difference", "filled", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"

DIFFERENCES: tuple[Difference, ...] = (
    *SHARDS, *MIXES, *PIPELINES, *FIELDS, *READING, *OPENING, *DECODING, *WRITING, *REFUSALS, *CACHING, *CACHES
)  # fmt: skip


def table() -> str:
    """The rows as Markdown, for ``docs/migrating.md``: ``python -m tests.contract.differences`` puts them there."""
    lines = ["| | WebDataset 1.0.2 | wds_async | why |", "|---|---|---|---|"]
    for row in DIFFERENCES:
        cells = (row.subject, row.webdataset, row.ours, row.reason)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """``page`` with the table between its markers."""
    before, start, rest = page.partition("<!-- differences -->")
    _, end, after = rest.partition("<!-- /differences -->")
    assert start
    assert end
    return f"{before}{start}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
