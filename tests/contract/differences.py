"""Where wds_async deliberately differs from webdataset 1.0.2: both behaviours, the reason, the test that holds ours.

Data, so that the documentation can print it; `test_differences` checks that every named test exists.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIFFERENCES", "Difference"]


@dataclass(frozen=True)
class Difference:
    """One deliberate difference; ``test`` is ``path::function`` below ``tests/``."""

    subject: str
    webdataset: str
    ours: str
    reason: str
    test: str


DIFFERENCES = (
    Difference(
        "shard shuffle and splitting",
        "shards are split first, then each worker shuffles its own",
        "the whole list is shuffled first, by seed and epoch alone, then each rank and worker takes its share",
        "a worker would meet the same shards in every epoch",
        "test_dataset.py::test_all_ranks_and_workers_share_one_order",
    ),
    Difference(
        "shard order of an epoch",
        "shardshuffle gives the same order in every epoch, and detshuffle starts again with new workers",
        "every epoch has its own order, counted in memory that workers share; set_epoch sets it",
        "epochs that repeat an order are not shuffled",
        "test_loader.py::test_epochs_are_complete_and_each_has_its_order",
    ),
    Difference(
        "seed",
        "random unless WDS_SEED, which stays text and makes detshuffle raise TypeError",
        "argument, else WDS_SEED as an integer, else 0",
        "ranks must agree on the order without talking to each other",
        "test_dataset.py::test_seed_and_epoch_from_the_environment",
    ),
    Difference(
        "nodesplitter",
        "single_node_only: several ranks raise, resampled datasets too",
        "split_by_node by default, nothing where shards are resampled; single_node_only on request",
        "splitting by rank is what nearly everybody must add",
        "test_dataset.py::test_node_splitters",
    ),
    Difference(
        "resampled with a seed",
        "the seed is ignored",
        "draws follow from seed, rank, worker and epoch",
        "a seed that does nothing is a fault",
        "test_dataset.py::test_resampled",
    ),
    Difference(
        "WebDataset(repeat=True)",
        "ignored",
        "repeats without end, or as many times as the number given",
        "an argument does what its name says",
        "test_dataset.py::test_repeat",
    ),
    Difference(
        "shardshuffle=None",
        "warns, does not shuffle",
        "does not shuffle",
        "the default should not warn; True silently means 100",
        "test_dataset.py::test_no_shard_shuffle",
    ),
    Difference(
        "lists of URLs, paths, empty lists",
        "braces in lists are not expanded, pathlib paths are refused, [] is an IndexError",
        "braces are expanded, paths are taken, [] is a UrlError",
        "a list of patterns is what people write",
        "test_shardlists.py::test_simple_list",
    ),
    Difference(
        "len() and with_length",
        "with_length swaps the object's class, which cannot be pickled, and warns",
        "__len__ raises TypeError until with_length; the object stays what it is",
        "spawned workers need to pickle it",
        "test_pipeline.py::test_length",
    ),
    Difference(
        "iterating after close()",
        "AttributeError",
        "ReaderClosed that says what happened",
        "close() keeps the list of stages",
        "test_pipeline.py::test_close",
    ),
    Difference(
        "rank in spawned workers",
        "lost where only torch.distributed knows it: every rank reads everything",
        "told to the worker by its parent",
        "duplicate data on every rank, silently",
        "test_pipeline.py::test_a_worker_knows_the_rank_of_its_parents_process_group",
    ),
    Difference(
        "isinstance(ds, torch.utils.data.Dataset)",
        "true, and torch is imported with the package",
        "true for IterableDataset only, and torch is never imported for it",
        "importing torch takes seconds; Dataset is not an abstract base class",
        "test_world.py::test_is_an_iterable_dataset_when_torch_comes_later_and_never_imports_it",
    ),
    Difference(
        "a sample cut short by an error",
        "joined by the next shard's members of the same key, or yielded incomplete",
        "dropped",
        "an image with another sample's label",
        "test_tariterators.py::test_a_broken_shard_in_the_middle",
    ),
    Difference(
        "random subsampling and shuffling",
        "use the global random state",
        "a generator of their own; rsample takes a seed",
        "a library does not change its user's random numbers",
        "test_shuffles.py::test_without_a_seed_orders_differ_and_the_global_state_is_left_alone",
    ),
    Difference(
        "make_seed of text",
        "hash(), which differs from process to process",
        "CRC-32",
        "deterministic resampling with a text seed was not",
        "test_world.py::test_seeds_are_stable_across_processes",
    ),
    Difference(
        "listed(partial=False)",
        "partial is ignored",
        "drops a shorter last list",
        "an argument does what its name says",
        "test_dataset.py::test_fluent_methods",
    ),
    Difference(
        "select(handler=)",
        "there is none: a predicate that raises ends the run",
        "a handler, like the other filters'",
        "one bad sample",
        "test_filters.py::test_handlers",
    ),
    Difference(
        "unbatched of columns that differ in length",
        "AssertionError for dicts, silently shorter or IndexError for tuples",
        "ValueError that names the lengths",
        "the cause is the user's data",
        "test_batches.py::test_unbatched_of_what_is_no_batch",
    ),
    Difference(
        "batched",
        "gives a full batch when the next sample has come",
        "gives it at once",
        "the last batch before a pause is not held back",
        "test_batches.py::test_a_batch_is_given_out_as_soon_as_it_is_full",
    ),
    Difference(
        "cache_dir",
        "a disk cache",
        "ConfigError",
        "not there yet; ignoring it silently would read everything from the network",
        "test_dataset.py::test_arguments_out_of_range",
    ),
)
