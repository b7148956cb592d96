"""`WebLoader(device=…)`: batches on a device, copied ahead, with the order, errors and states of others."""

from __future__ import annotations

import mmap
import types
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.pipelines import dataset, shown, taken, urls_in
from wds_async import shared_batches
from wds_async.fluid import FluidWrapper
from wds_async.loader import WebLoader
from wds_async.to_device import PinnedMemory

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=cuda)]
WORKERS = [{"num_workers": 0}, {"threads": 2}, {"num_workers": 2}]
Pair = namedtuple("Pair", "first second")


def nested(n: int) -> Any:
    large = torch.full((40_000,), n)
    return {"a": [large, b"x" * 70_000, "text"], "b": Pair(large + 1, (large + 2, None)), "c": {"d": torch.tensor(n)}}


@pytest.mark.parametrize("kw", WORKERS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_on_the_device_and_the_rest_stays(device: str, kw: dict[str, int]) -> None:
    batches = list(WebLoader(FluidWrapper(range(40)).map(nested), batch_size=None, device=device, **kw))
    assert len(batches) == 40 * max(1, kw.get("num_workers", 0))
    for number, batch in enumerate(batches):
        first, data, text = batch["a"]
        tensors = [first, batch["b"].first, batch["b"].second[0], batch["c"]["d"]]
        assert {tensor.device.type for tensor in tensors} == {device}
        assert (data, text, batch["b"].second[1], type(batch["b"])) == (b"x" * 70_000, "text", None, Pair)
        if device != "meta":
            n = number // max(1, kw.get("num_workers", 0))
            assert [set(tensor.tolist()) for tensor in tensors[:3]] == [{n}, {n + 1}, {n + 2}]
            assert tensors[3].item() == n


@pytest.mark.parametrize("kw", WORKERS, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_states_are_of_the_batches_that_came(device: str, kw: dict[str, int], tmp_path: Any) -> None:
    urls = urls_in(tmp_path / "shards")

    def loader() -> WebLoader:
        numbers = dataset(urls).shuffle(5, seed=1).map(lambda sample: torch.tensor(int(sample["cls"])))
        return WebLoader(numbers.batched(2, collation_fn=torch.stack), batch_size=None, device=device, **kw)

    first = loader()
    taken(iterator := iter(first), 3)
    state, rest = first.state_dict(), shown(iterator)
    again = loader()
    again.load_state_dict(state)
    assert shown(again) == rest


@pytest.mark.parametrize("kw", WORKERS, ids=str)
def test_an_error_comes_behind_the_batches_before_it(kw: dict[str, int]) -> None:
    def fails_at_3(source: Iterator[int]) -> Iterator[int]:
        for n in source:
            if n == 3:
                raise ZeroDivisionError(n)
            yield n

    each = max(1, kw.get("num_workers", 0))
    items = iter(WebLoader(FluidWrapper(range(9)).compose(fails_at_3), batch_size=None, device="cpu", **kw))
    assert [next(items) for _ in range(3 * each)] == [n for n in range(3) for _ in range(each)]
    with pytest.raises(ZeroDivisionError):
        next(items)


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_pinned_once_and_as_long_as_it_is_mapped(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a double of CUDA's runtime, for there is no GPU in the machines that test."""
    pinned: dict[int, int] = {}
    calls: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(address)
        return 2 if refused else (pinned.update({address: size}) or 0)

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(shared_batches, "_pin", lambda memory: PinnedMemory(memory, cudart))
    batches: Any = WebLoader(FluidWrapper(range(30)).map(nested), batch_size=None, num_workers=1)
    held = []
    for batch in batches:
        first = batch["a"][0]
        assert refused or any(start <= first.data_ptr() < start + size for start, size in pinned.items())
        held.append(first)
        del held[:-2], batch, first
    assert 1 <= len(calls) <= 8
    del batches
    shared_batches.sweep()
    assert refused or len(pinned) >= 1  # of the batches that are held
    held.clear()
    assert not pinned
    memory = PinnedMemory(mmap.mmap(-1, 4096), cudart)
    assert memory.is_pinned is not refused
    assert np.frombuffer(memory._memory, np.uint8).nbytes == 4096
