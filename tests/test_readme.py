"""README.md, CONTRIBUTING.md and docs/cli.md agree with the code."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import wds_async
from wds_async.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_commands_is_generated_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    spec = importlib.util.spec_from_file_location("generate", ROOT / ".ci" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert generate.command_line(page) == page, "run make generate"


def test_the_commands_are_those_that_exist() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^\| \[`wds-async (\w+)", text, re.MULTILINE) == list(COMMANDS)
    assert set(re.findall(r"(?:\$ |`)wds-async (\w+)", README)) <= set(COMMANDS)


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 90


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:\$ |`)make ([a-z-]+)", pages)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_first_commands_work_without_a_package_index(page: str) -> None:
    """The package is not published: it is installed from a checkout, before anything else needs it."""
    commands = re.findall(r"^\$ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(r"git clone https://\S+ (\S+) && cd \1", commands[0])
    assert (install := re.fullmatch(r'pip install -e "\.\[(.*)\]"', commands[1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(install[1].split(",")) <= set(project["optional-dependencies"])
    assert not [command for command in commands if command.startswith("pip install") and "-e" not in command]


def test_links_lead_somewhere() -> None:
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page):
            assert "://" in target or (ROOT / target).exists(), target


def test_the_example_is_ten_lines_of_names_that_exist() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wds":
            assert hasattr(wds_async, node.attr)
        elif isinstance(node, ast.Attribute):
            assert hasattr(wds_async.WebDataset, node.attr)


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{wds_async.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
