"""Rows of the table of differences: caches, mixes, and what the decoders and filters say."""

from __future__ import annotations

from tests.contract.difference import (
    CACHE,
    ERRORS,
    FAULT,
    FAULTS,
    MEDIA,
    SECURITY,
    SPECS,
    SURFACE,
    Difference,
)  # fmt: skip

__all__ = ["CACHES", "FIELDS", "MIXES"]

CACHES = (
    Difference(
        "a cache_dir that does not exist",
        "ValueError",
        "made, with its parents",
        'older programs say cache_dir="./cache"',
        "shardcache/test_cache.py::test_the_factory",
        CACHE,
    ),
    Difference(
        "the first epoch with a cache",
        "waits for each whole shard",
        "streams while it fills the cache",
        "training never waits for a whole shard",
        "shardcache/test_cache.py::test_it_streams_while_it_fills",
        CACHE,
    ),
    Difference(
        "local shards and the cache",
        "never cached",
        "cached on request (cache_local=True)",
        "network drives (#427)",
        "shardcache/test_cache.py::test_local_files_on_request",
        CACHE,
    ),
    Difference(
        "FileCache's own names",
        "the last part of the URL: shards of one name replace each other",
        "the first URL keeps it, others get a name of their own",
        "wrong data, silently (#471)",
        "test_cache.py::test_files_of_two_buckets",
        FAULT,
    ),
    Difference(
        "FileCache after a failure",
        "ten attempts, sleeping, where the handler says True",
        "the engine's own attempts; True passes the shard over",
        "one place decides about retries",
        "test_cache.py::test_files_and_handlers",
        ERRORS,
    ),
    Difference(
        "pipe_cleaner",
        "ObsoleteException unless ALLOW_OBSOLETE=1",
        "works, with a DeprecationWarning",
        "code that imports it runs",
        "test_cache.py::test_pipe_cleaner",
        FAULT,
    ),
    Difference(
        "get_filetype",
        "runs the command file",
        "looks at the first bytes",
        "no external binaries",
        "test_cache.py::test_file_types",
        CACHE,
    ),
    Difference(
        "LMDBCached in several workers",
        "all write one file, and then each yields everything",
        "one database for each worker; one that a single process filled is shared out",
        "#445",
        "test_samplecache.py::test_lmdb_with_workers",
        CACHE,
    ),
    Difference(
        "LMDBCached reading pickles",
        "any class",
        "the rules for pickles",
        "what is in a cache may have come from data",
        "test_samplecache.py::test_lmdb_reads_by_the_rules_for_pickles",
        SECURITY,
    ),
    Difference(
        "LMDBCached and equal, odd or long keys",
        "samples are lost, or the database breaks",
        "all samples come back",
        "nothing is lost silently",
        "test_samplecache.py::test_lmdb_loses_no_sample_to_its_key",
        FAULTS,
    ),
)

MIXES = (
    Difference(
        "probabilities of a mix that are too few, negative or all 0",
        "IndexError, or silently another mix",
        "ConfigError",
        "the cause is the argument",
        "test_mix.py::test_probabilities_that_are_none",
        ERRORS,
    ),
    Difference(
        "repeatedly(batchsize=), and over an empty source",
        "ignores it; spins",
        "asks it; ends",
        "nothing hangs",
        "test_extradatasets.py::test_repeatedly_asks_the_users_batchsize_and_does_not_spin",
        FAULTS,
    ),
    Difference(
        "DirectoryShardList(timeout=)",
        "counts from its start",
        "counts while it waits for a shard",
        "what the name says; a stream that keeps coming is not cut",
        "shardlists/test_directories.py::test_polling_finds_what_comes_and_ends_by_its_timeout",
        SURFACE,
    ),
    Difference(
        "DirectoryShardList and shards of processes that ended",
        "thrown away unread in mode unlink",
        "given their names back",
        "nothing is lost silently",
        "shardlists/test_directories.py::test_what_ended_processes_left_is_given_back",
        FAULTS,
    ),
    Difference(
        "WebDataset of a .json shard list",
        "ValueError: unimplemented",
        "read; len() is known",
        "specifications are ordered",
        "shardlists/test_mixture.py::test_an_epoch_holds_every_sample_once_in_the_shards_proportions",
        SPECS,
    ),
)

FIELDS = (
    Difference(
        "unbatched of columns that are dicts",
        "AssertionError or KeyError",
        "undone into dicts",
        "#417",
        "filters/test_batch.py::test_unbatched_undoes_dicts_in_dicts",
        SURFACE,
    ),
    Difference(
        "a missing field",
        "the keys, or a bare KeyError",
        "the sample, its fields, and a likely cause",
        "the commonest mistake (#237)",
        "filters/test_fields.py::test_a_missing_field_shows_what_is_there_and_a_likely_cause",
        ERRORS,
    ),
    Difference(
        "handler= of rename_keys, extract_keys and xdecode",
        "there is none",
        "as in the other filters",
        "one bad sample (#142)",
        "filters/test_conformance.py::test_the_handler_decides",
        SURFACE,
    ),
    Difference(
        "torch_video, torch_audio",
        "torchvision and torchaudio, through temporary files",
        "PyAV, soundfile, torchcodec, torchvision or torchaudio, from memory",
        "whichever is there",
        "decoding/test_media.py::test_a_video",
        MEDIA,
    ),
)
