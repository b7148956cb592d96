"""Feeds of processes on one machine: their order, their ends, their states, and errors in place of waiting."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed import feeds
from tests.distributed.feeds import by_ranks, expected, keys
from wds_async import distributed as dist
from wds_async import shared_batches
from wds_async.errors import ConfigError, ReaderClosed, StateError

ROOT = Path(__file__).parents[2]
EVERY_KEY = sorted(f"{shard:03d}-{n:03d}" for shard in range(5) for n in range(20))


@pytest.fixture(scope="module", autouse=True)
def _shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(feeds.SHARDS, feeds.write_shards(tmp_path_factory.mktemp("feed"), 5, 20))
        yield


def merged(ranks: list[list[list[str]]]) -> list[list[str]]:
    """The batches of all ranks by their numbers."""
    steps = itertools.zip_longest(*ranks)
    return [batch for step in steps for batch in step if batch is not None]


def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("equal", ["drop", None])
def test_the_order_depends_on_the_number_of_decoders_alone(equal: str | None) -> None:
    with dist.Feed(feeds.plain, decoders=3, equal=equal) as feed:  # of 2, 2 and 1 shards
        got = by_ranks(feed, 2, epochs=2)
    for epoch, wanted in enumerate(expected(feeds.plain, 3, epochs=2)):
        assert sorted(key for batch in wanted for key in batch) == EVERY_KEY
        assert len(wanted) == 25
        assert merged([rank[epoch] for rank in got]) == (wanted[:24] if equal else wanted)


def test_arrays_come_in_shared_memory_and_are_the_programs_own() -> None:
    with dist.Feed(feeds.images, decoders=2, ahead="1M") as feed:
        held = list(feed.loader(0, 1))
        assert shared_batches._mapped or not shared_batches.possible()
    for names, arrays in held:
        for key, image in zip(names, arrays, strict=True):
            assert (image == int(key[4:])).all()
        arrays[0][:] = 0  # it can be written to
    assert keys(held) == expected(feeds.images, 2)[0]


def test_a_pipeline_may_have_workers_of_its_own() -> None:
    pytest.importorskip("torch")
    with dist.Feed(feeds.workers, decoders=1) as feed:
        assert sorted(key for batch in keys(feed.loader(0, 1)) for key in batch) == EVERY_KEY


def test_a_state_goes_on_with_the_next_batch_also_with_other_ranks_and_another_feed() -> None:
    wanted = expected(feeds.plain, 2, epochs=2)
    with dist.Feed(feeds.plain, decoders=2) as feed:
        loader = feed.loader(0, 1)
        beginning = json.loads(json.dumps(loader.state_dict()))
        iterator = iter(loader)
        first = [next(iterator)[0] for _ in range(7)]
        state = json.loads(json.dumps(loader.state_dict()))
        assert first + keys(loader) == wanted[0]  # an iteration that was left goes on
        behind = json.loads(json.dumps(loader.state_dict()))
        assert merged([rank[0] for rank in by_ranks(feed, 3, states=state)]) == wanted[0][7:25]
    with dist.Feed(feeds.plain, decoders=2) as feed:
        for place, rest in ((state, [wanted[0][7:], wanted[1]]), (behind, wanted[1:]), (beginning, wanted)):
            loader = feed.loader(0, 1)
            loader.load_state_dict(place)
            assert [keys(loader) for _ in rest] == rest
            loader.close()
    with dist.Feed(feeds.plain, decoders=3) as feed:
        rest = by_ranks(feed, 1, states=state)[0][0]
        assert sorted(key for batch in first + rest for key in batch) == EVERY_KEY
    with pytest.raises(StateError, match="no state of a feed"):
        loader.load_state_dict({"version": 1})


def test_another_number_of_decoders_while_batches_are_taken() -> None:
    with dist.Feed(feeds.slow, decoders=1) as feed:
        loader = feed.loader(0, 1)
        got = []
        for number, batch in enumerate(loader):
            got += batch[0]
            if number in (2, 8):
                feed.resize(3 if number == 2 else 2)
        assert sorted(got) == EVERY_KEY
        assert sorted(key for batch in keys(loader) for key in batch) == EVERY_KEY
        until(lambda: len(feed._engine.pids()) == 2)  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="at least one"):
            feed.resize(0)


def test_a_feed_grows_where_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.distributed.feed.coordinator._GROWS_AFTER_S", 0.2)
    with dist.Feed(feeds.slow, decoders=(1, 2)) as feed:
        loader = feed.loader(0, 1)
        got = [sorted(key for batch in keys(loader) for key in batch) for _ in range(3)]
        assert got == [EVERY_KEY] * 3
        assert len(feed._engine.pids()) == 2  # type: ignore[union-attr]


def test_ranks_are_bounded_by_the_bytes_ahead() -> None:
    with dist.Feed(feeds.images, decoders=1, ahead="1M") as feed:  # 4 batches
        loader = feed.loader(0, 1)
        next(iter(loader))
        decoder = feed._engine.pids()[0]  # type: ignore[union-attr]
        time.sleep(1)  # for what it makes in vain
        state = feed._link.ask("exchange", loader._report(loader._batches))  # type: ignore[arg-type]
        assert 2 <= state.generations[0].numbering.made[0] <= 8
        assert decoder == feed._engine.pids()[0]  # type: ignore[union-attr]
        assert len(keys(loader)) == 24


# ------------------------------------------------------------------ errors, and nothing that hangs


def test_an_error_of_the_pipeline_names_the_shard_and_the_sample() -> None:
    with dist.Feed(feeds.broken, decoders=2) as feed:
        with pytest.raises(dist.FeedError, match=r"this one never works.*003-007.*t-003\.tar") as caught:
            list(feed.loader(0, 1))
        assert "of 2 (tests.distributed.feeds:broken)" in str(caught.value)


def test_decoders_that_end_again_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.distributed.feed.coordinator._MOST_DEATHS", 2)
    with (
        dist.Feed(feeds.fatal, decoders=1) as feed,
        pytest.raises(dist.FeedError, match=r"decoder 0 was killed by SIGKILL .*want of memory"),
    ):
        list(feed.loader(0, 1))


def test_what_is_no_pipeline_is_refused() -> None:
    for name, error in (
        (lambda: None, "lambda"),
        ("tests.distributed.feeds:missing", "missing"),
        ("feeds", "package.module:function"),
    ):
        with pytest.raises(ConfigError, match=error):
            dist.Feed(name)
    for wrong in ({"decoders": 0}, {"decoders": (2, 1)}, {"equal": "pad"}, {"ahead": "many"}, {"engine": "dask"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            dist.Feed(feeds.plain, **wrong)  # type: ignore[arg-type]
    with dist.Feed(feeds.not_a_pipeline) as feed, pytest.raises(dist.FeedError, match="which has no state"):
        list(feed.loader(0, 1))


def wait_for_decoders(feed: dist.Feed, count: int) -> None:
    """Wait until they have started: how long that takes depends on what else the machine does."""
    heard = feed._engine._coordinator._heard_at  # type: ignore[union-attr]
    until(lambda: len(heard) == count)


def test_a_rank_that_never_comes_is_an_error_for_those_that_wait() -> None:
    with dist.Feed(feeds.plain, decoders=1, silence_s=2, ahead=0) as feed:
        wait_for_decoders(feed, 1)
        with pytest.raises(dist.FeedError, match="rank 1 was not heard of for 2 s"):
            list(feed.loader(0, 2))


def test_a_decoder_that_is_stopped_is_an_error() -> None:
    with dist.Feed(feeds.plain, decoders=2, silence_s=2) as feed:
        wait_for_decoders(feed, 2)
        loader = feed.loader(0, 1)
        next(iter(loader))
        pid = feed._engine.pids()[1]  # type: ignore[union-attr]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(dist.FeedError, match="decoder 1 was not heard of for 2 s"):
                all(keys(loader) for _ in range(100))
        finally:
            os.kill(pid, signal.SIGCONT)


def test_ranks_that_begin_at_different_places_are_refused_and_a_rank_that_begins_anew_ends_the_others() -> None:
    with dist.Feed(feeds.plain, decoders=1, ahead=0) as feed:
        one, other = feed.loader(0, 2), feed.loader(1, 2)
        began = next(iter(one))
        assert began[0]
        state = one.state_dict()
        other.load_state_dict({**state, "next": 2})
        with pytest.raises(ConfigError, match="load states of the same step on all ranks"):
            next(iter(other))
        again = feed.loader(0, 2)
        assert next(iter(again))[0] == began[0]
        with pytest.raises(dist.FeedError, match="another session has begun"):
            list(one)


def test_the_end_of_the_program_that_made_the_feed_ends_decoders_and_is_an_error_for_trainers(tmp_path: Path) -> None:
    program = (
        "import pickle, sys, time; from tests.distributed import feeds; from wds_async import distributed as dist;"
        "feed = dist.Feed(feeds.slow, decoders=2); sys.stdout.buffer.write(pickle.dumps((feed, feed._engine.pids())));"
        "sys.stdout.flush(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as driver:
        try:
            assert driver.stdout is not None
            feed, pids = pickle.load(driver.stdout)  # not up to its end: decoders have it too
            iterator = iter(feed.loader(0, 1))
            next(iterator)
        finally:
            driver.kill()
        with pytest.raises(dist.FeedError, match="the process that made the feed has ended"):
            list(iterator)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)


def test_a_program_without_a_main_guard_that_does_not_close_its_feed_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from wds_async import distributed as dist\n"
        "feed = dist.Feed('tests.distributed.feeds:plain', decoders=2)\n"
        "print(sum(1 for _ in feed.loader()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("25\n", 0), done.stderr


def test_a_fork_of_the_program_does_not_end_the_feed() -> None:
    with dist.Feed(feeds.plain) as feed:
        if (child := os.fork()) == 0:
            feed.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(keys(feed.loader(0, 1))) == 25


def test_threads_of_a_closed_loader_end() -> None:
    with dist.Feed(feeds.plain) as feed:
        loader = feed.loader(0, 1)
        next(iter(loader))
        loader.close()
        with pytest.raises(ReaderClosed, match="closed"):
            next(iter(loader))
        until(lambda: not any(thread.name in ("feed-horizon", "feed-0") for thread in threading.enumerate()))
    with pytest.raises(dist.FeedError, match="this feed was closed"):
        next(iter(feed.loader(0, 1)))
