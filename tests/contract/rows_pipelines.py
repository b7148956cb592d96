"""Rows of the table of differences: lists of shards, splitting, pipelines, filters."""

from __future__ import annotations

from tests.contract.difference import ERRORS, RANDOM, SPLITTING, TORCH, Difference

__all__ = ["PIPELINES", "SHARDS"]


def _lists(name: str) -> str:
    return f"contract/test_mended_datasets.py::{name}"


def _data(name: str) -> str:
    return f"contract/test_mended_data.py::{name}"


SHARDS = (
    Difference(
        "braces in lists of URLs",
        "a list is taken literally",
        "every item is expanded",
        "a list of patterns is what people write",
        _lists("test_braces_in_lists"),
    ),
    Difference(
        "expand_urls of a list",
        "AttributeError",
        "the expanded items",
        "it once took lists, and programs pass them (#409)",
        _lists("test_expand_urls_of_lists"),
    ),
    Difference(
        "pathlib paths",
        "ValueError",
        "taken as URLs",
        "a path is a path",
        _lists("test_paths"),
    ),
    Difference(
        "an empty list of URLs",
        "IndexError",
        "UrlError, which says so",
        "the message names the cause",
        _lists("test_empty_lists"),
    ),
    Difference(
        'WebDataset("folder/")',
        "DirectoryShardList without a mode: waits for ever on its pattern, and renames what it reads",
        "reads the shards of the folder, each once; they keep their names",
        "reading a data set does not change it",
        _lists("test_directories_by_name"),
    ),
    Difference(
        "DirectoryShardList's default pattern",
        "braces, which glob does not know: nothing is ever found",
        "*.tar, *.tgz and *.tar.tgz are found",
        "#415",
        _lists("test_the_default_pattern_of_directories"),
    ),
    Difference(
        "MultiShardSample, YAML and dict specifications",
        "ObsoleteException unless ALLOW_OBSOLETE=1",
        "work",
        "the specification is in use, and nothing has taken its place",
        _lists("test_multi_shard_samples"),
    ),
    Difference(
        "nodesplitter",
        "single_node_only: several ranks raise ValueError",
        "split_by_node by default; single_node_only on request",
        "nearly every program must add splitting by rank",
        _lists("test_several_ranks"),
    ),
    Difference(
        "resampled on several ranks",
        "ValueError from the default nodesplitter",
        "every rank draws for itself, nothing is split",
        "with replacement there is nothing to share out",
        _lists("test_several_ranks_and_resampling"),
    ),
    Difference(
        "WebDataset(repeat=)",
        "ignored",
        "True repeats without end, a number that many times",
        "an argument does what its name says (#269)",
        _lists("test_repeat"),
    ),
    Difference(
        "WebDataset(verbose=)",
        "ignored",
        "tells what the data set is made of",
        "an argument does what its name says",
        _lists("test_verbose"),
    ),
    Difference(
        "shard order of an epoch",
        "the same in every epoch",
        "each has its own, the first is webdataset's; set_epoch sets it",
        "epochs that repeat an order are not shuffled",
        _lists("test_a_new_order_every_epoch"),
    ),
    Difference(
        "WDS_SEED with detshuffle",
        "TypeError: the variable stays text",
        "read as an integer",
        "a setting is parsed where it is read",
        _lists("test_the_seed_of_the_environment"),
    ),
    Difference(
        "no seed at all",
        "a random one for every data set, so ranks disagree",
        "one rank: drawn as WebDataset draws it, and logged; several ranks: 0, and a warning in the log of the first",
        "ranks must agree on the order without talking to each other; a restarted run should have another one",
        _lists("test_unseeded_ranks_agree"),
        SPLITTING,
    ),
    Difference(
        "shard shuffle and splitting",
        "shards are split first, then each worker shuffles its own",
        "the whole list is shuffled first, by seed and epoch alone, then each rank and worker takes its share",
        "a worker would meet the same shards in every epoch",
        "test_dataset.py::test_all_ranks_and_workers_share_one_order",
        SPLITTING,
    ),
    Difference(
        "epochs in new workers",
        "detshuffle and ResampledShards begin again with new workers",
        "counted in memory that workers share",
        "the epoch must go on when a DataLoader makes its workers anew",
        "test_loader.py::test_epochs_are_complete_and_each_has_its_order",
        SPLITTING,
    ),
    Difference(
        "resampled with a seed",
        "WebDataset(resampled=True, seed=…) ignores the seed",
        "draws follow from seed, rank, worker and epoch",
        "the same seed gives the same stream",
        "test_dataset.py::test_resampled",
        "design: the same seed gives the same stream",
    ),
    Difference(
        "seeds of text",
        "hash(), which differs from process to process",
        "CRC-32",
        "resampling by a seed of text was not deterministic",
        "test_world.py::test_seeds_are_stable_across_processes",
        "design: a stable hash for seeds",
    ),
    Difference(
        "rank in spawned workers",
        "lost where only torch.distributed knows it: every rank reads everything",
        "passed to the worker by its parent",
        "duplicate data on every rank, silently",
        "test_pipeline.py::test_a_worker_knows_the_rank_of_its_parents_process_group",
        SPLITTING,
    ),
)

PIPELINES = (
    Difference(
        ".pipeline of a WebDataset",
        "eight stages: list, two splitters, shuffle, opening, expanding, grouping, check",
        "six: one stage opens, expands and groups, and the shuffle comes before the splitters",
        "what reads ahead must know the shards that come; code that looks for a stage by its number finds another",
        _lists("test_the_stages_of_a_dataset"),
    ),
    Difference(
        "__version__",
        "1.0.2",
        "our own, under `wds-async run` too, where webdataset is this package; __webdataset_version__ is 1.0.2",
        "a log that shows the version must show what ran",
        "cli/test_alias.py::test_the_alias",
    ),
    Difference(
        "DataPipeline(handler=), and other keyword arguments",
        "ignored",
        "ignored, with a warning that names them",
        "an argument without effect is reported",
        "test_pipeline.py::test_keyword_arguments_of_a_pipeline_warn",
    ),
    Difference(
        "lists of shards of the program's own as urls=",
        "AssertionError: strings only",
        'any iterable of {"url": …}, iterated anew each epoch',
        "what stands first in a pipeline is a source of WebDataset too",
        "test_dataset.py::test_a_source_is_any_iterable_of_dicts",
    ),
    Difference(
        "compose",
        "shares its stages with the pipeline that it was made of, and so their counters",
        "the composed pipeline counts its own epochs",
        "a fluent call changes nothing but what it returns",
        _lists("test_composed_pipelines_and_shared_stages"),
    ),
    Difference(
        "with_length",
        "swaps the object's class, which cannot be pickled",
        "the object stays what it is",
        "spawned workers need to pickle it (#251)",
        _lists("test_length"),
    ),
    Difference(
        ".associate()",
        "documented, and missing",
        "there",
        "the documentation promises it",
        _lists("test_associate"),
    ),
    Difference(
        "listed(partial=False)",
        "partial is ignored",
        "drops a shorter last list",
        "an argument does what its name says",
        _lists("test_listed"),
    ),
    Difference(
        "the classes with_epoch and with_length",
        "TypeError: abstract",
        "work",
        "they are exported",
        _lists("test_epochs_and_lengths_as_classes"),
    ),
    Difference(
        "iterating after close()",
        "AttributeError: the list of stages is gone",
        "ReaderClosed, which says what happened",
        "the message names the cause",
        "test_pipeline.py::test_close",
        ERRORS,
    ),
    Difference(
        "isinstance(ds, torch.utils.data.Dataset)",
        "true, and torch is imported with the package",
        "true for IterableDataset only, and torch is never imported for it",
        "importing torch takes seconds; Dataset is not an abstract base class",
        "test_world.py::test_is_an_iterable_dataset_when_torch_comes_later_and_never_imports_it",
        TORCH,
    ),
    Difference(
        "rsample and RandomMix with a seed",
        "there is none: they draw from the global random",
        "seed= draws the same in every iteration and worker; without it, as WebDataset draws",
        "a choice that can be repeated whatever else draws random numbers",
        "contract/test_lists.py::test_mixes",
        RANDOM,
    ),
    Difference(
        "select(handler=)",
        "there is none: a predicate that raises ends the run",
        "a handler, like the other filters'",
        "one bad sample",
        _data("test_select_has_a_handler"),
    ),
    Difference(
        "rename_keys",
        "drops __key__ where no pattern takes it",
        "keeps it",
        "a sample without a key cannot be distinguished from another",
        _data("test_rename_keys_keeps_the_key"),
    ),
    Difference(
        "unbatched of columns that differ in length",
        "AssertionError without a text",
        "ValueError that names the lengths",
        "the cause is the user's data (#417)",
        _data("test_unbatched_of_unequal_columns"),
    ),
    Difference(
        "sizes that are floats, NaN or below 1",
        "floats are rounded up by batched and shuffle, and refused by slice, with_epoch, repeat and others; batched(0) "
        "gives an empty batch first; NaN is no bound",
        "floats are rounded up everywhere; NaN, and a batch of less than 1, raise where the stage is made",
        "one rule for all sizes, and an error in the line that is wrong",
        "contract/test_odd_arguments.py::test_known_differences_are_real",
    ),
    Difference(
        "wrong arguments and input of the wrong kind",
        "AssertionError, and nothing with python -O",
        "ValueError or TypeError that says what is wrong",
        "an assertion is no message, and can be switched off",
        "contract/test_habits.py::test_wrong_arguments",
        ERRORS,
    ),
)
