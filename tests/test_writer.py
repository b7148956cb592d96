"""The room offers what webdataset's offers, under the same names and with the same arguments first."""

from __future__ import annotations

import inspect

import pytest

from wds_async import writer

NAMES = sorted(set(writer.__all__) - {"default_handlers"})


@pytest.mark.parametrize("name", NAMES)
def test_takes_webdatasets_arguments_in_their_order(name: str) -> None:
    import webdataset.writer

    theirs = inspect.signature(getattr(webdataset.writer, name)).parameters.values()
    ours = inspect.signature(getattr(writer, name)).parameters.values()
    expected = [(p.name, p.default, p.kind) for p in theirs]
    assert [(p.name, p.default, p.kind) for p in ours if p.name in {q.name for q in theirs}] == expected
    positional = [p for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional][: len(expected)] == [n for n, _, k in expected if k == positional[0].kind]


def test_the_two_writers_write_with_webdatasets_arguments() -> None:
    import webdataset.writer

    for kind in ("TarWriter", "ShardWriter"):
        theirs = {name for name, _ in inspect.getmembers(getattr(webdataset.writer, kind), inspect.isfunction)}
        public = {name for name in theirs if not name.startswith("_")} - {"tarmode"}
        assert public <= set(dir(getattr(writer, kind)))


def test_the_handlers_are_those_of_webdataset_pkl_and_webp() -> None:
    import webdataset.writer

    assert set(writer.default_handlers) == set(webdataset.writer.default_handlers) | {"pkl", "webp"}
    assert writer.make_handlers() is not writer.make_handlers()
