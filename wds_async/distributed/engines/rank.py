"""Engine of plain ranks: each runs its share of the tasks on its own machine; the records are all that they share.

For an Indexed Job of Kubernetes, a JobSet, a Slurm array or step, or ``torchrun``: whatever starts the same program
several times and numbers it. Ranks do not talk to each other, and may start and end at different times.
"""

from __future__ import annotations

from wds_async import config, world
from wds_async.distributed.engines.local import LocalEngine
from wds_async.environment import value
from wds_async.errors import ConfigError

__all__ = ["RankEngine", "rank_here"]


def rank_here() -> tuple[int, int]:
    """Return rank and number of ranks: those of `world.place`, or ``JOB_COMPLETION_INDEX`` of ``WORLD_SIZE``.
    ConfigError where the number is set and the rank is not: each would run everything."""
    indexed = config.place_from_env("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    here = world.place()
    if here.world_size == 1 and indexed is not None:
        return indexed
    if here.world_size == 1 and (count := value("WORLD_SIZE") or 1) > 1 and value("RANK") is None:
        raise ConfigError(f"engine='rank': WORLD_SIZE={count} without RANK or JOB_COMPLETION_INDEX: which one is this?")
    return here.rank, here.world_size


class RankEngine(LocalEngine):
    """Processes of this rank's machine, for each ``world_size``-th task from number ``rank`` on. Both default to what
    the environment says (`rank_here`); for ``workers`` and ``cpus`` see `LocalEngine`, where ranks of one host
    (``LOCAL_WORLD_SIZE``) share its CPUs. ConfigError for a rank that there is not."""

    name = "rank"

    def __init__(
        self,
        workers: int | None = None,
        cpus: float = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ConfigError(f"engine='rank': rank={rank}, world_size={world_size}: give both or none")
        self.rank, self.world_size = rank_here() if rank is None or world_size is None else (rank, world_size)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"engine='rank': rank={self.rank} of world_size={self.world_size}")
        super().__init__(workers, cpus, ranks_of_host=value("LOCAL_WORLD_SIZE") or 1)

    def is_mine(self, number: int) -> bool:
        """Return whether this rank runs task ``number``."""
        return number % self.world_size == self.rank

    @property
    def leads(self) -> bool:
        """True if this is the rank that drops the records of another job, where that is asked for."""
        return self.rank == 0
