"""Errors that reach the program: its own frames, and none of those in between."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from wds_async.errors import ReaderClosed, ShardNotFound, UrlError, WdsError

HERE = Path(__file__).name


def raised(act: Callable[[], Any]) -> tuple[BaseException, list[str], str]:
    """What ``act`` raises: the error, ``file:function`` of each frame inside of ``act``, and the printed text."""
    try:
        act()
    except Exception as exn:
        frames = [f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_tb(exn.__traceback__)]
        return exn, frames[2:], "".join(traceback.format_exception(exn))
    raise AssertionError("nothing was raised")


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    with wds.TarWriter(str(tmp_path / "shard.tar")) as sink:
        for i in range(3):
            sink.write({"__key__": f"{i:06d}", "cls": i, "txt": "some words"})
    return [str(tmp_path / "shard.tar")]


def missing(tmp_path: Path) -> wds.WebDataset:
    return wds.WebDataset(str(tmp_path / "nothing-{0..3}.tar"), shardshuffle=False)


def broken(sample: Any) -> Any:
    return sample["nothing there"]


def passing(samples: Iterable[Any]) -> Iterator[Any]:
    yield from samples


def test_a_missing_shard_is_one_line_of_the_program(tmp_path: Path) -> None:
    dataset = missing(tmp_path).shuffle(10).decode().batched(2)
    error, frames, text = raised(lambda: list(dataset))
    assert isinstance(error, ShardNotFound)
    assert frames == []
    assert "Errno" not in text
    assert isinstance(error.__context__, FileNotFoundError)  # for a program that asks


def test_of_an_error_of_ours_the_programs_stages_stay(tmp_path: Path) -> None:
    assert raised(lambda: list(missing(tmp_path).compose(passing).shuffle(3)))[1] == [f"{HERE}:passing"]


def test_the_frames_of_the_programs_functions_stay(urls: list[str]) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False).shuffle(2).map(broken).batched(2)
    error, frames, _ = raised(lambda: list(dataset))
    assert isinstance(error, KeyError)
    assert frames == [f"{HERE}:broken"]


def test_a_library_that_the_program_put_into_the_pipeline_shows_where_it_failed(urls: list[str]) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False).map(lambda sample: "{").map(json.loads)
    error, frames, _ = raised(lambda: list(dataset))
    assert isinstance(error, json.JSONDecodeError)
    assert frames == ["__init__.py:loads", "decoder.py:decode", "decoder.py:raw_decode"]


def test_a_builtin_error_shows_which_line_of_ours_raised_it(urls: list[str]) -> None:
    error, frames, _ = raised(lambda: list(wds.WebDataset(urls, shardshuffle=False).to_tuple("nothing")))
    assert isinstance(error, ValueError)
    assert frames == ["fields.py:_to_tuple"]


def test_what_the_programs_opener_raised_stays_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def opener(url: str, mode: str, bufsize: int, **kw: Any) -> Any:
        raise LookupError("no such thing in my store")

    monkeypatch.setitem(wds.gopen_schemes, "mine", opener)
    error, frames, text = raised(lambda: list(wds.WebDataset("mine://x.tar", shardshuffle=False)))
    assert isinstance(error, WdsError)
    assert isinstance(error.__cause__, LookupError)
    assert "in opener" in text
    assert frames == []


def test_a_dataset_that_cannot_be_made(tmp_path: Path) -> None:
    error, frames, _ = raised(lambda: wds.WebDataset(str(tmp_path / "x-*.tar"), shardshuffle=False))
    assert isinstance(error, UrlError)
    assert frames == []
    error, frames, _ = raised(lambda: wds.WebDataset(str(tmp_path / "x-0.tar"), shardshuffle=False, check="all"))
    assert isinstance(error, ShardNotFound)
    assert frames == []


def test_a_dataset_that_cannot_be_iterated(urls: list[str]) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False)
    dataset.close()
    error, frames, _ = raised(lambda: iter(dataset))
    assert isinstance(error, ReaderClosed)
    assert frames == []


def test_asyncio_programs(tmp_path: Path) -> None:
    async def read() -> None:
        async for _ in wds.AsyncReader(missing(tmp_path)):
            pass

    _, frames, text = raised(lambda: asyncio.run(read()))
    assert frames[-1] == f"{HERE}:read"
    assert "wds_async/" not in text


def test_random_access(urls: list[str]) -> None:
    from wds_async.indexed.dataset import ShardListDataset

    dataset = ShardListDataset(urls, transformations=broken)
    assert raised(lambda: dataset[0])[1] == [f"{HERE}:broken"]
    error, frames, _ = raised(lambda: ShardListDataset([f"{urls[0]}.not"]))
    assert isinstance(error, ShardNotFound)
    assert frames == []


@pytest.mark.parametrize("function", [broken, None])
def test_dataloader_workers(function: Any, urls: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    dataset = missing(tmp_path) if function is None else wds.WebDataset(urls, shardshuffle=False).map(function)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).shuffle(3)
    error, frames, text = raised(lambda: list(loader))
    assert frames == []
    assert "wds_async/" not in text
    assert "Errno" not in text
    assert ("in broken" in str(error)) == (function is not None)


def test_debug_shows_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = missing(tmp_path)
    monkeypatch.setenv("WDS_LOG", "debug")
    error, frames, text = raised(lambda: list(dataset))
    assert len(frames) > 5
    assert isinstance(error.__cause__, FileNotFoundError)
    assert "Errno" in text


# -- notes ----------------------------------------------------------------------------------------------------------


def notes(dataset: Any) -> list[str]:
    error, _, text = raised(lambda: list(dataset))
    found = getattr(error, "__notes__", [])
    assert all(note in text for note in found)
    return found


def refuse(value: Any) -> Any:
    raise LookupError("refused")


STAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "map": (lambda data: data.map(refuse), "in the stage map: sample '000000' of URL"),
    "threads": (lambda data: data.map(refuse, threads=2), "in the stage map: sample '000000' of URL"),
    "select": (lambda data: data.select(refuse), "in the stage select: sample '000000' of URL"),
    "map_dict": (lambda data: data.map_dict(txt=refuse), "in the stage map_dict, field 'txt': sample '000000' of URL"),
    "map_tuple": (
        lambda data: data.to_tuple("cls", "txt").map_tuple(None, refuse),
        "in the stage map_tuple, value 1; put __key__ into to_tuple() to see which sample",
    ),
    "associate": (lambda data: data.associate(refuse), "in the stage associate: sample '000000' of URL"),
    "batched": (
        lambda data: data.batched(2, collation_fn=refuse),
        "in the stage batched, 2 samples of which this is the first: sample '000000' of URL",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_a_function_names_stage_sample_and_shard(stage: str, urls: list[str]) -> None:
    change, note = STAGES[stage]
    assert notes(change(wds.WebDataset(urls, shardshuffle=False))) == [note.replace("URL", urls[0])]


def test_no_secret_is_in_a_note(urls: list[str]) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False).map(lambda s: {**s, "__url__": "https://h/x?sig=hush"})
    (note,) = notes(dataset.map(refuse))
    assert note.endswith("https://h/x?sig=***")


def test_functions_of_members(urls: list[str]) -> None:
    named = notes(wds.WebDataset(urls, shardshuffle=False, select_files=refuse))
    assert named[0].startswith("in select_files or rename_files, of the member '000000.")
    assert named[1].endswith(f"for a member of {urls[0]}")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.map(lambda sample: sample["cls"] + 1),
        lambda data: data.map(lambda sample: sample["txt"].shape),
        lambda data: data.map_dict(txt=lambda text: text.split(" ")),
    ],
)
def test_bytes_in_place_of_an_object_suggest_decode(change: Callable[[Any], Any], urls: list[str]) -> None:
    _, hint = notes(change(wds.WebDataset(urls, shardshuffle=False)))
    assert hint.startswith("'cls', 'txt' of the sample are bytes: .decode(...) before this stage")
    assert len(notes(wds.WebDataset(urls, shardshuffle=False).decode().map(refuse))) == 1


def test_bytes_of_tuples_suggest_decode(urls: list[str]) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False).to_tuple("cls", "txt").map_tuple(lambda cls: cls + 1)
    assert notes(dataset)[1].startswith("value 0, value 1 of the sample are bytes")


def test_errors_of_ours_tell_the_sample_themselves(urls: list[str]) -> None:
    assert notes(wds.WebDataset(urls, shardshuffle=False).map_dict(nothing=len)) == []
    assert notes(wds.WebDataset(urls, shardshuffle=False).decode(refuse)) == []
