"""`Feed`: batches that decoders on other processes or machines make for the ranks of a training."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, Self

from wds_async import world
from wds_async.arguments import check_size
from wds_async.distributed.engines.ray import RayEngine
from wds_async.distributed.feed.actors import RayFeedEngine
from wds_async.distributed.feed.coordinator import Coordinator
from wds_async.distributed.feed.loader import FeedLoader
from wds_async.distributed.feed.local import LocalFeedEngine
from wds_async.distributed.functions import name_of
from wds_async.environment import parse_bytes
from wds_async.errors import ConfigError

__all__ = ["Feed"]


class Feed:
    """Batches of ``pipeline``, made by ``decoders`` decoders for any number of ranks.

    ``pipeline``: ``"module:function"``, or the function itself, which returns a dataset, pipeline or loader; decoders
    import it. Decoder n of N runs it as rank n of N. Batch s of rank r of W is number s * W + r of the epoch, and
    comes from decoder (s * W + r) mod N; where a decoder has no more, the others go on without it. So the order depends
    on N, on nothing else.

    ``engine``: "local", processes of this machine, or "ray", actors that ask for ``cpus`` each, or a `RayEngine`.
    ``decoders``: their number, or (at first, at most): they grow by the share of time in which ranks wait. ``ahead``:
    bytes of batches that no rank was given yet, of all together; half of it at the decoders, half at the ranks; one
    batch of each in any case. ``equal``: "drop" ends an epoch for all ranks with the same step, and leaves out what is
    at its end for some of them only; None gives the first ranks one step more. ``silence_s``: seconds after which a
    decoder that is not heard of, or a rank for which others wait, is an error.

    >>> feed = Feed("my.module:pipeline", decoders=(2, 8), ahead="8G")  # doctest: +SKIP
    >>> for batch in feed.loader(rank, world_size):  # doctest: +SKIP
    ...     train(batch)

    Pickled, as for another process or a Ray task, it gives loaders of the same feed. `close` ends the decoders; so does
    the end of the program that made it. ConfigError for arguments that are wrong.
    """

    def __init__(
        self,
        pipeline: str | Callable[[], Any],
        engine: str | RayEngine = "local",
        decoders: int | tuple[int, int] = 1,
        ahead: int | str = "1G",
        equal: str | None = "drop",
        cpus: float = 1,
        silence_s: float = 300,
    ) -> None:
        first, most = decoders if isinstance(decoders, tuple) else (decoders, decoders)
        first = check_size("Feed", "decoders", first, 1)
        most = check_size("Feed", "decoders", most, first)
        if equal not in ("drop", None):
            raise ConfigError(f"Feed: equal={equal!r}: it is 'drop' or None")
        if engine not in ("local", "ray") and not isinstance(engine, RayEngine):
            raise ConfigError(f"Feed: engine={engine!r}: it is 'local', 'ray', or a RayEngine with more options")
        if not silence_s > 0:
            raise ConfigError(f"Feed: silence_s={silence_s!r}: seconds, more than 0")
        self._ahead, self._even, self._silence_s = _bytes(ahead), equal == "drop", silence_s
        name = name_of(pipeline, "pipeline")
        credit = max(1, self._ahead // (2 * most))
        coordinator = Coordinator(first, most, self._ahead, silence_s=silence_s)
        self._engine: LocalFeedEngine | RayFeedEngine | None
        if engine == "local":
            self._engine = LocalFeedEngine(name, coordinator, credit)
        else:
            ray = engine if isinstance(engine, RayEngine) else RayEngine(cpus)
            self._engine = RayFeedEngine(name, coordinator, credit, ray)
        self._link, self._pid = self._engine.link(), os.getpid()
        atexit.register(self.close)  # before multiprocessing's own, which waits for processes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def loader(self, rank: int | None = None, world_size: int | None = None) -> FeedLoader:
        """Return the batches of ``rank`` of ``world_size`` (default: those of this process, see `world.place`)."""
        here = world.place()
        rank = here.rank if rank is None else rank
        world_size = here.world_size if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise ConfigError(f"Feed.loader: rank {rank} of {world_size}: it is from 0 to below the number of ranks")
        ahead = max(1, self._ahead // (2 * world_size))
        return FeedLoader(self._link, rank, world_size, ahead, even=self._even, silence_s=self._silence_s)

    def resize(self, decoders: int) -> None:
        """Have ``decoders`` decoders. What they had still to read is shared out as by `merge_states`, behind the
        batches that are on their way; each sample of the epoch still comes once."""
        self._link.ask("resize", decoders)

    def close(self) -> None:
        """End the decoders, in the process that made the feed. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():  # not in a fork of it
            atexit.unregister(self.close)
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _bytes(ahead: int | str) -> int:
    try:
        return parse_bytes(ahead) if isinstance(ahead, str) else check_size("Feed", "ahead", ahead, 0)
    except ValueError as exn:
        raise ConfigError(f"Feed: ahead={ahead!r}: {exn}") from exn
