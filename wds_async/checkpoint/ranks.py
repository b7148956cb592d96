"""The state of all ranks in the checkpoint of one: trainers write what the first rank returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from wds_async import packages
from wds_async.checkpoint.merge import merge_states

__all__ = ["AllRanks"]


class AllRanks:
    """``loader`` (a `WebLoader` or dataset) with the state of all ranks, for trainers that save the state of one rank
    and load it on all: Lightning, Accelerate, the Hugging Face Trainer, torch.distributed.checkpoint and torchtitan.

    All other attributes are those of ``loader``. One thing differs: trainers request the next epoch after loading a
    checkpoint that was saved at the end of an epoch. So if nothing is left of the loaded epoch, the first iteration is
    the next epoch. Without a torch.distributed process group there is one rank.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._goes_on = False
        """True if the next iteration is the rest of an epoch."""

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
        """Return the states of all ranks as one (see `merge_states`). It is a collective call: every rank makes it, at
        the same step.

        The states of the ranks are one string in it. torch.distributed.checkpoint makes an entry of each value in
        nested dicts and, when it loads, looks for the entries of the loader's state at that time, which has others.
        """
        merged = merge_states(_gathered(self.loader.state_dict()))
        return {**merged, "merged": json.dumps(merged["merged"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` on this rank: at its own position if there are as many ranks and workers as when it
        was saved, otherwise with its share of the rest.
        """
        self.loader.load_state_dict(state)
        self._goes_on = True


def _gathered(state: dict[str, Any]) -> list[dict[str, Any]]:
    dist = packages.loaded("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    # Processes that read the same data (WDS_RANK) have one state.
    return list({tuple(state["place"]): state for state in reversed(states)}.values())
