"""Hooks of mkdocs: pages that are made from other files, and links that leave ``docs/``.

The API reference has a page for each room with public names; the changelog and the guides for contributors are those
beside the README.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/wds-async/wds-async"
OTHERS = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
METHODS = (ROOT / "wds_async" / "filters" / "methods.py").read_text(encoding="utf-8")
GROUPS = {
    "datasets": ("Datasets", ("dataset", "pipeline", "fluid", "mix", "extradatasets", "indexed.randomaccess")),
    "loaders": ("Loaders", ("loader", "numpy_loader", "asyncreader")),
    "shards": ("Lists of shards", ("shardlists", "cache", "reading.url_files")),
    "filters": ("Filters", ("filters", "stages")),
    "decoding": ("Decoding", ("autodecode",)),
    "writing": ("Writing", ("writer",)),
    "states": ("States", ("checkpoint.merge", "checkpoint.ranks", "checkpoint.replay", "checkpoint.seen")),
    "errors": ("Errors and handlers", ("errors", "handlers")),
    "interop": ("Other frameworks", ("integrations.dali", "integrations.huggingface", "tools.arrow")),
    "records": ("Records and older readers", ("reading.records", "tariterators")),
    "jobs": ("Jobs", ()),
}
"""Page: its title, and the modules whose public names at the top of the package it has."""
OWN = {
    "interop": (
        "nodes.ShardReader",
        "integrations.transformers.LoaderCallback",
        "integrations.telemetry.observe",
        "integrations.telemetry.shard_spans",
    ),
    "jobs": (
        "distributed.mapping.map_shards",
        "distributed.resharding.reshard",
        "distributed.indexing.index",
        "distributed.jobs.Job",
        "distributed.progress.JobProgress",
        "distributed.progress.JobStatus",
        "distributed.progress.JobSummary",
        "distributed.reopening.reopened",
        "distributed.engines.ray.RayEngine",
        "distributed.engines.dask.DaskEngine",
        "distributed.feed.feed.Feed",
        "distributed.feed.loader.FeedLoader",
        "distributed.raydata.read",
        "distributed.raydata.write",
        "tools.create.create_shards",
        "tools.convert.convert_shards",
    ),
}
"""Names of a page that are not at the top of the package."""


def homes() -> dict[str, list[str]]:
    """Return the public names of the package by their modules, as the package itself lists them."""
    tree = ast.parse((ROOT / "wds_async" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            return {module: names.split() for module, names in ast.literal_eval(node.value).items()}
    raise AssertionError("wds_async/__init__.py has no table of names")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    for name, source in OTHERS.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=outside(text, "")))
    known = homes()
    if absent := set(known).difference(*(modules for _, modules in GROUPS.values())):
        raise AssertionError(f"GROUPS has no page for the public names of {', '.join(sorted(absent))}")
    index = ["# API reference", ""]
    for page, (title, modules) in GROUPS.items():
        blocks = [f"# {title}", ""]
        names = []
        for module in modules:
            if module == "filters":
                names.append("FilterMethods")
                blocks += ["::: wds_async.filters.methods.FilterMethods", ""]
            for name in known.get(module, ()):
                if module == "filters" and re.search(rf"^    def {name}\(", METHODS, re.MULTILINE):
                    continue  # as a method above
                names.append(name)
                blocks += [f"::: wds_async.{home(module, name)}.{name}", ""]
        for path in OWN.get(page, ()):
            package, _, name = path.rpartition(".")
            names.append(name)
            blocks += [f"::: wds_async.{home(package, name)}.{name}", ""]
        if names:
            index.append(f"* [{title}](api/{page}.md): {', '.join(f'`{name}`' for name in names)}")
            files.append(File.generated(config, f"api/{page}.md", content="\n".join(blocks)))
    files.append(File.generated(config, "api.md", content="\n".join(index) + "\n"))
    return files


def home(module: str, name: str) -> str:
    """Return the module that defines ``name``; ``module`` may pass it on."""
    package = ROOT / "wds_async"
    near = package / module.replace(".", "/")
    files = [near.with_suffix(".py"), *sorted(near.glob("*.py")), *sorted(package.rglob("*.py"))]
    pattern = re.compile(rf"^(?:class|def) {re.escape(name)}\b|^{re.escape(name)}\b *(?::[^=\n]*)?=", re.MULTILINE)
    for file in files:
        if file.exists() and pattern.search(file.read_text(encoding="utf-8")):
            return ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
    raise AssertionError(f"no module defines {name} of {module}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links out of ``docs/`` lead to the repository."""
    return outside(markdown, "../")


def outside(text: str, up: str) -> str:
    """Return ``text`` with its links to files of the repository as URLs. They begin with ``up``."""

    def put(match: re.Match[str]) -> str:
        path = match[1].partition("#")[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{match[1]})" if (ROOT / path).exists() else match[0]

    return re.sub(rf"\]\({re.escape(up)}((?!https?:|#)[A-Za-z.][^)]*)\)", put, text)
