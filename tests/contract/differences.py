"""The tests that hold the table of deliberate differences in docs/migrating.md, by module and by the row's subject.

What differs from webdataset 1.0.2 and has no row there is a bug of ours.
"""

from __future__ import annotations

__all__ = ["PROOFS"]

PROOFS: dict[str, dict[str, str]] = {
    "cli/test_alias.py": {
        "__version__": "test_the_alias",
    },
    "contract/test_decoding.py": {
        "pickled fields": "test_pickles_of_strangers",
        ".pth fields": "test_pickles_of_strangers",
    },
    "contract/test_habits.py": {
        "wrong arguments and input of the wrong kind": "test_wrong_arguments",
    },
    "contract/test_lists.py": {
        "rsample and RandomMix with a seed": "test_mixes",
    },
    "contract/test_mended_cache.py": {
        "names in the cache": "test_names_do_not_collide",
        "url_to_name": "test_names_of_the_users_making",
        "WDS_CACHE": "test_the_folder_of_the_environment",
        "WDS_CACHE_SIZE": "test_the_size_of_the_environment",
        "WDS_VERBOSE_CACHE": "test_the_talk_of_the_environment",
    },
    "contract/test_mended_data.py": {
        "select(handler=)": "test_select_has_a_handler",
        "rename_keys": "test_rename_keys_keeps_the_key",
        "unbatched of columns that differ in length": "test_unbatched_of_unequal_columns",
        "a sample cut short by an error": "test_a_cut_sample_is_not_joined_with_the_next_shard",
        "test_dataset_eof_handler, test_dataset_missing_totuple_raises and "
        "test_dataset_missing_rename_raises of WebDataset's own tests": ("test_a_shard_that_holds_half_a_sample"),
        "a whole sample, and an error that is raised inside the next": (
            "test_a_whole_sample_comes_before_the_error_of_the_next"
        ),
        "a shard that ends inside a header": "test_a_shard_that_ends_inside_a_header",
        "tar_file_expander at a shard's end": "test_the_end_of_a_shard_in_older_loops",
        "open streams": "test_streams_are_closed",
        "local files and GOPEN_REWRITE": "test_rewriting_of_local_files",
        "local files in secure mode": "test_local_files_in_secure_mode",
        "xdecode in secure mode": "test_pickles_in_secure_mode",
        "__local_path__": "test_local_paths",
        "htgs://": "test_every_scheme_goes_where_it_says",
        "a pipe that is dropped": "test_dropping_a_pipe_waits_for_nobody",
        "DecodingError": "test_decoding_errors_say_what_is_wrong",
        "wds.pytorch_weights_only = True": "test_weights_only_at_the_top_level",
        "fields h5 hdf mpg mpeg ps eps rgb rgba": "test_what_is_no_image",
        "ShardWriter's first shard": "test_no_empty_first_shard",
        "a value in a field pkl": "test_pickles_are_encoded_by_every_extension_that_is_decoded",
        "TarWriter(format=)": "test_the_format_of_archives",
        "uint32 in tenbin": "test_uint32_tensors",
        "what the cache takes for a tar": "test_what_the_cache_takes_for_a_tar",
    },
    "contract/test_mended_datasets.py": {
        "braces in lists of URLs": "test_braces_in_lists",
        "expand_urls of a list": "test_expand_urls_of_lists",
        "pathlib paths": "test_paths",
        "an empty list of URLs": "test_empty_lists",
        'WebDataset("folder/")': "test_directories_by_name",
        "DirectoryShardList's default pattern": "test_the_default_pattern_of_directories",
        "MultiShardSample, YAML and dict specifications": "test_multi_shard_samples",
        "nodesplitter": "test_several_ranks",
        "resampled on several ranks": "test_several_ranks_and_resampling",
        "WebDataset(repeat=)": "test_repeat",
        "WebDataset(verbose=)": "test_verbose",
        "shard order of an epoch": "test_a_new_order_every_epoch",
        "WDS_SEED with detshuffle": "test_the_seed_of_the_environment",
        "no seed at all": "test_unseeded_ranks_agree",
        ".pipeline of a WebDataset": "test_the_stages_of_a_dataset",
        "compose": "test_composed_pipelines_and_shared_stages",
        "with_length": "test_length",
        ".associate()": "test_associate",
        "listed(partial=False)": "test_listed",
        "the classes with_epoch and with_length": "test_epochs_and_lengths_as_classes",
    },
    "contract/test_odd_arguments.py": {
        "sizes that are floats, NaN or below 1": "test_known_differences_are_real",
    },
    "decoding/test_media.py": {
        "torch_video, torch_audio": "test_a_video",
    },
    "filters/test_batch.py": {
        "unbatched of columns that are dicts": "test_unbatched_undoes_dicts_in_dicts",
    },
    "filters/test_conformance.py": {
        "handler= of rename_keys, extract_keys and xdecode": "test_the_handler_decides",
    },
    "filters/test_fields.py": {
        "a missing field": "test_a_missing_field_shows_what_is_there_and_a_likely_cause",
    },
    "reading/test_parts.py": {
        "group_by_keys over shards without a marker between them": "test_grouping",
        "damage in a header, in tar_file_iterator": "test_any_file_is_read",
    },
    "reading/test_url_files.py": {
        "closing a stream that gopen opened, early": "test_leaving_early_stops_at_once",
        "s3, az, hf and fsspec's other schemes in gopen": "test_what_is_written_appears_whole_or_not_at_all",
        "what is written through gopen, where it fails": "test_what_is_written_appears_whole_or_not_at_all",
        "a mode that gopen does not know": "test_standard_streams_and_modes",
    },
    "shardcache/test_cache.py": {
        "a cache_dir that does not exist": "test_the_factory",
        "the first epoch with a cache": "test_it_streams_while_it_fills",
        "local shards and the cache": "test_local_files_on_request",
    },
    "shardlists/test_directories.py": {
        "DirectoryShardList(timeout=)": "test_polling_finds_what_comes_and_ends_by_its_timeout",
        "DirectoryShardList and shards of processes that ended": "test_what_ended_processes_left_is_given_back",
    },
    "shardlists/test_mixture.py": {
        "WebDataset of a .json shard list": "test_an_epoch_holds_every_sample_once_in_the_shards_proportions",
    },
    "storage/test_opened.py": {
        "a program's opener in a pipeline": "test_a_dataset_in_loader_workers",
        "gopen_schemes['file'] of the program": "test_the_entry_wins_over_our_clients_and_default_serves_the_rest",
    },
    "tar/test_write.py": {
        "keys and fields that no reader gives back": "test_keys_that_would_not_be_read_back_are_refused",
        "two samples of one key one after another": "test_adjacent_samples_of_one_key",
    },
    "test_cache.py": {
        "FileCache's own names": "test_files_of_two_buckets",
        "FileCache after a failure": "test_handlers",
        "pipe_cleaner": "test_pipe_cleaner",
        "get_filetype": "test_file_types",
    },
    "test_dataset.py": {
        "shard shuffle and splitting": "test_all_ranks_and_workers_share_one_order",
        "resampled with a seed": "test_resampled",
        "lists of shards of the program's own as urls=": "test_a_source_is_any_iterable_of_dicts",
    },
    "test_encoders.py": {
        "a value that does not encode": "test_a_value_that_does_not_encode_names_the_sample_and_the_field",
        "arrays of objects in npy and npz fields": "test_objects_do_not_slip_into_npy",
    },
    "test_extradatasets.py": {
        "repeatedly(batchsize=), and over an empty source": (
            "test_repeatedly_asks_the_users_batchsize_and_does_not_spin"
        ),
    },
    "test_handlers.py": {
        "warn_and_continue, warn_and_stop": "test_warning_tells_the_error_and_where",
    },
    "test_loader.py": {
        "epochs in new workers": "test_epochs_are_complete_and_each_has_its_order",
    },
    "test_mix.py": {
        "probabilities of a mix that are too few, negative or all 0": "test_probabilities_that_are_none",
    },
    "test_pipeline.py": {
        "rank in spawned workers": "test_a_worker_knows_the_rank_of_its_parents_process_group",
        "DataPipeline(handler=), and other keyword arguments": "test_keyword_arguments_of_a_pipeline_warn",
        "iterating after close()": "test_close",
    },
    "test_samplecache.py": {
        "LMDBCached in several workers": "test_workers_share_the_stream",
        "LMDBCached reading pickles": "test_samples_are_read_by_the_rules_for_pickles",
        "LMDBCached and equal, odd or long keys": "test_lmdb_loses_no_sample_to_its_key",
    },
    "test_shardwriter.py": {
        "ShardWriter(verbose=1)": "test_verbose_logs_and_prints_nothing",
    },
    "test_tarwriter.py": {
        "an exception in a writer's with block, or no close() before exit": (
            "test_after_an_exception_nothing_appears_and_what_was_there_stays"
        ),
    },
    "test_world.py": {
        "seeds of text": "test_seeds_are_stable_across_processes",
        "isinstance(ds, torch.utils.data.Dataset)": (
            "test_is_an_iterable_dataset_when_torch_comes_later_and_never_imports_it"
        ),
    },
}
