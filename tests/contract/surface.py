"""The surface of the installed webdataset, read from it, and how ours is measured against it.

Nothing here is a copied list of names: what webdataset defines is found by looking at it. What is written down is only
what cannot be read off, namely which names programs take from other rooms (`BORROWED`), and the exceptions with
their reasons (`INNER`, `SIGNATURES`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

__all__ = [
    "BORROWED", "INNER", "INNER_METHODS", "OLDER", "SIGNATURES", "SUBMODULES", "callables", "complaints", "defined",
    "module", "unwrapped",
]  # fmt: skip

SUBMODULES = (
    "autodecode", "cache", "compat", "extradatasets", "filters", "gopen", "handlers", "mix", "multi", "pipeline",
    "pytorch", "shardlists", "tariterators", "tenbin", "utils", "writer",
)  # fmt: skip

# Names that public programs take from a submodule, wherever they are defined.
BORROWED = {
    "compat": "WebDataset WebLoader FluidInterface",
    "filters": "_shuffle _batched _extract_keys _map _rename_keys _rsample _select _to_tuple _xdecode pipelinefilter "
    "reraise_exception default_collation_fn getfirst unlisted slice",
    "pipeline": "DataPipeline",
    "pytorch": "IterableDataset DataLoader",
    "shardlists": "expand_urls split_by_node split_by_worker IterableDataset",
    "tariterators": "base_plus_ext url_opener tar_file_expander valid_sample group_by_keys tar_file_iterator "
    "meta_prefix meta_suffix",
    "utils": "pytorch_worker_info pytorch_worker_seed identity enforce_security",
    "autodecode": "decoders basichandlers Decoder ImageHandler IMAGE_EXTENSIONS npy_loads imagespecs "
    "pytorch_weights_only unpickle_loads torch_loads",
    "gopen": "gopen_schemes Pipe gopen reader set_options rewrite_url",
    "writer": "default_handlers add_handlers make_encoder",
    "multi": "MultiLoader",
}

# Names that the package once had at its top level, and that programs still write.
OLDER = [
    "Dataset", "ShardList", "PytorchShardList", "Processor", "Composable", "Shorthands", "url_opener",
    "tar_file_iterator", "tar_file_expander", "tarfile_expander", "group_by_keys", "DBCache", "MultiDataset",
    "ResizedDataset", "ChoppedDataset", "map_stream", "cbors_to_samples", "cbors2_to_samples",
    "cached_tarfile_samples", "cached_tarfile_to_samples", "ignore_exception", "warn_exception", "Curried", "batch",
    "associate", "unlisted", "log_keys",
]  # fmt: skip

# Public by their spelling, but steps of webdataset's own implementation: named neither in its documentation nor in
# any program that was found. Room: the names.
INNER = {
    "autodecode": "tenbin_loads msgpack_loads npz_loads cbor_loads call_extension_handler default_decoder",
    "cache": "islocal get_filetype magic_filetype download default_cache_dir default_cache_size verbose_cache",
    "filters": "compose2 compose pipeline parse_field_spec pick combine_values tuple2dict dict2tuple decode_bin "
    "decode_text decode_pickle find_decoder default_decoders",
    "gopen": "gopen_file gopen_pipe gopen_curl gopen_htgs gopen_hf gopen_gsutil gopen_ais gopen_error PIPE info",
    "mix": "round_robin_shortest round_robin_longest random_samples",
    "pipeline": "add_length_method",
    "shardlists": "envlookup envsubst resampled_ MSSource expand check_pid_is_running without_last_extension "
    "get_pid_from_filename",
    "tariterators": "shardlist trace",
    "tenbin": "bytelen bytedata check_acceptable_input_type str64 unstr64 check_infos encode_header decode_header "
    "encode_list decode_list roundup encode_chunks decode_chunks write_chunk read_chunk "
    "long_to_short short_to_long magic magic_bytes magic_str",
    "utils": "glob_with_braces fnmatch_with_braces is_iterable safe_eval lookup_sym repeatedly0 guess_batchsize "
    "deprecated ObsoleteException obsolete compute_sample_weights",
    "writer": "imageencoder bytestr numpy_npz_dumps tenbin_dumps cbor_dumps mp_dumps make_handlers "
    "encode_based_on_extension1 encode_based_on_extension",
}

# Public methods, by their spelling, that are steps of webdataset's own constructors and runs: "room.Class.method".
INNER_METHODS = frozenset((
    "compat.WebDataset.create_url_iterator", "compat.WebDataset.update_cache_info", "extradatasets.repeatedly.invoke",
    "extradatasets.with_epoch.invoke", "extradatasets.with_length.invoke", "filters.LMDBCached.add_samples",
    "shardlists.MultiShardSample.parse_spec", "utils.PipelineStage.invoke", "writer.TarWriter.tarmode",
))  # fmt: skip

# Where a signature of ours may differ: "room.name(parameter)" → the reason.
SIGNATURES = {
    "autodecode.ImageHandler(extensions)": "without those that are no images: row of the table",
    "autodecode.imagehandler(extensions)": "without those that are no images: row of the table",
    "compat.WebDataset(url_to_name)": "None stands for names that cannot collide; the default there is never used",
    "compat.WebDataset(nodesplitter)": "split_by_node is the default: row nodesplitter of the table",
    **dict.fromkeys(
        (
            "compat.FluidInterface.extract_keys(kw)",
            "compat.FluidInterface.select(kw)",
            "compat.FluidInterface.shuffle(kw)",
            "compat.FluidInterface.to_tuple(kw)",
        ),
        "the method names the arguments of its filter, which is compared with webdataset's filter",
    ),
    "filters.decode(kw)": "the stage names the arguments of Decoder",
    "filters.info(stream)": "None stands for sys.stderr at the time of the call, not of the import",
    "extradatasets.repeatedly(length)": "a class there that cannot be made at all; ours is the function of utils",
}


def module(package: str, room: str) -> Any:
    """The module ``package.room`` itself, also where the package has a function of that name."""
    return importlib.import_module(f"{package}.{room}")


def defined(room: str) -> list[str]:
    """The public names that webdataset's ``room`` defines: its functions and classes, and its own constants."""
    theirs = module("webdataset", room)
    names = []
    for name, value in vars(theirs).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        home = getattr(unwrapped(value), "__module__", None)
        if home == theirs.__name__ or (home is None and not callable(value)):
            names.append(name)
    return sorted(names)


def unwrapped(value: Any) -> Any:
    """The function inside a curried filter, else the value."""
    return getattr(value, "f", value) if type(value).__name__ == "RestCurried" else value


def callables(room: str) -> Iterator[tuple[str, Any]]:
    """``(dotted name, callable)`` for every public function, class and method of webdataset's ``room``."""
    for name in defined(room):
        value = getattr(module("webdataset", room), name)
        if inspect.isclass(value):
            yield name, value
            for method, found in sorted(vars(value).items()):
                inner = method.startswith("_") or f"{room}.{name}.{method}" in INNER_METHODS
                if not inner and callable(getattr(found, "__func__", found)):
                    yield f"{name}.{method}", getattr(value, method)
        elif callable(value):
            yield name, value


def _default(value: Any) -> Any:
    """A default as far as it can be compared between two packages: functions by name, sequences by length."""
    if value is inspect.Parameter.empty:
        return "required"
    if callable(value):
        return getattr(value, "__name__", repr(value))
    return len(value) if isinstance(value, (list, dict)) else value


def _parameters(called: Any) -> list[inspect.Parameter]:
    """The parameters of ``called``, without the source where it is the function of a curried filter."""
    found = list(inspect.signature(unwrapped(called)).parameters.values())
    return found[1:] if unwrapped(called) is not called else found


def complaints(mine: Any, other: Any) -> dict[str, str]:
    """Parameter → why some call that ``other`` takes is not taken, or taken differently, by ``mine``."""
    try:
        wanted, given = _parameters(other), _parameters(mine)
    except (TypeError, ValueError):  # built in C: it has no signature to compare
        return {}
    kinds = inspect.Parameter
    positional = [p.name for p in given if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: p for p in given}
    found: dict[str, str] = {}
    for i, want in enumerate(wanted):
        have = by_name.get(want.name)
        if want.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            if want.kind not in {p.kind for p in given}:
                found[want.name] = f"{want} is not taken"
        elif have is None:
            found[want.name] = "is missing"
        elif want.kind is kinds.POSITIONAL_OR_KEYWORD and (want.name not in positional or positional[i] != want.name):
            found[want.name] = f"is not number {i} of the positional ones"
        elif want.default is not kinds.empty and _default(want.default) != _default(have.default):
            found[want.name] = f"is by default {_default(have.default)!r}, not {_default(want.default)!r}"
    known = {p.name for p in wanted}
    for have in given:
        named = have.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if named and have.name not in known and have.default is kinds.empty:
            found[have.name] = "is asked for, and webdataset does not have it"
    return found
