"""The guides say what is true: their Python runs, in order, in an empty folder; their links lead somewhere.

Blocks marked ``python`` are run, one after another in one process; those marked ``py`` show what needs a store or a
cluster, and are only compiled. The first block that is run in "Getting started" writes shards; the other guides
begin with the same ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = sorted(path for path in DOCS.glob("*.md") if path.name not in ("design.md", "cli.md"))
GUIDES.append(DOCS.parent / "SKILL.md")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_a_guide_shows_runs(guide: Path, tmp_path: Path) -> None:
    for block in blocks(guide, "py"):
        compile(block, guide.name, "exec")
    code = blocks(guide, "python")
    if guide.stem != "getting-started":
        code.insert(0, blocks(DOCS / "getting-started.md", "python")[0])
    program = tmp_path / "guide.py"
    body = "\n\n".join(code)
    program.write_text(body, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:shardshuffle", program.name],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.glob("*.md")), *sorted(DOCS.parent.glob("[SCl]*.*"))], ids=lambda path: path.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        where = (page.parent / target).resolve() if target else page
        assert where.exists(), f"{page.name}: {target}"
        if anchor and where.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", where.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"
