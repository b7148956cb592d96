"""The table of ``docs/reliability.md``: ``python -m tests.faults.table`` puts it there."""

from __future__ import annotations

from pathlib import Path

from tests.faults.expectations import (
    COLUMNS,
    FAULTS,
    HEALED,
    LATE,
    MODES,
    UNSEEN,
    VERIFIED,
    VERIFIED_MODES,
    Expected,
    expected,
    verified,
)

__all__ = ["PAGE", "filled", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def table() -> str:
    """What is promised, a row a fault and a column a store, as Markdown."""
    columns = list(COLUMNS.values())
    lines = ["| | " + " | ".join(column.words for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for fault in FAULTS.values():
        cells = [_cell([expected(column.name, fault.name, mode) for mode in MODES]) for column in columns]
        lines.append("| " + " | ".join([fault.words, *cells]) + " |")
    for name in ("corrupt_byte", "corrupt_header"):
        promised = _cell([verified(name, mode) for mode in VERIFIED_MODES])
        cells = [promised if column.name in VERIFIED else "no checksum" for column in columns]
        lines.append("| " + " | ".join([f'{FAULTS[name].words}, `verify="always"`', *cells]) + " |")
    return "\n".join(lines)


def _cell(modes: list[Expected]) -> str:
    """Words for once, every third request, and always."""
    words = [_words(one) for one in modes]
    assert words[0] == words[1], "no cell tells once from now and then"
    return words[0] if words[0] == words[2] else f"{words[0]} / {words[2]}"


def _words(one: Expected) -> str:
    if one.kind == HEALED:
        return "healed"
    if one.kind == UNSEEN:
        return "**not seen**"
    return f"`{one.error}`, late" if one.kind == LATE else f"`{one.error}`"


def filled(page: str) -> str:
    """``page`` with the table between its markers."""
    before, start, rest = page.partition("<!-- faults -->")
    _, end, after = rest.partition("<!-- /faults -->")
    assert start
    assert end
    return f"{before}{start}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
