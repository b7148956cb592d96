"""The window as a state machine: hypothesis chooses every move of two readers of one pool, and shortens what fails."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.transfer.test_window import Reader, configs, plans, run
from wds_async.transfer.slabs import SlabPool

_READERS = 2
WHICH = st.integers(0, _READERS - 1)


class Windows(RuleBasedStateMachine):
    """Two readers. `Reader` itself compares every byte and the order of what comes."""

    @initialize(
        config=configs, first=st.lists(plans, max_size=6), second=st.lists(plans, max_size=6), seed=st.integers(0, 99)
    )
    def begin(self, config, first, second, seed) -> None:  # type: ignore[no-untyped-def]
        self.rng = random.Random(seed)
        self.now = 0.0
        self.pool = SlabPool(config.budget_bytes, config.part_bytes)
        self.readers = [
            Reader(self.pool, config, mine, self.rng, rough=bool(mine and seed % 2)) for mine in (first, second)
        ]
        self.closed: set[int] = set()

    def _open(self, which: int) -> Reader | None:
        return None if which in self.closed else self.readers[which]

    @rule(which=WHICH)
    def add(self, which: int) -> None:
        if reader := self._open(which):
            reader.add()
            reader.settle()

    @rule(which=WHICH, choice=st.integers(0, 1 << 16))
    def answer(self, which: int, choice: int) -> None:
        reader = self.readers[which]
        reader.rng = random.Random(choice)
        reader.answer()
        if which not in self.closed:
            reader.settle()

    @rule(which=WHICH)
    def consume(self, which: int) -> None:
        if reader := self._open(which):
            reader.consume()
            reader.settle()

    @rule(which=WHICH, bytes_=st.integers(1, 1 << 20), took_s=st.floats(1e-4, 10), refused=st.booleans())
    def learn_the_pace(self, which: int, bytes_: int, took_s: float, refused: bool) -> None:
        self.now += took_s
        concurrency = self.readers[which].window.concurrency
        concurrency.observe(bytes_, took_s, self.now)
        if refused:
            concurrency.throttled(self.now)
        assert 1 <= concurrency.limit <= concurrency.most

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        if reader := self._open(which):
            reader.window.close()
            self.closed.add(which)
            reader.holds = None
            self.pool.readers -= 1

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def memory_is_bounded(self) -> None:
        most = self.pool.budget_bytes + max(0, self.pool.readers - 1) * self.pool.block_bytes
        assert self.pool.mapped_bytes <= self.pool.budget_bytes + _READERS * self.pool.block_bytes
        assert self.pool.used_bytes <= max(most, self.pool.used_bytes if self.closed else 0)
        for reader in self.readers:
            assert reader.window.flying == len(reader.flying)

    def teardown(self) -> None:
        """Whatever was done before, the readers that are left come to their end, and all memory comes back."""
        if not hasattr(self, "pool"):
            return
        left = [reader for which, reader in enumerate(self.readers) if which not in self.closed]
        for which in self.closed:
            while self.readers[which].flying:
                self.readers[which].answer()
        if left:
            run(left, self.rng)
        for reader in left:
            while reader.flying:
                reader.answer()
            reader.window.close()
        assert self.pool.used_bytes == 0


Windows.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestWindows = Windows.TestCase
