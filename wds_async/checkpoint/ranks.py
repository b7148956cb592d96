"""The state of all ranks in the checkpoint of one: trainers write what the first rank returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from wds_async import packages
from wds_async.checkpoint.merge import merge_states

__all__ = ["AllRanks"]


class AllRanks:
    """``loader`` (a `WebLoader` or dataset) with the state of all ranks, for checkpoints that one rank writes and all
    read: those of Lightning, Accelerate, the Hugging Face Trainer, torch.distributed.checkpoint and torchtitan.

    Everything else is the loader's, with one exception for trainers, which ask for the next epoch after a checkpoint at
    an epoch's end: where nothing is left of the epoch whose state was loaded, the first iteration is the next epoch.
    Without a torch.distributed process group there is one rank.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._goes_on = False
        """Whether the next iteration is the rest of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        return self._rest() if self._goes_on else iter(self.loader)

    def _rest(self) -> Iterator[Any]:
        """Yield what is left of the epoch whose state was loaded, or where nothing is, the next epoch."""
        self._goes_on, over = False, True
        for item in self.loader:
            over = False
            yield item
        if over:
            yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks as one (see `merge_states`). Every rank calls it, at the same step: the states
        are gathered by one collective.

        Those of the ranks are one text in it: torch.distributed.checkpoint makes an entry of each value in nested
        dicts, and looks for the entries of the state that the loader has when it is loaded, which is another one.
        """
        merged = merge_states(_gathered(self.loader.state_dict()))
        return {**merged, "merged": json.dumps(merged["merged"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` on this rank: where it was, if there are as many ranks and workers as then, otherwise
        with its share of what is left."""
        self.loader.load_state_dict(state)
        self._goes_on = True


def _gathered(state: dict[str, Any]) -> list[dict[str, Any]]:
    dist = packages.loaded("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states
