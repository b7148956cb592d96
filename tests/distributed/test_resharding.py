"""`reshard`: what comes out against a model in memory, for every order and rule, and what is refused."""

from __future__ import annotations

import itertools
import math
import os
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.distributed import reshardfunctions
from tests.distributed.inline import InlineEngine
from tests.writing import in_memory
from tests.writing import read as read_bytes
from wds_async import distributed as dist
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.gathering import SAMPLE_SHARE, GatherWork, OutputRule, PlanWork, ShardNames
from wds_async.distributed.ordering import TAIL_BYTES, Ordering, sort_bytes
from wds_async.distributed.rawtar import key_of_raw, raw_sample, renamed
from wds_async.distributed.spill import ScatterWork
from wds_async.distributed.tasks import Input, Task
from wds_async.errors import (
    ConfigError,
    CorruptShard,
    DuplicateField,
    JobFailed,
    ObjectChanged,
    TruncatedShard,
    WdsError,
)
from wds_async.storage.local import file_version

FUNCTIONS = "tests.distributed.reshardfunctions"
READER = 16 << 20
Sample = dict[str, Any]
Shards = list[list[Sample]]


def write(folder: Path, shards: Shards, prefix: str = "in") -> list[str]:
    urls = []
    for number, samples in enumerate(shards):
        path = folder / f"{prefix}-{number:03d}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(in_memory(*samples, encoder=False))
        urls.append(str(path))
    return urls


def read(path: Path) -> list[Sample]:
    return [
        {name: value for name, value in sample.items() if name == "__key__" or not name.startswith("__")}
        for sample in read_bytes(path.read_bytes())
    ]


def outputs(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("*.tar") if "_wds" not in path.parts)


def contents(out: Path) -> list[Sample]:
    return [sample for path in outputs(out) for sample in read(path)]


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in outputs(out)}


def plain(samples: Iterator[Sample] | Sequence[Sample]) -> list[tuple[Any, ...]]:
    return [tuple(sorted(sample.items())) for sample in samples]


def numbered(count: int, size: int = 40, seed: int = 0, prefix: str = "s") -> list[Sample]:
    draw = random.Random(f"{prefix}{seed}")
    return [
        {"__key__": f"{prefix}{seed}-{n:04d}", "bin": draw.randbytes(draw.randrange(size)), "cls": b"%d" % n}
        for n in range(count)
    ]


def run_works(
    out: Path,
    urls: list[str],
    ordering: Ordering,
    rule: OutputRule,
    *,
    run_bytes: int = 1 << 30,
    bucket_bytes: int = 1 << 30,
    task_bytes: int = 1 << 30,
    inputs_per_task: int = 1,
    joined: Sequence[str] = (),
    how: str = "",
    template: str = "o-{shard:05d}.tar",
) -> list[Any]:
    """Run the three kinds of tasks in this process, and return the records of the last."""
    base, spill = f"{out}/", f"{out}/_wds/j/spill/"
    scatter, folder = (
        ScatterWork(ordering, spill, base, run_bytes, int(bucket_bytes * SAMPLE_SHARE), READER),
        JobFolder(f"{out}/_wds/j/scatter"),
    )
    number = 0
    for side, sources in ((1, urls), (0, joined)):
        for first in range(0, len(sources), inputs_per_task):
            inputs = tuple(Input(url, os.path.getsize(url)) for url in sources[first : first + inputs_per_task])
            assert folder.commit(scatter.run(Task(number, inputs, {"first": first, "side": side})))
            number += 1
    plan = PlanWork(folder, spill, rule, bucket_bytes, task_bytes, READER, how)
    shape = plan.run(Task(0, (), {"tasks": number})).more
    gather = GatherWork(spill, ShardNames(base + template), base, READER)
    step, count = shape["shards_per_task"], shape["shards"]
    return [
        gather.run(Task(number, (), {"first": first, "last": min(count, first + step)}))
        for number, first in enumerate(range(0, count, step))
    ]


# ------------------------------------------------------------------ headers and keys


@given(st.text("a/.ü\udc80ﬀ-", min_size=1, max_size=300).map(lambda text: f"k{text}"), st.integers(0, 2000))
@settings(max_examples=150, deadline=None)
def test_the_bytes_are_the_writers(key: str, size: int) -> None:
    key = key.replace(".", "_").rstrip("/") + "x"
    sample = {"__key__": key, "bin": bytes(size)}
    written = in_memory(sample, encoder=False, mtime=0)
    total, raw = raw_sample(sample)
    raw = raw if isinstance(raw, bytes) else b"".join(raw)
    assert len(raw) == total
    assert written == raw + bytes(1024 + -(len(raw) + 1024) % 10240)
    assert key_of_raw(raw) == key
    assert renamed(raw, "other") == raw_sample({"__key__": "other", "bin": bytes(size)})[1]


_NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
_TEXTS = st.text("\0\x01a\x7fü￿", max_size=6)


@given(st.lists(st.one_of(_NUMBERS, _TEXTS), min_size=2, max_size=8), st.data())
def test_sort_bytes_keep_the_order(values: list[Any], data: st.DataObject) -> None:
    def place(value: Any) -> tuple[Any, ...]:
        return (1, value.encode()) if isinstance(value, str) else (0, value)

    for left, right in itertools.combinations(values, 2):
        a, b = sort_bytes(left), sort_bytes(right)
        assert (a < b, a == b) == (place(left) < place(right), place(left) == place(right))
        assert a == b or not (a.startswith(b) or b.startswith(a))
        more = data.draw(st.integers(-5, 5))
        assert (sort_bytes((left, more)) < sort_bytes((right, 0))) == ((place(left), more) < (place(right), 0))


@pytest.mark.parametrize("value", [float("nan"), 2**63, "x" * 5000, None, {"a": 1}])
def test_what_has_no_order_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="sort value"):
        sort_bytes(value)


def test_every_permutation_of_a_shuffle_is_as_probable() -> None:
    seeds, size = 6000, 4
    counts = Counter[tuple[int, ...]]()
    for seed in range(seeds):
        key_of = Ordering(shuffle=seed).key_function(lambda name: None, 1)  # type: ignore[arg-type, return-value]
        keys = [key_of({"__key__": "k"}, n // 2, n % 2) for n in range(size)]
        counts[tuple(sorted(range(size), key=lambda n: keys[n]))] += 1  # type: ignore[arg-type, return-value]
    expected = seeds / math.factorial(size)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in itertools.permutations(range(size)))
    assert chi_square < 49.7  # 23 degrees of freedom, 1 in 1,000


def test_the_place_of_a_sample_does_not_depend_on_where_it_came_from(tmp_path: Path) -> None:
    urls = write(tmp_path, [[{"__key__": f"{s}{n:03d}", "bin": b""} for n in range(250)] for s in "abcd"])
    run_works(
        tmp_path / "out", urls, Ordering(shuffle=11), OutputRule(shards=8), run_bytes=100_000, bucket_bytes=90_000
    )
    chi_square = 0.0
    for path in outputs(tmp_path / "out"):
        counts = Counter(sample["__key__"][0] for sample in read(path))
        chi_square += sum((counts[letter] - 31.25) ** 2 / 31.25 for letter in "abcd")
    assert chi_square < 46.8  # 21 degrees of freedom, 1 in 1,000


# ------------------------------------------------------------------ against a model


def model(shards: Shards, ordering: Ordering, rule: OutputRule) -> dict[str, list[Sample]]:
    """What should come out, by name: everything in memory, sorted and cut."""
    key_of = ordering.key_function(_function, 1)
    entries = [
        (key, sample)
        for number, samples in enumerate(shards)
        for index, sample in enumerate(samples)
        if (key := key_of(sample, number, index)) is not None
    ]
    entries.sort(key=lambda one: one[0])
    expected = {}
    for split in sorted({split for (_, split), _ in entries}):
        chosen = [sample for (_, name), sample in entries if name == split]
        sizes = [raw_sample(sample)[0] for sample in chosen]
        cuts = rule.cuts(split, len(chosen), sum(sizes))
        places = list(itertools.accumulate(sizes, initial=0)) if rule.by_bytes else range(len(chosen) + 1)
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            inside = [sample for place, sample in zip(places, chosen, strict=False) if begin <= place < end]
            if inside or not rule.by_bytes:
                expected[f"o-{split}{number:05d}.tar"] = inside
    return expected


def _function(name: str) -> Any:
    return getattr(reshardfunctions, name.partition(":")[2])


_KEYS = st.sampled_from(["a", "b", "b-1", "c/d", "ü"])
_SAMPLES = st.lists(st.tuples(_KEYS, st.integers(0, 1500)), max_size=12)
_ORDERS = st.sampled_from(
    [Ordering(), Ordering(shuffle=3), Ordering(sort="__key__"), Ordering(sort=f"{FUNCTIONS}:by_length"),
     Ordering(shuffle=1, split=f"{FUNCTIONS}:by_parity"), Ordering(split=f"{FUNCTIONS}:by_parity")]
)  # fmt: skip
_RULES = st.one_of(
    st.builds(OutputRule, shards=st.just(1)),
    st.builds(OutputRule, maxcount=st.integers(1, 9)),
    st.builds(OutputRule, maxsize=st.integers(1000, 20_000)),
)


def distinct(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a shard with the keys that they have there."""
    seen: set[str] = set()
    found: list[Sample] = []
    for sample in samples:
        key, numbers = sample["__key__"], itertools.count(1)
        while key in seen:
            key = f"{sample['__key__']}-{next(numbers)}"
        seen.add(key)
        found.append({**sample, "__key__": key})
    return found


@given(st.lists(_SAMPLES, min_size=1, max_size=4), _ORDERS, _RULES, st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_comes_out_is_the_models(
    drawn: list[list[tuple[str, int]]], ordering: Ordering, rule: OutputRule, data: st.DataObject
) -> None:
    shards: Shards = []
    for samples in drawn:
        seen: Shards = [[]]
        for key, size in samples:
            if key in {sample["__key__"] for sample in seen[-1]}:
                seen.append([])
            seen[-1].append({"__key__": key, "bin": bytes([len(seen[-1])]) * size, "cls": b"1"})
        shards += seen
    sizes = {"run_bytes": st.integers(5000, 50_000), "bucket_bytes": st.integers(16_000, 80_000)}
    sizes |= {"task_bytes": st.integers(1, 30_000), "inputs_per_task": st.integers(1, 4)}
    drawn_sizes = {name: data.draw(one, label=name) for name, one in sizes.items()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        urls = write(Path(folder) / "in", shards)
        template = "o-{split}{shard:05d}.tar"
        records = run_works(out, urls, ordering, rule, template=template, **drawn_sizes)
        expected = model(shards, ordering, rule)
        there = {path.name: read(path) for path in outputs(out)}
        assert there.keys() == expected.keys()
        for name, samples in expected.items():
            assert plain(there[name]) == plain(distinct(samples)), name
        pairs = [pair for s in expected.values() for pair in zip(s, distinct(s), strict=True)]
        assert sum(record.more["renamed"] for record in records) == sum(a["__key__"] != b["__key__"] for a, b in pairs)
        assert sum(record.samples_out for record in records) == sum(map(len, expected.values()))
        for one in (output for record in records for output in record.outputs):
            assert (out / one.url).stat().st_size == one.bytes
            assert len(there[Path(one.url).name]) == one.samples


def joined_model(first: list[Sample], second: list[Sample], ordering: Ordering, rule: OutputRule, how: str) -> Shards:
    """What a join should give, shard by shard: the samples by key, each at the place that its shards are counted by."""
    key_of = ordering.key_function(_function, 1)
    sides = [{sample["__key__"]: sample for sample in samples} for samples in (first, second)]
    entries, place = list[tuple[int, Sample]](), 0
    for key in sorted({**sides[0], **sides[1]}, key=lambda key: key_of({"__key__": key}, 0, 0)):  # type: ignore[arg-type, return-value]
        pair = [side[key] for side in sides if key in side]
        if len(pair) == 2 or how == "outer" or (how == "left" and key in sides[0]):
            entries.append((place, {name: value for one in pair for name, value in one.items()}))
        counted = pair if how == "outer" else pair[:1] if key in sides[0] else []
        place += sum(raw_sample(one)[0] if rule.by_bytes else 1 for one in counted)
    cuts = rule.cuts("", place, place)
    shards = [[one for at, one in entries if begin <= at < end] for begin, end in itertools.pairwise(cuts)]
    return [one for one in shards if one or not rule.by_bytes]


@given(
    st.lists(st.integers(0, 30), unique=True, max_size=20), st.lists(st.integers(0, 30), unique=True, max_size=20),
    st.sampled_from(["inner", "left", "outer"]), st.sampled_from([None, 5]), _RULES, st.data(),
)  # fmt: skip
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_join_is_the_models(
    left: list[int], right: list[int], how: str, seed: int | None, rule: OutputRule, data: st.DataObject
) -> None:
    first = [{"__key__": f"k{n}", "bin": bytes(100 * n)} for n in left]
    second = [{"__key__": f"k{n}", "txt": b"%d" % n * 300} for n in right]
    sizes = {"run_bytes": st.integers(5000, 20_000), "bucket_bytes": st.integers(8000, 30_000)}
    sizes |= {"task_bytes": st.sampled_from([1, 4000, 1 << 20])}
    drawn_sizes = {name: data.draw(one, label=name) for name, one in sizes.items()}
    ordering = Ordering(shuffle=seed, join=True)
    with tempfile.TemporaryDirectory() as folder:
        urls = write(Path(folder) / "in", [first[:7], first[7:]])
        others = write(Path(folder) / "in", [second[:4], second[4:]], "other")
        records = run_works(Path(folder) / "out", urls, ordering, rule, joined=others, how=how, **drawn_sizes)
        there = [read(path) for path in outputs(Path(folder) / "out")]
    expected = joined_model(first, second, ordering, rule, how)
    assert [plain(one) for one in there] == [plain(one) for one in expected]
    assert len(list(itertools.chain(*there))) == len(
        {"inner": set(left) & set(right), "left": set(left), "outer": set(left) | set(right)}[how]
    )
    if how == "outer" and rule.maxcount is not None:
        assert all(len(one) <= rule.maxcount for one in there)
    unmatched = len(set(left) - set(right)) if how == "inner" else 0
    assert sum(record.dropped for record in records) == unmatched


@pytest.mark.parametrize("seed", [None, 3])
def test_an_outer_join_of_many_buckets_is_the_same_in_any_memory_and_tasks(tmp_path: Path, seed: int | None) -> None:
    draw = random.Random(1)
    first = [{"__key__": f"k{n:04d}", "bin": draw.randbytes(draw.randrange(900))} for n in range(0, 400)]
    second = [{"__key__": f"k{n:04d}", "txt": draw.randbytes(draw.randrange(3000))} for n in range(200, 600)]
    draw.shuffle(first)
    draw.shuffle(second)
    urls = write(tmp_path, [first[n::5] for n in range(5)])
    others = write(tmp_path, [second[n::3] for n in range(3)], "other")
    ordering, made = Ordering(shuffle=seed, join=True), dict[str, list[dict[str, bytes]]]()
    for name, rule in (("bytes", OutputRule(maxsize=40_000)), ("shards", OutputRule(shards=7))):
        for run_bytes, bucket_bytes, task_bytes in ((60_000, 40_000, 1), (200_000, 90_000, 300_000), (1 << 30,) * 3):
            out = tmp_path / f"{name}-{run_bytes}"
            sizes = {"run_bytes": run_bytes, "bucket_bytes": bucket_bytes, "task_bytes": task_bytes}
            run_works(out, urls, ordering, rule, joined=others, how="outer", **sizes)
            made.setdefault(name, []).append(files(out))
        expected = joined_model(first, second, ordering, rule, "outer")
        assert [plain(read(path)) for path in outputs(out)] == [plain(one) for one in expected]
    assert all(one == made[name][0] for name in made for one in made[name])
    assert len(made["shards"][0]) == 7
    largest = max(raw_sample(a)[0] + raw_sample(b)[0] for a, b in zip(first, second, strict=True))
    assert max(map(len, made["bytes"][0].values())) < 40_000 + largest + 10_240


def test_a_join_refuses_a_key_twice_and_a_field_of_both(tmp_path: Path) -> None:
    one = [{"__key__": "k1", "bin": b"1"}, {"__key__": "k2", "bin": b"2"}]
    urls = write(tmp_path, [one])
    ordering, rule = Ordering(join=True), OutputRule(maxcount=5)
    with pytest.raises(DuplicateField, match=r"'k1'.*both data sets have the field 'bin'"):
        run_works(tmp_path / "a", urls, ordering, rule, joined=urls, how="inner")
    twice = write(tmp_path, [[{"__key__": "k1", "txt": b""}], [{"__key__": "k1", "txt": b""}]], "twice")
    with pytest.raises(CorruptShard, match="join: the key 'k1' is there twice"):
        run_works(tmp_path / "b", urls, ordering, rule, joined=twice, how="inner")
    others = write(tmp_path, [[{"__key__": "k1", "bin": b""}], [{"__key__": "k1", "bin": b""}]], "others")
    with pytest.raises(CorruptShard, match="inputs: the key 'k1' is there twice"):
        run_works(tmp_path / "c", others, ordering, rule, joined=twice[:1], how="inner")


@pytest.mark.parametrize("how", ["inner", "left", "outer"])
@pytest.mark.parametrize("side", ["inputs", "join"])
def test_a_join_finds_a_key_twice_where_a_shard_begins(tmp_path: Path, how: str, side: str) -> None:
    once = write(tmp_path, [[{"__key__": f"k{n}", "bin": b""} for n in range(4)]], "once")
    twice = write(tmp_path, [[{"__key__": f"k{n}", "txt": b""} for n in (0, 1, 2, 3)], [{"__key__": "k1", "txt": b""}]])
    urls, others = (twice, once) if side == "inputs" else (once, twice)
    for maxcount in (1, 2, 3):
        rule, out = OutputRule(maxcount=maxcount), tmp_path / f"{maxcount}"
        with pytest.raises(CorruptShard, match=f"{side}: the key 'k1' is there twice"):
            run_works(out, urls, Ordering(join=True), rule, joined=others, how=how, task_bytes=1)


# ------------------------------------------------------------------ jobs


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    write(tmp_path / "in", [numbered(60, seed=seed) for seed in range(5)])
    return f"{tmp_path}/in/in-{{000..004}}.tar"


def test_splits_have_shards_of_their_own(inputs: str, tmp_path: Path) -> None:
    split = reshardfunctions.by_parity
    job = dist.reshard(
        inputs, f"{tmp_path}/out/{{split}}/o-{{0001..}}.tar", split=split, maxcount=50, engine=InlineEngine()
    )
    summary = job.run()
    empty = sum(not sample["bin"] for number in range(5) for sample in read(tmp_path / f"in/in-{number:03d}.tar"))
    assert (summary.dropped, summary.samples_out) == (empty, 300 - empty)
    for split_name, rest in (("even", 0), ("odd", 1)):
        paths = outputs(tmp_path / "out" / split_name)
        assert [path.name for path in paths] == [f"o-{n:04d}.tar" for n in range(1, len(paths) + 1)]
        samples = contents(tmp_path / "out" / split_name)
        assert {len(sample["bin"]) % 2 for sample in samples} == {rest}
        assert [sample["__key__"] for sample in samples] == sorted(sample["__key__"] for sample in samples)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sort": "broken"}, "in-000.tar at byte 0, sample 's0-0000': KeyError: 'caption'"),
        ({"sort": "unordered"}, "in-000.tar at byte 0, sample 's0-0000': a sort value is NaN"),
        ({"split": "not_a_name"}, "in-000.tar at byte 0, sample 's0-0000': split gives None, or the name"),
    ],
)
def test_a_function_that_fails_is_named_with_its_sample(
    inputs: str, tmp_path: Path, arguments: dict[str, str], words: str
) -> None:
    ((name, function),) = arguments.items()
    output = f"{tmp_path}/out/{'{split}' if name == 'split' else ''}o-{{000..}}.tar"
    job = dist.reshard(inputs, output, **{name: f"{FUNCTIONS}:{function}"}, engine=InlineEngine())  # type: ignore[arg-type]
    with pytest.raises(JobFailed) as caught:
        job.run()
    assert words in str(caught.value)
    assert not outputs(tmp_path / "out")


@pytest.mark.parametrize("fields", [{"bin": bytes(20_000)}, {f"f{n}": bytes(5000) for n in range(3)}])
def test_a_sample_that_does_not_fit_names_the_option(fields: dict[str, bytes], tmp_path: Path) -> None:
    urls = write(tmp_path, [[{"__key__": "k", **fields}]])
    with pytest.raises(ConfigError, match=r"in-000.tar.*'k.*memory= a sample has at most 9,000"):
        run_works(tmp_path / "a", urls, Ordering(), OutputRule(maxcount=1), bucket_bytes=10_000)


def test_samples_of_almost_a_bucket(tmp_path: Path) -> None:
    draw = random.Random(3)
    sizes = [draw.choice([10, 3000, 30_000, 88_000]) for _ in range(60)]
    urls = write(tmp_path, [[{"__key__": f"{n:03d}", "bin": bytes(size)} for n, size in enumerate(sizes)]])
    run_works(
        tmp_path / "o", urls, Ordering(shuffle=1), OutputRule(maxcount=7), run_bytes=200_000, bucket_bytes=100_000
    )
    there = contents(tmp_path / "o")
    assert sorted((one["__key__"], len(one["bin"])) for one in there) == [
        (f"{n:03d}", one) for n, one in enumerate(sizes)
    ]


def test_samples_of_one_key_that_do_not_fit_together(tmp_path: Path) -> None:
    left = write(tmp_path, [[{"__key__": "k", "bin": bytes(80_000)}, {"__key__": "l", "bin": b""}]])
    right = write(tmp_path, [[{"__key__": "k", "txt": bytes(80_000)}]], "other")
    with pytest.raises(ConfigError, match=r"a part of the sequence takes .* give more memory="):
        run_works(
            tmp_path / "o", left, Ordering(join=True), OutputRule(maxcount=1), joined=right, how="inner",
            bucket_bytes=100_000,
        )  # fmt: skip


def test_nothing_is_left_by_a_split_that_drops_everything(inputs: str, tmp_path: Path) -> None:
    job = dist.reshard(
        inputs, f"{tmp_path}/out/{{split}}-{{0..}}.tar", split=reshardfunctions.none, engine=InlineEngine()
    )
    assert (summary := job.run()).samples_in == summary.dropped == 300
    assert job.status().complete
    assert not outputs(tmp_path / "out")


def test_too_many_small_ranges_name_the_option(tmp_path: Path) -> None:
    urls = write(tmp_path, [numbered(100, seed=seed) for seed in range(3)])
    with pytest.raises(ConfigError, match=r"small ranges.*memory="):
        run_works(tmp_path / "o", urls, Ordering(), OutputRule(maxcount=1), run_bytes=4000, bucket_bytes=3000)


def test_too_little_memory_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    with path.open("wb") as file:
        file.truncate(5 << 40)  # without a block on the disk
    with pytest.raises(ConfigError, match=r"small ranges.* times as much memory="):
        dist.reshard(str(path), f"{tmp_path}/out/o-{{000..}}.tar", shuffle=1)
    assert not (tmp_path / "out").exists()


def test_more_shards_than_samples(inputs: str, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="300 samples cannot fill 400 shards"):
        dist.reshard(inputs, f"{tmp_path}/out/o-{{000..399}}.tar", engine=InlineEngine()).run()


@pytest.mark.parametrize(
    ("output", "arguments", "words"),
    [
        ("o-{x}.tar", {}, "it has one number"),
        ("o-{000..009}-{0..1}.tar", {}, "it has one number"),
        ("o-{task}-{000..}.tar", {}, "it has one number"),
        ("o-{009..001}.tar", {}, "it has one number"),
        ("{split}/o-{000..}.tar", {}, "with split=, and only then"),
        ("o-{000..}.tar", {"split": f"{FUNCTIONS}:by_parity"}, "with split=, and only then"),
        ("o-{000..009}.tar", {"maxcount": 4}, r"shards=10, maxcount=4 \(output names 10\): give one of them"),
        ("o-{000..009}.tar", {"shards": 4}, r"shards=4 \(output names 10\): give one of them"),
        ("o-{000..}.tar", {"maxcount": 4, "maxsize": "5M"}, "give one of them"),
        ("o-{000..}.tar", {"maxcount": 0}, "maxcount"),
        ("o-{000..}.tar", {"shuffle": 1, "sort": "__key__"}, "two orders"),
        ("o-{000..}.tar", {"shuffle": True}, "it is a seed"),
        ("o-{000..}.tar", {"sort": lambda sample: 1}, "lambda"),
        ("o-{000..}.tar", {"memory": "100M"}, "at least 256 MiB"),
        ("o-{000..}.tar", {"how": "right"}, "'inner', 'left' or 'outer'"),
        ("o-{000..}.tar", {"on_corrupt": "ignore"}, "on_corrupt"),
        ("o-{000..}.tar", {"join": "INPUTS", "sort": f"{FUNCTIONS}:by_length"}, "join= brings"),
        ("o-{000..}.tar", {"engine": "cloud"}, "engine"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    inputs: str, tmp_path: Path, output: str, arguments: dict[str, Any], words: str
) -> None:
    given_arguments = {name: inputs if value == "INPUTS" else value for name, value in arguments.items()}
    with pytest.raises(WdsError, match=words):
        dist.reshard(inputs, f"{tmp_path}/out/{output}", **given_arguments).run()
    assert not (tmp_path / "out").exists()


def test_compressed_shards_in_and_out(tmp_path: Path) -> None:
    samples = numbered(50)
    for suffix in ("gz", "zst"):
        with wds.TarWriter(str(tmp_path / f"in/a.tar.{suffix}"), encoder=False) as sink:
            for sample in samples:
                sink.write({**sample, "__key__": f"{suffix}{sample['__key__']}"})
    urls = [str(tmp_path / f"in/a.tar.{suffix}") for suffix in ("gz", "zst")]
    dist.reshard(urls, f"{tmp_path}/out/o-{{000..001}}.tar.zst", shuffle=1, engine=InlineEngine()).run()
    there = [sample for n in range(2) for sample in read(tmp_path / f"out/o-{n:03d}.tar.zst")]
    assert len(there) == 100
    assert {sample["__key__"][0] for sample in there[:50]} == {"g", "z"}


def test_a_replaced_input_is_an_error(tmp_path: Path) -> None:
    url = write(tmp_path, [numbered(5)])[0]
    before = Input(url, os.path.getsize(url), file_version(os.stat(url)))
    work = ScatterWork(Ordering(), f"{tmp_path}/s/", f"{tmp_path}/", 1 << 30, 1 << 30, READER)
    assert work.run(Task(0, (before,), {"first": 0, "side": 1})).samples_in == 5
    write(tmp_path, [numbered(50)])
    with pytest.raises(ObjectChanged, match=r"in-000.tar"):
        work.run(Task(1, (before,), {"first": 0, "side": 1}))
    assert [path.name for path in tmp_path.glob("s/*")] == ["00000.spill"]


def test_a_damaged_shard_ends_the_task_or_is_passed_over(tmp_path: Path) -> None:
    url = Path(write(tmp_path, [numbered(20)])[0])
    url.write_bytes(url.read_bytes()[:20_000])
    task = Task(0, (Input(str(url)),), {"first": 0, "side": 1})
    work = ScatterWork(Ordering(), f"{tmp_path}/s/", f"{tmp_path}/", 1 << 30, 1 << 30, READER)
    with pytest.raises(TruncatedShard, match=r"in-000.tar"):
        work.run(task)
    assert not list(tmp_path.glob("s/*"))
    record = ScatterWork(Ordering(), f"{tmp_path}/s/", f"{tmp_path}/", 1 << 30, 1 << 30, READER, "skip_shard").run(task)
    assert record.skipped
    assert "time" not in record.skipped[0]
    assert 0 < record.samples_out < 20


def test_keys_of_the_tail_are_as_long_as_the_join_expects() -> None:
    key_of = Ordering(shuffle=1, join=True).key_function(lambda name: None, 0)  # type: ignore[arg-type, return-value]
    made = key_of({"__key__": "k"}, 7, 9)
    assert made is not None
    assert made[0][-TAIL_BYTES:] == struct.pack(">BII", 0, 7, 9)
