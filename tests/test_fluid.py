"""The fluent methods: generated of the filters, typed as the pipeline that they are called on."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from wds_async import filters

ROOT = Path(__file__).parents[1]


def as_tree(source: str) -> str:
    """Return the source's class, the same for two that differ in their line ends only."""
    (page,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in ast.walk(page):
        if isinstance(node, ast.FunctionDef):
            node.body[0] = ast.Expr(ast.Constant(ast.get_docstring(node)))
    return ast.dump(page)


def test_the_methods_are_those_of_the_filters() -> None:
    generator = runpy.run_path(str(ROOT / ".ci" / "generate.py"))
    here = generator["METHODS"].read_text(encoding="utf-8")
    assert as_tree(here) == as_tree(generator["methods"]()), "run make generate"


def test_every_filter_is_a_method() -> None:
    stages = {name for name in filters.__all__ if isinstance(getattr(filters, name), filters.RestCurried)}
    assert not {name for name in stages if not name.startswith("_") and not hasattr(wds.FluidInterface, name)}


def test_a_method_gives_the_stage_with_its_arguments() -> None:
    base = wds.FluidWrapper([1, 2, 3])
    assert list(base.map(lambda x: x + 1).select(lambda x: x > 2).batched(2, collation_fn=None)) == [[3, 4]]
    assert list(base.slice(1, 3).listed(2)) == [[2, 3]]
    assert base.shuffle(0) is base
    assert isinstance(base.shuffle(5, initial=2, seed=1), wds.FluidWrapper)
    with pytest.raises(TypeError, match="unexpected keyword"):
        base.to_tuple("jpg", handlr=None)  # type: ignore[call-arg]


def test_a_dataset_shows_its_shards_stages_and_epoch(shards: Any) -> None:
    dataset = wds.WebDataset([str(path) for path in shards(3, 2)], shardshuffle=3).map(dict).batched(2)
    stages = "detshuffle > split_by_node > split_by_worker > tarfile_samples > check_empty > map > batched"
    assert repr(dataset) == f"<WebDataset: 3 shards, next epoch 0; SimpleShardList > {stages}>"
    list(dataset)
    dataset.set_epoch(dataset.pipeline[1].epoch + 4)
    assert "next epoch 4" in repr(dataset)
    assert repr(wds.DataPipeline()) == "<DataPipeline: no stages>"


def test_a_loader_shows_the_epoch_that_its_workers_began(shards: Any) -> None:
    pytest.importorskip("torch")
    dataset = wds.WebDataset([str(path) for path in shards(2, 2)], shardshuffle=2)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).shuffle(5)
    assert len(list(loader)) == 4
    assert repr(loader) == f"<WebLoader: DataLoader of {dataset!r} > shuffle>"
    assert "2 shards, next epoch 1" in repr(loader)


PROGRAM = """\
from torch.utils.data import DataLoader
import wds_async as wds

dataset = wds.WebDataset("x.tar", shardshuffle=False)
reveal_type(dataset.shuffle(10).decode("rgb").to_tuple("jpg", "cls").map_tuple(None).batched(4))
reveal_type(dataset.compose(wds.split_by_node).with_epoch(3).with_length(3).repeat(2))
loader = wds.WebLoader(dataset, batch_size=None)
reveal_type(loader.unbatched().shuffle(10).batched(4).with_epoch(3))
reveal_type(dataset.ledger.summary())
with dataset as same:
    reveal_type(same)
DataLoader(dataset.batched(4), batch_size=None)
dataset.shuffle(10).decod("rgb")
dataset.shuffle(10).map("no function")
dataset.select(predicat=None)
wds.WebDatset("x.tar")
wds.filters.shuffle
"""
TORCH = """\
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", covariant=True)

class Dataset(Generic[T]): ...

class IterableDataset(Dataset[T]):
    def __iter__(self) -> Iterator[T]: ...

class DataLoader(Generic[T]):
    def __init__(self, dataset: Dataset[T], batch_size: int | None = 1) -> None: ...
"""


def test_what_a_type_checker_says(tmp_path: Path) -> None:
    """With a stub in torch's place, which takes a minute to read."""
    pytest.importorskip("mypy")
    stubs = tmp_path / "stubs"
    for name, text in (("torch", ""), ("torch/utils", ""), ("torch/utils/data", TORCH)):
        (stubs / name).mkdir(parents=True)
        (stubs / name / "__init__.pyi").write_text(text)
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{stubs}{os.pathsep}{ROOT}"},
    )
    lines = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("program.py")]
    dataset, loader = "wds_async.dataset.WebDataset", "wds_async.loader.WebLoader"
    assert [line.removeprefix("note: Revealed type is ").strip('"') for line in lines if "Revealed" in line] == [
        dataset, dataset, loader, "str", dataset,
    ], done.stdout  # fmt: skip
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error")]
    begins = [
        '"WebDataset" has no attribute "decod"',
        'Argument 1 to "map" of "FilterMethods" has incompatible type "str"',
        'Unexpected keyword argument "predicat" for "select"',
        'Module has no attribute "WebDatset"',
    ]
    assert len(errors) == len(begins), done.stdout
    for error, begin in zip(errors, begins, strict=True):
        assert error.startswith(begin)
