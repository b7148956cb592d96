"""Rows of the table of differences: reading, decoding, writing, caching."""

from __future__ import annotations

from tests.contract.difference import FAULTS, OPENCLIP, SECURITY, SURFACE, Difference

__all__ = ["CACHING", "DECODING", "READING", "WRITING"]


def _data(name: str) -> str:
    return f"contract/test_mended_data.py::{name}"


def _cache(name: str) -> str:
    return f"contract/test_mended_cache.py::{name}"


READING = (
    Difference(
        "a sample cut short by an error",
        "joined by the next shard's members of the same key; the last one where the handler stops",
        "dropped and noted in dataset.ledger, whatever the handler; never joined",
        "an image with another sample's label",
        _data("test_a_cut_sample_is_not_joined_with_the_next_shard"),
        FAULTS,
    ),
    Difference(
        "test_dataset_eof_handler, test_dataset_missing_totuple_raises and test_dataset_missing_rename_raises of "
        "WebDataset's own tests",
        "half a sample at the end of a cut shard is given out, and stages behind it raise about its missing fields",
        "gives no sample, so that stages behind it have nothing to raise on; WebDataset says that it is empty",
        "a cut sample is never given out",
        _data("test_a_shard_that_holds_half_a_sample"),
        FAULTS,
    ),
    Difference(
        "a whole sample, and an error that is raised inside the next",
        "only the error",
        "the sample, then the error",
        "as many samples as the shard has, and the error names the right one",
        _data("test_a_whole_sample_comes_before_the_error_of_the_next"),
        FAULTS,
    ),
    Difference(
        "a shard that ends inside a header",
        "taken for its end, so that the rest is missing silently",
        "TruncatedShard, a tarfile.ReadError, to the handler",
        "nothing is lost silently (#142)",
        _data("test_a_shard_that_ends_inside_a_header"),
        FAULTS,
    ),
    Difference(
        "tar_file_expander at a shard's end",
        "an empty dict, on which loops that read the name of every item break",
        "an empty dict that answers with a name without a key, which such loops pass over",
        "groupings of users' own, OpenCLIP's among them (#384)",
        _data("test_the_end_of_a_shard_in_older_loops"),
        OPENCLIP,
    ),
    Difference(
        "open streams",
        "never closed: a ResourceWarning for each shard",
        "closed at the end, on an error and when the iterator goes",
        "#311",
        _data("test_streams_are_closed"),
    ),
    Difference(
        "local files and GOPEN_REWRITE",
        "not rewritten by WebDataset",
        "rewritten like every other URL",
        "one way to open a URL",
        _data("test_rewriting_of_local_files"),
    ),
    Difference(
        "local files in secure mode",
        "read by WebDataset all the same",
        "ValueError",
        "secure mode holds at one place for every opener",
        _data("test_local_files_in_secure_mode"),
    ),
    Difference(
        "xdecode in secure mode",
        "unpickles .pyd",
        "ValueError",
        "secure mode holds at one place for every decoder",
        _data("test_pickles_in_secure_mode"),
    ),
    Difference(
        "__local_path__",
        "only from WebDataset, for local and cached shards; none from tarfile_to_samples",
        "from every reading stage, wherever the shard lies in a local file",
        "one stage reads in both places",
        _data("test_local_paths"),
    ),
    Difference(
        "htgs://",
        "curl of a gs:// URL, which curl does not know",
        "read as gs://",
        "the scheme is documented",
        _data("test_every_scheme_goes_where_it_says"),
    ),
    Difference(
        "a pipe that is dropped",
        "waits for the child, up to two hours",
        "ends it",
        "an unread stream must not hold a run up",
        _data("test_dropping_a_pipe_waits_for_nobody"),
    ),
)

DECODING = (
    Difference(
        "DecodingError",
        "an empty message",
        "names shard, key, field and cause",
        "the message is what people see",
        _data("test_decoding_errors_say_what_is_wrong"),
    ),
    Difference(
        "wds.pytorch_weights_only = True",
        "changes nothing",
        "is heard",
        "the name is exported to be set",
        _data("test_weights_only_at_the_top_level"),
    ),
    Difference(
        "fields h5 hdf mpg mpeg ps eps rgb rgba",
        "taken for images",
        "left to other decoders",
        "a field that happens to have such a name is no image",
        _data("test_what_is_no_image"),
    ),
    Difference(
        "pickled fields",
        "any class is unpickled: data runs code",
        "plain values, arrays and tensors; others on request (allow_pickle, WDS_ALLOW_PICKLE)",
        "a data set is not a program",
        "contract/test_decoding.py::test_pickles_of_strangers",
        SECURITY,
    ),
    Difference(
        ".pth fields",
        "unpickled whole unless WDS_PYTORCH_WEIGHTS_ONLY=1",
        "weights_only unless trusted",
        "a data set is not a program",
        "contract/test_decoding.py::test_pickles_of_strangers",
        SECURITY,
    ),
)

WRITING = (
    Difference(
        "ShardWriter's first shard",
        "created by the constructor, empty if nothing is written",
        "created with its first sample",
        "#376",
        _data("test_no_empty_first_shard"),
    ),
    Difference(
        "a value in a field pkl",
        "ValueError: no handler, though pkl is decoded",
        "pickled, as in pyd and pickle",
        "what is read can be written",
        _data("test_pickles_are_encoded_by_every_extension_that_is_decoded"),
    ),
    Difference(
        "TarWriter(format=)",
        "looked up and then forgotten: always PAX, with a record for an mtime that is a float",
        "USTAR by default, whole seconds",
        "an argument does what it is documented to do, and the same samples give the same bytes",
        _data("test_the_format_of_archives"),
        SURFACE,
    ),
    Difference(
        "uint32 in tenbin",
        "misspelt, and so refused",
        "encoded and decoded",
        "a slip of the pen",
        _data("test_uint32_tensors"),
    ),
)

CACHING = (
    Difference(
        "names in the cache",
        "the last part of the URL: shards of one name replace each other",
        "readable, and different for different URLs",
        "another shard's data, silently (#471)",
        _cache("test_names_do_not_collide"),
    ),
    Difference(
        "url_to_name",
        "ignored by WebDataset",
        "gives the names",
        "an argument does what its name says",
        _cache("test_names_of_the_users_making"),
    ),
    Difference(
        "what the cache takes for a tar",
        "gzip and ustar; xz, bz2 and tars of 1979 are refused",
        "every kind of tar that is read",
        "#226",
        _data("test_what_the_cache_takes_for_a_tar"),
    ),
    Difference(
        "WDS_CACHE",
        "checked, and then without effect",
        "turns the cache on",
        "a variable does what its name says",
        _cache("test_the_folder_of_the_environment"),
    ),
    Difference(
        "WDS_CACHE_SIZE",
        "read, without effect",
        "limits the cache; 0 turns it off",
        "a variable does what its name says",
        _cache("test_the_size_of_the_environment"),
    ),
    Difference(
        "WDS_VERBOSE_CACHE",
        "read, without effect",
        "tells what is downloaded",
        "a variable does what its name says",
        _cache("test_the_talk_of_the_environment"),
    ),
)
