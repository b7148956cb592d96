"""Rows of the table of differences: opening and writing."""

from __future__ import annotations

from tests.contract.difference import ERRORS, FAULT, FAULTS, HOUSE, OPENERS, SECURITY, WRITERS, Difference

__all__ = ["OPENING", "REFUSALS"]

OPENING = (
    Difference(
        "closing a stream that gopen opened, early",
        "waits for the child, up to two hours",
        "stops the transfer at once",
        "an unread stream blocked runs",
        "reading/test_url_files.py::test_leaving_early_stops_at_once",
        FAULT,
    ),
    Difference(
        "s3, az, hf and fsspec's other schemes in gopen",
        "ValueError: no gopen handler defined",
        "read and written",
        "no handler for the clouds is a fault (#473)",
        "reading/test_url_files.py::test_what_is_written_appears_whole_or_not_at_all",
        FAULT,
    ),
    Difference(
        "what is written through gopen, where it fails",
        "half an object stands there",
        "nothing appears",
        "a half shard looks like a whole one",
        "reading/test_url_files.py::test_what_is_written_appears_whole_or_not_at_all",
        WRITERS,
    ),
    Difference(
        "a mode that gopen does not know",
        "AssertionError",
        "ValueError",
        "wrong arguments are distinguished from bugs",
        "reading/test_url_files.py::test_standard_streams_and_modes",
        ERRORS,
    ),
    Difference(
        "a program's opener in a pipeline",
        "called in the consumer's thread, when its turn has come",
        "called on a thread of the engine, ahead of its turn, several at once",
        "the next shard is there when this one ends",
        "storage/test_opened.py::test_a_dataset_in_loader_workers",
        OPENERS,
    ),
    Difference(
        "gopen_schemes['file'] of the program",
        "ignored by WebDataset",
        "honoured",
        "entries of the user are honoured over our own clients",
        "storage/test_opened.py::test_the_entry_wins_over_our_clients_and_default_serves_the_rest",
        OPENERS,
    ),
    Difference(
        "group_by_keys over shards without a marker between them",
        "joins equal keys of two shards",
        "splits where the shard changes",
        "a sample does not span shards",
        "reading/test_parts.py::test_grouping",
        FAULTS,
    ),
    Difference(
        "damage in a header, in tar_file_iterator",
        "passes its handler by",
        "goes to its handler",
        "the handler is for every fault of a shard (#142)",
        "reading/test_parts.py::test_any_file_is_read",
        FAULTS,
    ),
)

REFUSALS = (
    Difference(
        "ShardWriter(verbose=1)",
        "prints a line for each shard",
        "logs it (WDS_LOG=info shows it)",
        "a library does not write on its user's standard output",
        "test_shardwriter.py::test_verbose_logs_and_prints_nothing",
        HOUSE,
    ),
    Difference(
        "warn_and_continue, warn_and_stop",
        "warn and sleep half a second",
        "warn",
        "a stage that sleeps holds the training up",
        "test_handlers.py::test_warning_tells_the_error_and_where",
        HOUSE,
    ),
    Difference(
        "an exception in a writer's with block, or no close() before exit",
        "half a shard stands there",
        "nothing appears",
        "atomic shards",
        "test_tarwriter.py::test_after_an_exception_nothing_appears_and_what_was_there_stays",
        WRITERS,
    ),
    Difference(
        "keys and fields that no reader gives back",
        "written, and lost when they are read",
        "ValueError",
        "names that a tar cannot hold are refused clearly",
        "tar/test_write.py::test_keys_that_would_not_be_read_back_are_refused",
        WRITERS,
    ),
    Difference(
        "two samples of one key one after another",
        "written; reading them raises",
        "ValueError when the second is written, where they have a field in common",
        "the mistake is the writer's",
        "tar/test_write.py::test_adjacent_samples_of_one_key",
        WRITERS,
    ),
    Difference(
        "a value that does not encode",
        "AttributeError, TypeError or OSError of the encoder",
        "ValueError that names sample and field",
        "one bad sample among millions has to be found",
        "test_encoders.py::test_a_value_that_does_not_encode_names_the_sample_and_the_field",
        ERRORS,
    ),
    Difference(
        "arrays of objects in npy and npz fields",
        "pickled",
        "refused",
        "they hold a pickle, which no decoder of ours would read",
        "test_encoders.py::test_objects_do_not_slip_into_npy",
        SECURITY,
    ),
)
