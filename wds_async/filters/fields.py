"""Filters that choose and name the fields of samples."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from wds_async.arguments import each, of_type, passing
from wds_async.errors import ConfigError
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.redact import redact
from wds_async.stages import Traits, pipelinefilter
from wds_async.tar.group import empty_at_place_of
from wds_async.tracebacks import warn

__all__ = ["extract_keys", "getfirst", "not_found", "rename", "rename_keys", "to_tuple"]

Sample = dict[str, Any]
_EACH = Traits(one_to_one=True, handler="handler", state=True, pure=lambda *args, **kw: True)
_MISSING = object()
_NAMES = 1024  # whose matching patterns are remembered: matching costs a hundred times looking up


def _alternatives(spec: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(spec, str):
        return tuple(spec)
    if " " in spec:
        raise ConfigError(f"{spec!r}: alternatives are separated by ';', without spaces")
    return tuple(spec.split(";"))


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


_check_names = passing(
    "the name of a field, or a list of alternatives", lambda value: isinstance(value, str) or _are_names(value)
)
_check_pair = passing("a pair of a new name and a pattern", lambda value: _are_names(value) and len(value) == 2)


def _check_fields(stage: str, argument: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `to_tuple`. Warn of a single list, which stands for alternatives."""
    for number, value in enumerate(values):
        _check_names(stage, f"{argument}[{number}]", value)
    if len(values) == 1 and not isinstance(values[0], str) and len(values[0]) > 1:
        names = list(values[0])
        warn(
            f"{stage}({names}) makes tuples of one value: a list stands for alternatives, of which the first that is "
            f"there is taken. Write {stage}({', '.join(map(repr, names))}) for a value of each field, or "
            f"{stage}({';'.join(names)!r}) if one value is meant"
        )
    return values


def _first(sample: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in sample:
            return sample[name]
    return _MISSING


def not_found(sample: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the message for a ``sample`` without the fields ``names``: what is there, and a likely cause."""
    names = tuple(names)
    where = f" (sample {sample['__key__']!r} of {redact(str(sample.get('__url__')))})" if "__key__" in sample else ""
    hint = next((hint for name in names if (hint := _likely_cause(sample, name))), "")
    return f"no field {';'.join(names)!r} among {list(sample)}{where}{hint}"


def _likely_cause(sample: Mapping[str, Any], name: str) -> str:
    fields = [field for field in sample if not field.startswith("__")]
    if not fields:
        return "; the sample has no fields at all: an earlier stage (rename, map, select) has dropped them"
    wanted = name.lstrip("*.").lower()
    for field in fields:
        if field.lower() == wanted:
            why = "field names have no leading dot" if name.startswith(".") else "case counts"
            return f"; {why}: did you mean {field!r}?"
    for field in fields:
        if field.lower().endswith(f".{wanted}"):
            return (
                f"; a field's name begins after the first dot of the file's name: did you mean {field!r}? (Where the "
                "names of the samples hold dots, WebDataset(keys=...) splits them elsewhere)"
            )
    if name in str(sample.get("__key__", "")).split("."):
        return "; it is part of __key__: WebDataset(keys=...) splits names elsewhere"
    import difflib  # noqa: PLC0415 (errors only)

    near = difflib.get_close_matches(wanted, fields, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def getfirst(
    a: Mapping[str, Any], keys: str | Iterable[str], default: Any = None, missing_is_error: bool = True
) -> Any:
    """Return the value of the first of ``keys`` (``"jpg;png"`` or a list) that ``a`` has, else ``default``. ValueError
    in place of ``default`` where ``missing_is_error``."""
    names = _alternatives(keys)
    value = _first(a, names)
    if value is not _MISSING:
        return value
    if missing_is_error:
        raise ValueError(not_found(a, names))
    return default


def _rename(
    data: Iterable[Sample], handler: Handler = reraise_exception, keep: bool = True, **kw: Any
) -> Iterator[Sample]:
    """Rename fields: ``rename(image="jpg;png", label="cls")`` takes the first of the alternatives that is there.

    Other fields stay; ``keep=False`` drops them, ``__key__`` too. ValueError, for ``handler``, where none is there.
    """
    wanted = [(new, _alternatives(old)) for new, old in kw.items()]
    replaced = {name for _, names in wanted for name in names}
    for sample in data:
        try:
            renamed = empty_at_place_of(sample)
            if keep:
                renamed.update((k, v) for k, v in sample.items() if k not in replaced)
            for new, names in wanted:
                value = _first(sample, names)
                if value is _MISSING:
                    raise ValueError(not_found(sample, names))
                renamed[new] = value
        except Exception as exn:
            if passed(handler, exn, sample):
                continue
            return
        yield renamed


rename = pipelinefilter(_rename, {"kw": each(_check_names)}, _EACH)


def _rename_keys(
    source: Iterable[Sample],
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    handler: Handler = reraise_exception,
    **kw: str,
) -> Iterator[Sample]:
    """Rename fields by pattern: ``rename_keys(("image", "*.jpg"))`` or ``rename_keys(image="jpg")``.

    A pattern (`fnmatch`) is held against the field's lower-cased name after its last ``/``; the last pattern that
    fits decides. Fields that nothing fits are dropped, but for ``__key__``, unless ``keep_unselected``. ValueError,
    for ``handler``, for two fields under one new name (unless not ``duplicate_is_error``: the first stays) and for
    a pattern that fits nothing (``must_match``).
    """
    rules = [(pattern, new) for new, pattern in (*args, *kw.items())][::-1]

    @functools.lru_cache(_NAMES)
    def find(path: str) -> tuple[str, str] | None:
        name = path.rsplit("/", 1)[-1].lower()
        return next((rule for rule in rules if fnmatch(name, rule[0])), None)

    for sample in source:
        try:
            renamed = empty_at_place_of(sample)
            matched = set()
            for path, value in sample.items():
                rule = find(path)
                if rule is None:
                    if keep_unselected or path == "__key__":
                        renamed[path] = value
                    continue
                matched.add(rule[0])
                if rule[1] not in renamed:
                    renamed[rule[1]] = value
                elif duplicate_is_error:
                    raise ValueError(f"rename_keys: two fields of {list(sample)} become {rule[1]!r}")
            if must_match and (idle := {p for p, _ in rules} - matched):
                raise ValueError(f"rename_keys: {sorted(idle)} fit none of {list(sample)}")
        except Exception as exn:
            if passed(handler, exn, sample):
                continue
            return
        yield renamed


rename_keys = pipelinefilter(_rename_keys, {"args": each(_check_pair), "kw": each(of_type("a pattern", str))}, _EACH)


def _extract_keys(
    source: Iterable[Sample],
    *patterns: Any,
    duplicate_is_error: bool = True,
    ignore_missing: bool = False,
    handler: Handler = reraise_exception,
) -> Iterator[tuple[Any, ...]]:
    """Make tuples of the fields that fit patterns: ``extract_keys("*.png;jpg", "cls")``.

    A pattern (`fnmatch`) is held against ``jpg`` and ``.jpg``; ``;`` stands between alternatives. ValueError, for
    ``handler``, where one fits several fields (``duplicate_is_error``) or none (unless ``ignore_missing``).
    """
    wanted = [tuple(p.split(";")) if isinstance(p, str) else tuple(p) for p in patterns]

    @functools.lru_cache(_NAMES)
    def fit(field: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(f".{field}", p) or fnmatch(field, p) for p in patterns)

    for sample in source:
        values = []
        try:
            for alternatives in wanted:
                fields = [k for k in sample if fit(k, alternatives)]
                if len(fields) > 1 and duplicate_is_error:
                    raise ValueError(f"extract_keys: {';'.join(alternatives)!r} fits {fields}")
                if fields:
                    values.append(sample[fields[0]])
                elif not ignore_missing:
                    raise ValueError(not_found(sample, alternatives))
        except Exception as exn:
            if passed(handler, exn, sample):
                continue
            return
        yield tuple(values)


extract_keys = pipelinefilter(_extract_keys, {"patterns": each(_check_names)}, _EACH)


def _to_tuple(
    data: Iterable[Sample],
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Make tuples of the named fields: ``to_tuple("jpg;png", "cls")`` or, in one string, ``to_tuple("jpg cls")``.

    ``;`` stands between alternatives, of which the first that is there is taken. A missing field is a ValueError,
    for ``handler``, or None where not ``missing_is_error``; a field that is None is a ValueError where
    ``none_is_error`` (by default the same as ``missing_is_error``).
    """
    specs = (args[0].split() or args) if len(args) == 1 and isinstance(args[0], str) else args
    wanted = [_alternatives(spec) for spec in specs]
    none_is_error = missing_is_error if none_is_error is None else none_is_error
    for sample in data:
        values = []
        try:
            for names in wanted:
                for name in names:
                    if name in sample:
                        value = sample[name]
                        break
                else:
                    if missing_is_error:
                        raise ValueError(not_found(sample, names))
                    value = None
                if value is None and none_is_error:
                    raise ValueError(f"to_tuple: field {';'.join(names)!r} is None in {sample.get('__key__')!r}")
                values.append(value)
        except Exception as exn:
            if passed(handler, exn, sample):
                continue
            return
        yield tuple(values)


to_tuple = pipelinefilter(_to_tuple, {"args": _check_fields}, _EACH)
