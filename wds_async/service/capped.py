"""An origin that may cost only so much, and the file in which the cache's folder keeps what was spent."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wds_async.costs import Spending
from wds_async.errors import ConfigError

if TYPE_CHECKING:
    from wds_async.transfer.ranges import Facts, Part, RangeFetcher

__all__ = ["Capped", "SpentFile"]

logger = logging.getLogger("wds_async")


class Capped:
    """``origin`` (a `transfer.ranges.RangeFetcher`) while ``spending`` allows it. Behind the limit each method raises
    CostLimitReached and asks for nothing; what is under way then ends as it would."""

    def __init__(self, origin: RangeFetcher, spending: Spending) -> None:
        self._origin = origin
        self._spending = spending

    @property
    def crowded(self) -> bool:
        """Whether its parts wait for memory."""
        return self._origin.crowded

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        """What the origin says of an object."""
        self._spending.check()
        return await self._origin.facts(url, deadline_s=deadline_s)

    def reachable(self, url: str) -> bool:
        """Whether the origin is not known to be down."""
        return self._origin.reachable(url)

    def part(self, url: str, start: int, stop: int, facts: Facts | None = None) -> AbstractAsyncContextManager[Part]:
        """A range of its bytes."""
        self._spending.check()
        return self._origin.part(url, start, stop, facts)

    def stream(self, url: str) -> AbstractAsyncContextManager[tuple[Facts, AsyncIterator[memoryview]]]:
        """All of its bytes, in order."""
        self._spending.check()
        return self._origin.stream(url)

    def entries(self, url: str) -> AsyncIterator[Any]:
        """What is in a folder."""
        self._spending.check()
        return self._origin.entries(url)

    async def close(self) -> None:
        """Close the origin."""
        await self._origin.close()


class SpentFile:
    """``costs.json`` in a cache's folder: what was spent until the last look, so that a limit outlives its process. It
    is that folder until `close`, whatever its path leads to later."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "costs.json"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._written: dict[str, Any] = {}
        self._failed = False

    def load(self, spending: Spending) -> None:
        """Count what earlier processes have spent too. ConfigError for a file that cannot be read: a limit that begins
        at nothing again is none. Blocks."""
        try:
            spending.restore(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exn:
            raise ConfigError(
                f"{self._path}: what was spent until now cannot be read: {exn}. Remove it to begin at nothing"
            ) from exn

    def save(self, state: dict[str, Any]) -> None:
        """Write it down, where it has changed. A disk that refuses is logged once. Blocks."""
        if state == self._written:
            return
        name, part, at = self._path.name, "costs.part", self._folder
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
        except OSError as exn:
            if not self._failed:
                logger.warning("%s cannot be written: %s; a restart forgets what is spent from now on", self._path, exn)
            self._failed = True
            return
        self._written, self._failed = dict(state), False

    def close(self) -> None:
        """Idempotent."""
        fd, self._folder = self._folder, -1
        if fd >= 0:
            os.close(fd)
