"""packaging/conda: the recipe asks for what pyproject.toml asks for, in conda's names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wds_async
from tests.deploy.tools import ROOT, mapping

RECIPE = mapping(ROOT / "packaging" / "conda" / "recipe.yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTEXT = RECIPE["context"]


def resolved(entries: list[Any], windows: bool) -> Iterator[str]:
    """Each requirement on a system, as text."""
    for entry in entries:
        if isinstance(entry, dict):
            assert entry["if"] == "win"
            chosen = entry["then" if windows else "else"]
            yield from [chosen] if isinstance(chosen, str) else chosen
        else:
            yield entry


def python_requirements(entries: list[Any], windows: bool = False) -> dict[str, str]:
    """Name and versions of each, without Python itself and conda's virtual packages."""
    parsed = (
        text.replace("${{ python_min }}", CONTEXT["python_min"]).partition(" ") for text in resolved(entries, windows)
    )
    return {name: versions for name, _, versions in parsed if name not in ("python", "__win", "__unix")}


@pytest.mark.parametrize("windows", [False, True])
def test_the_recipe_asks_for_the_same_versions(windows: bool) -> None:
    # One package serves every Python, so it asks for what the oldest one needs.
    system = {"sys_platform": "win32" if windows else "linux", "python_version": CONTEXT["python_min"]}
    expected = {
        canonicalize_name(one.name): str(one.specifier)
        for one in map(Requirement, PROJECT["project"]["dependencies"])
        if one.marker is None or one.marker.evaluate(system)
    }
    assert python_requirements(RECIPE["requirements"]["run"], windows) == expected
    assert f">={CONTEXT['python_min']}" == PROJECT["project"]["requires-python"]


def test_the_recipe_builds_with_the_same_tools_and_makes_the_same_program() -> None:
    assert python_requirements(RECIPE["requirements"]["host"]).keys() == {"pip", *PROJECT["build-system"]["requires"]}
    assert RECIPE["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in PROJECT["project"]["scripts"].items()
    ]
    assert CONTEXT["version"] == wds_async.__version__
    assert (RECIPE["about"]["license"], RECIPE["about"]["homepage"]) == (
        PROJECT["project"]["license"],
        PROJECT["project"]["urls"]["Homepage"],
    )
