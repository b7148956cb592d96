"""`Dataset` (2020): `WebDataset` with the arguments of both of its generations, and methods that change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async.dataset import WebDataset
from wds_async.handlers import Handler, reraise_exception
from wds_async.legacy.names import deprecated
from wds_async.pipeline import PipelineStage
from wds_async.reading.stage import TarStage
from wds_async.shardlists import lists

__all__ = ["Dataset"]


class _OnUrls(PipelineStage):
    """A function from a list of URLs to some of them, as a stage of shards. In place where it gives None."""

    def __init__(self, f: Callable[[list[str]], Iterable[str] | None]) -> None:
        self.f = f

    def run(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        urls = [shard["url"] for shard in source]
        chosen = self.f(urls)
        return ({"url": url} for url in (urls if chosen is None else chosen))


class _Opened(PipelineStage):
    """Shards opened by a user's ``open_fn(url)``, expanded as tars; the engine is not asked."""

    def __init__(self, open_fn: Callable[[str], Any] | None, handler: Handler) -> None:
        self.open_fn = open_fn
        self.handler = handler

    def run(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        from wds_async.reading import parts as tarparts  # noqa: PLC0415 (few bring an opener of their own)

        opened = tarparts.url_opener(source, handler=self.handler) if self.open_fn is None else self._open(source)
        return iter(tarparts.tar_file_expander(opened, handler=self.handler))

    def _open(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for shard in source:
            try:
                stream = self.open_fn(shard["url"])  # type: ignore[misc]
            except Exception as exn:
                if self.handler(exn):
                    continue
                return
            yield {**shard, "stream": stream}


class Dataset(WebDataset):
    """The samples of the shards ``urls``. The fluent methods change this object and return it.

    ``length``: what ``len`` gives. ``handler``, ``tarhandler``: for errors of shards, the second one where it is given.
    ``open_fn``: ``open_fn(url)`` gives a binary stream, instead of the engine.
    ``initial_pipeline``: stages that make samples of a shard's members (dicts with ``fname`` and ``data``), instead of
        grouping them by key.
    ``shard_selection``, ``splitter``: a function from the list of URLs to this worker's (default: every n-th);
        ``prepare_for_worker=False`` and ``splitter=None`` leave all to each. Such a function of one's own also decides
        about ranks; otherwise shards are split by rank. A function ``prepare_for_worker`` is called with this object
        when an iteration begins.
    ``shuffle``: shuffle shards; a number of shards, or a function that does it in place.
    ``cache_dir``, ``cache_size``, ``cache_name``, ``cache_verbose``: `WebDataset`'s ``cache_dir``, ``cache_size``,
        ``url_to_name``, ``verbose``.

    Deprecated: `WebDataset`.
    """

    def __init__(
        self,
        urls: Any,
        *,
        length: int | bool | None = None,
        open_fn: Callable[[str], Any] | None = None,
        handler: Handler = reraise_exception,
        tarhandler: Handler | None = None,
        prepare_for_worker: bool | Callable[[Any], Any] = True,
        initial_pipeline: list[Any] | None = None,
        shard_selection: Callable[[list[str]], Iterable[str]] | None = None,
        splitter: bool | Callable[[list[str]], Iterable[str]] | None = True,
        shuffle: bool | int | Callable[[list[str]], Any] = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = -1,
        cache_name: Callable[[str], str] | None = None,
        cache_verbose: bool = False,
    ) -> None:
        deprecated("Dataset", "WebDataset")
        chosen = shard_selection if shard_selection is not None else splitter
        own = callable(chosen) and chosen is not lists.split_by_worker
        split = bool(chosen) and prepare_for_worker is not False
        super().__init__(
            urls,
            handler=tarhandler or handler,
            shardshuffle=False if callable(shuffle) else sys.maxsize if shuffle is True else int(shuffle),
            cache_dir=cache_dir,
            cache_size=cache_size,
            url_to_name=cache_name,
            verbose=cache_verbose,
            nodesplitter=None if own else lists.split_by_node,
            workersplitter=lists.split_by_worker if split and not own else None,
            empty_check=False,
            length=None if length is None or isinstance(length, bool) else length,
        )
        self.prepare_for_worker = prepare_for_worker
        at = next(i for i, stage in enumerate(self.pipeline) if isinstance(stage, TarStage))
        if open_fn is not None or initial_pipeline is not None:
            self.pipeline[at : at + 1] = [
                _Opened(open_fn, tarhandler or handler),
                *([_grouped] if initial_pipeline is None else initial_pipeline),
            ]
        if own and split:
            self.pipeline.insert(at, _OnUrls(chosen))  # type: ignore[arg-type]
        if callable(shuffle):
            self.pipeline.insert(at, _OnUrls(shuffle))

    def compose(self, *stages: Any, **kw: Any) -> Any:
        """Add the stages to this object, and return it."""
        self.pipeline = super().compose(*stages, **kw).pipeline
        return self

    def __iter__(self) -> Iterator[Any]:
        if callable(self.prepare_for_worker):
            self.prepare_for_worker(self)
        return super().__iter__()


def _grouped(source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from wds_async.reading import parts as tarparts  # noqa: PLC0415 (as above)

    return iter(tarparts.group_by_keys(source))
