"""The house as ``docs/design.md`` draws it: floors, short functions, and which side effect lives in which room.

Every rule is a function from a module's syntax tree to a list of complaints, and every rule is shown to complain
about an offending example (`test_a_rule_can_fail`), because a rule that cannot fail holds nothing.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packages import need_package
from wds_async.storage.http import SPEC as HTTP
from wds_async.storage.stores import STORES

ROOT = Path(__file__).parent.parent
PACKAGE = "wds_async"

SPECS = (
    *("storage", "storage.spec", "storage.stores"),
    *(f"storage.{path.parent.name}" for path in sorted((ROOT / PACKAGE / "storage").glob("*/__init__.py"))),
)
"""What the stores are, as data: schemes and their other names count where the environment is read."""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "packages", "arguments", "logs", "environment", "config", "handlers", "zstd",
     *SPECS),
    (
        "urls", "world", "redact", "rewrite", "ahead", "background", "batch_memory", "child_process", "tracebacks",
    ),
    ("storage", "storage.*"),
    ("transfer", "transfer.*"),
    ("shardcache", "shardcache.*"),
    # tenbin is bytes and arrays like tar is bytes and members: decoding needs it as much as writing does.
    ("tar", "tar.*", "tenbin"),
    ("reading", "reading.*", "autodecode", "decoding", "decoding.*", "filters.*", "shardlists.*", "mix",
     "extradatasets",
     "cache", "samplecache", "indexed.files",
     "indexed.index", "indexed.learnt", "indexed.places", "indexed.shardindex", "shared_batches", "stages", "pipeline",
     "observe", "observe.*", "checkpoint", "checkpoint.*"),
    ("dataset", "equalsteps", "fluid", "loader", "nodes", "numpy_loader",
     "to_device", "asyncreader", "lengths", "misuse", "multi", "indexed",
     "indexed.*", "legacy", "legacy.*"),
    ("writer", "integrations", "integrations.*"),
    ("distributed", "distributed.*", "tools", "tools.*"),
    ("service", "service.*"),
    ("cli", "cli.*"),
)  # fmt: skip
"""Rooms by floor, the ground first. A module imports from its own floor and those below."""

DOORS = ("__init__", "__main__", "compat", "filters", "gopen", "pytorch", "shardlists", "tariterators",
         "utils", "wids")  # fmt: skip
"""Names for users; they hold no logic and nothing inside imports them."""
GUESTS = ("cli.*", "integrations.*")
"""The command line runs what a user would write, some of it with either library, so it may enter by ``__init__``. So do
classes for other frameworks."""

MAX_FUNCTION_LINES = 60

ENVIRONMENT_ROOMS = ("environment",)
TORCH_ROOMS = ("world", "autodecode", "decoding.*", "filters.basic", "filters.batch", "pipeline", "dataset", "loader",
               "writer", "pytorch", "shardlists.lists", "indexed.dataset", "cli.demo*")  # fmt: skip
GLOBAL_RANDOM_ROOMS = ("world",)
RANDOM_STATE_ROOMS = ("checkpoint.packing",)
"""Rooms that save the program's generators, and set them to what they were."""
SUBPROCESS_ROOMS = ("storage.pipe", "child_process")
INTEGRATION_ROOMS = ("integrations.transformers", "nodes")
"""Rooms that import another framework, for programs that have imported it. Their classes have names that fit that."""
PRINT_ROOMS = ("cli", "cli.*")
STORE_ROOMS = (
    *("storage.stores", "storage.checksums"),  # the catalogue; the headers by which servers tell checksums
    *("reading.url_files", "cache"),  # WebDataset's own tables of schemes
    "rewrite",  # the clouds' command line tools
    "observe.prices",
    *("cli.warm", "service.names", "service.app", "service.buckets", "service.objects", "service.s3api"),  # AIStore's
)
"""Rooms that may name a store outside its folder."""
URL_ROOMS = ("storage.base", "storage.registry", "storage.options", "storage.listing.globs", "storage.ais.urls")
"""Rooms of the stores and the engine that read the parts of a URL; the others are given a `Location`."""
ASYNC_ROOMS = ("background", "storage.*", "transfer.*", "shardcache.*", "service.*", "asyncreader", "cli.cache",
               "cli.warm", "cli.demo.server", "distributed.feed.actors")  # fmt: skip
SYS_MODULES_ROOMS = ("packages", "gopen", "cli.alias")
IMPORT_BY_NAME_ROOMS = ("__init__", "packages", "decoding.media", "distributed.__init__", "distributed.functions",
                        "legacy.names", "samplecache", "service.buckets", "shardlists.spec", "storage.preload",
                        "storage.registry", "cli.*")  # fmt: skip
"""Rooms whose names come from a table of names or from the user; elsewhere an import by name dodges the floors."""
FSSPEC_ROOMS = ("storage", "storage.*")

FSSPEC_PACKAGES = {"fsspec", "gcsfs", "s3fs", "adlfs", "aiobotocore", "botocore", "azure", "google", "huggingface_hub"}
TORCH_PACKAGES = {"torch", "torchvision", "torchaudio", "torchdata"}
POSIX_PACKAGES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop"}


@dataclass(frozen=True)
class Module:
    """One module: ``room`` is its dotted name below the package, ``__init__`` for the package itself."""

    room: str
    source: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self))

    def is_in(self, rooms: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(self.room, pattern) for pattern in rooms)


@dataclass(frozen=True)
class Import:
    """``target`` is a dotted name; where the statement stands decides what it costs."""

    target: str
    line: int
    in_function: bool
    in_try: bool
    for_types: bool


def _modules() -> list[Module]:
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        room = ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        found.append(Module(room, path.read_text(encoding="utf-8")))
    return found


MODULES = _modules()
ROOMS = {module.room.removesuffix(".__init__") for module in MODULES}


def _imports(module: Module) -> Iterator[Import]:
    """Every import of the module, ``from a import b`` as ``a.b``; relative ones made absolute."""

    def walk(node: ast.AST, in_function: bool, in_try: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = [PACKAGE, *module.room.split(".")][: -child.level]
                    base = ".".join([*package, *([base] if base else [])])
                names = [f"{base}.{alias.name}" for alias in child.names]
            else:
                names = []
            line = getattr(child, "lineno", 0)
            yield from (Import(name, line, in_function, in_try, for_types) for name in names)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(
                child,
                in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
                in_try or isinstance(child, ast.Try),
                for_types or typing,
            )

    return walk(module.tree, False, False, False)


def room_of(target: str) -> str | None:
    """The room that ``wds_async.a.b.name`` is imported from; None for other packages."""
    package, _, rest = target.partition(".")
    if package != PACKAGE:
        return None
    parts = rest.split(".") if rest else []
    while parts and ".".join(parts) not in ROOMS:
        parts.pop()
    return ".".join(parts) or "__init__"


def floor_of(room: str) -> int | None:
    room = room.removesuffix(".__init__")
    for number, rooms in enumerate(FLOORS):
        if any(fnmatch.fnmatchcase(room, pattern) for pattern in rooms):
            return number
    return None


@pytest.fixture(scope="module", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """The garbage collector would look through all their nodes in every test that follows in this process."""
    yield
    for module in MODULES:
        for made in ("tree", "nodes", "imports"):
            vars(module).pop(made, None)


# -- the rules --------------------------------------------------------------------------------------------------


def one_way_floors(module: Module) -> list[str]:
    if module.room.removesuffix(".__init__") in DOORS:
        return []
    own = floor_of(module.room)
    if own is None:
        return [f"{module.room} is on no floor: give it one in FLOORS"]
    complaints = []
    for found in module.imports:
        room = room_of(found.target)
        if room is None:
            continue
        if room in DOORS and not (room == "__init__" and module.is_in(GUESTS)):
            complaints.append(f"line {found.line}: imports the door {room!r}")
            continue
        floor = floor_of(room)
        if floor is not None and floor > own:
            complaints.append(f"line {found.line}: floor {own} imports {room!r} from floor {floor}")
    return complaints


def short_functions(module: Module) -> list[str]:
    complaints = []
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                complaints.append(f"line {node.lineno}: {node.name} has {length} lines")
    return complaints


def _uses(module: Module, package: str, wanted: Callable[[str], bool]) -> list[str]:
    """Uses of ``package.name`` (through any alias) or ``from package import name`` where ``wanted(name)``."""
    aliases = {
        alias.asname or alias.name
        for node in module.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == package
    }
    complaints = []
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and wanted(node.attr):
            complaints.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == package:
            complaints += [f"line {node.lineno}: {package}.{a.name}" for a in node.names if wanted(a.name)]
    return complaints


def environment_in_one_room(module: Module) -> list[str]:
    if module.is_in(ENVIRONMENT_ROOMS):
        return []
    return _uses(module, "os", {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}.__contains__)


def no_shared_randomness(module: Module) -> list[str]:
    if module.is_in(RANDOM_STATE_ROOMS):
        return []
    free = ("Random", "SystemRandom", *(("random", "randint") if module.is_in(GLOBAL_RANDOM_ROOMS) else ()))
    legacy = _uses(module, "random", lambda name: name not in free)
    for numpy in ("numpy", "np"):
        for node in module.nodes:
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != f"{numpy}.random":
                continue
            if node.attr[0].islower() and node.attr != "default_rng":
                legacy.append(f"line {node.lineno}: {ast.unparse(node)}")
    return legacy


def no_sleep(module: Module) -> list[str]:
    return _uses(module, "time", "sleep".__eq__)


def subprocess_in_pipe(module: Module) -> list[str]:
    if module.is_in(SUBPROCESS_ROOMS):
        return []
    starts = re.compile(r"system|popen|fork|forkpty|exec[lv]p?e?|spawn.*|posix_spawnp?").fullmatch
    return [
        *(f"line {i.line}: imports {i.target}" for i in module.imports if i.target.split(".")[0] == "subprocess"),
        *_uses(module, "os", lambda name: starts(name) is not None),
        *_uses(module, "asyncio", lambda name: name.startswith("create_subprocess")),
    ]


def print_in_cli(module: Module) -> list[str]:
    if module.is_in(PRINT_ROOMS):
        return []
    return [
        f"line {node.lineno}: print"
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def urls_parsed_once(module: Module) -> list[str]:
    if not module.is_in(("storage.*", "transfer.*")) or module.is_in(URL_ROOMS):
        return []
    return [
        f"line {node.lineno}: takes a URL apart; read the fields of its Location"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.urls"
        if any(alias.name == "scheme" for alias in node.names)
    ]


def async_in_its_rooms(module: Module) -> list[str]:
    if module.is_in(ASYNC_ROOMS):
        return []
    return [
        f"line {node.lineno}: async def {node.name}" for node in module.nodes if isinstance(node, ast.AsyncFunctionDef)
    ]


def torch_late_and_in_its_rooms(module: Module) -> list[str]:
    complaints = []
    for found in module.imports:
        if found.target.split(".")[0] in TORCH_PACKAGES and not found.for_types:
            if module.is_in(INTEGRATION_ROOMS):
                continue
            if not module.is_in(TORCH_ROOMS):
                complaints.append(f"line {found.line}: imports {found.target}, which is none of its business")
            elif not found.in_function:
                complaints.append(f"line {found.line}: imports {found.target} when it is imported itself")
    return complaints


def fsspec_in_storage(module: Module) -> list[str]:
    if module.is_in(FSSPEC_ROOMS):
        return []
    return [
        f"line {i.line}: imports {i.target}"
        for i in module.imports
        if i.target.split(".")[0] in FSSPEC_PACKAGES and not i.for_types
    ]


def nothing_posix_at_import(module: Module) -> list[str]:
    return [
        f"line {i.line}: imports {i.target}"
        for i in module.imports
        if i.target.split(".")[0] in POSIX_PACKAGES and not (i.in_function or i.in_try or i.for_types)
    ]


def stores_in_their_folders(module: Module) -> list[str]:
    """A store's scheme or kind as a string, and imports from its folder. HTTP is a protocol, not only a store."""
    others = [spec for spec in STORES if spec is not HTTP]
    folders = {spec.backend.removeprefix(f"{PACKAGE}.").rpartition(".backend:")[0] for spec in others}
    if module.is_in(STORE_ROOMS) or module.is_in(tuple(pattern for f in folders for pattern in (f, f"{f}.*"))):
        return []
    names = {name for spec in others for name in (spec.kind, *spec.schemes, *spec.aliases)}
    return [
        *(
            f"line {i.line}: imports {i.target}"
            for i in module.imports
            if (room_of(i.target) or "").startswith(tuple(folders))
        ),
        *(
            f"line {node.lineno}: names {node.value!r}"
            for node in module.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        ),
    ]


def _isort_key(name: str) -> tuple[int, list[object]]:
    group = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return group, [(1, int(p)) if p.isdigit() else (0, p) for p in re.split(r"(\d+)", name) if p]


def sorted_all(module: Module) -> list[str]:
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if [ast.unparse(t) for t in targets if t is not None] != ["__all__"]:
            continue
        value = getattr(node, "value", None)
        if not isinstance(value, ast.List | ast.Tuple):
            return []  # computed from a table; test_all_names_exist looks at it
        names = [ast.literal_eval(element) for element in value.elts if isinstance(element, ast.Constant)]
        if names != sorted(set(names), key=_isort_key):
            return [f"__all__ is not sorted (constants, classes, functions): {names}"]
        return []
    bare = all(isinstance(node, ast.Expr) for node in module.tree.body) and module.room.endswith(".__init__")
    return [] if bare or module.room == "__main__" else ["no __all__"]


def modules_by_name_in_their_rooms(module: Module) -> list[str]:
    complaints = []
    for node in module.nodes:
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) == "sys.modules"
            and not module.is_in(SYS_MODULES_ROOMS)
        ):
            complaints.append(f"line {node.lineno}: sys.modules; packages.loaded finds a module without importing it")
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in ("importlib.import_module", "import_module", "__import__") and not module.is_in(
            IMPORT_BY_NAME_ROOMS
        ):
            complaints.append(
                f"line {node.lineno}: {called}: import the module where it is needed, or packages.optional"
            )
    return complaints


def doors_hold_no_logic(module: Module) -> list[str]:
    if module.room not in DOORS and not (module.room.endswith(".__init__") and not module.is_in(("cli.*",))):
        return []
    complaints = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"):
            continue
        if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test)):
            continue
        plain = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr
        if not isinstance(node, plain):
            complaints.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return complaints


RULES: tuple[Callable[[Module], list[str]], ...] = (
    one_way_floors,
    short_functions,
    environment_in_one_room,
    no_shared_randomness,
    no_sleep,
    subprocess_in_pipe,
    print_in_cli,
    urls_parsed_once,
    async_in_its_rooms,
    torch_late_and_in_its_rooms,
    fsspec_in_storage,
    nothing_posix_at_import,
    sorted_all,
    stores_in_their_folders,
    modules_by_name_in_their_rooms,
    doors_hold_no_logic,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[[Module], list[str]]) -> None:
    complaints = [
        f"{PACKAGE}/{module.room.replace('.', '/')}.py: {text}" for module in MODULES for text in rule(module)
    ]
    assert not complaints, "\n".join(complaints)


OFFENDERS: tuple[tuple[Callable[[Module], list[str]], str, str], ...] = (
    (one_way_floors, "errors", "import wds_async.config\nfrom wds_async.transfer import slabs"),
    (one_way_floors, "config", "def f():\n    from .dataset import WebDataset"),
    (one_way_floors, "errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wds_async.urls"),
    (one_way_floors, "transfer.slabs", "from wds_async import WebDataset"),
    (one_way_floors, "nowhere", ""),
    (one_way_floors, "cli.ls", "from wds_async.compat import WebDataset"),
    (modules_by_name_in_their_rooms, "world", "import sys\ntorch = sys.modules['torch']"),
    (modules_by_name_in_their_rooms, "world", "import sys\ntorch = sys.modules.get('torch')"),
    (modules_by_name_in_their_rooms, "urls", "import importlib\nimportlib.import_module('wds_async.dataset')"),
    (short_functions, "urls", "def f():\n" + "    x = 1\n" * 60),
    (environment_in_one_room, "urls", "import os\nos.environ.get('A')"),
    (environment_in_one_room, "urls", "import os as o\no.getenv('A')"),
    (environment_in_one_room, "urls", "from os import environ"),
    (no_shared_randomness, "filters.shuffling", "import random\nrandom.shuffle([1])"),
    (no_shared_randomness, "filters.shuffling", "import random\nrandom.random()"),
    (no_shared_randomness, "world", "import random\nrandom.shuffle([1])"),
    (no_shared_randomness, "filters.shuffling", "from random import shuffle"),
    (no_shared_randomness, "filters.shuffling", "import numpy as np\nnp.random.shuffle([1])"),
    (no_sleep, "config", "import time\ntime.sleep(1)"),
    (no_sleep, "config", "from time import sleep"),
    (subprocess_in_pipe, "writer", "import subprocess"),
    (subprocess_in_pipe, "writer", "import os\nos.system('true')"),
    (subprocess_in_pipe, "transfer.fetch", "import asyncio\nasyncio.create_subprocess_exec('true')"),
    (print_in_cli, "filters.basic", "print(1)"),
    (urls_parsed_once, "storage.upload", "from wds_async.urls import links, scheme"),
    (async_in_its_rooms, "filters.basic", "class A:\n    async def f(self): pass"),
    (torch_late_and_in_its_rooms, "urls", "def f():\n    import torch.utils.data"),
    (torch_late_and_in_its_rooms, "loader", "import torch"),
    (torch_late_and_in_its_rooms, "loader", "try:\n    from torch import Tensor\nexcept ImportError: pass"),
    (fsspec_in_storage, "transfer.fetch", "def f():\n    import fsspec.asyn"),
    (nothing_posix_at_import, "cache", "import fcntl"),
    (sorted_all, "urls", "__all__ = ['b', 'a']"),
    (sorted_all, "urls", "__all__ = ['a', 'B', 'CC']"),
    (sorted_all, "urls", "__all__ = ['a', 'a']"),
    (sorted_all, "urls", ""),
    (stores_in_their_folders, "transfer.pump", "def f(location):\n    return location.kind == 'ais'"),
    (stores_in_their_folders, "storage.sink", "def f():\n    from wds_async.storage.s3.errors import explain"),
    (doors_hold_no_logic, "gopen", "def gopen(): pass"),
    (doors_hold_no_logic, "tar.__init__", "for x in []: pass"),
)

INNOCENTS: tuple[tuple[Callable[[Module], list[str]], str, str], ...] = (
    (one_way_floors, "config", "from wds_async.errors import ConfigError\nimport json"),
    (one_way_floors, "dataset", "from wds_async.config import settings"),
    (one_way_floors, "cli.ls", "import wds_async"),
    (environment_in_one_room, "environment", "import os\nos.environ.get('A')"),
    (no_shared_randomness, "filters.shuffling", "import random\nrandom.Random(1).shuffle([1])"),
    (no_shared_randomness, "world", "import random\nrandom.random()"),
    (no_shared_randomness, "filters.basic", "import numpy as np\nnp.random.default_rng(1)"),
    (subprocess_in_pipe, "storage.pipe", "import subprocess"),
    (print_in_cli, "cli.env", "print(1)"),
    (urls_parsed_once, "storage.base", "from wds_async.urls import scheme"),
    (async_in_its_rooms, "transfer.fetch", "async def f(): pass"),
    (torch_late_and_in_its_rooms, "loader", "def f():\n    import torch"),
    (torch_late_and_in_its_rooms, "urls", "if TYPE_CHECKING:\n    import torch"),
    (nothing_posix_at_import, "cache", "def f():\n    import fcntl"),
    (sorted_all, "urls", "__all__ = ['C2', 'C10', 'DD', 'Ab', 'a_b', 'ab']"),
    (stores_in_their_folders, "storage.s3.backend", "from wds_async.storage.s3 import errors\nname = 's3'"),
    (stores_in_their_folders, "storage.sink", "from wds_async.storage.http import messages\nname = 'http'"),
    (doors_hold_no_logic, "__init__", "x = 1\ndef __getattr__(name): return name"),
    (modules_by_name_in_their_rooms, "world", "from wds_async import packages\ntorch = packages.loaded('torch')"),
    (modules_by_name_in_their_rooms, "gopen", "import sys\nsys.modules[__name__] = gopen"),
)


@pytest.mark.parametrize(("rule", "room", "source"), OFFENDERS)
def test_a_rule_can_fail(rule: Callable[[Module], list[str]], room: str, source: str) -> None:
    assert rule(Module(room, source))


@pytest.mark.parametrize(("rule", "room", "source"), INNOCENTS)
def test_a_rule_spares_the_innocent(rule: Callable[[Module], list[str]], room: str, source: str) -> None:
    assert not rule(Module(room, source))


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in OFFENDERS} == set(RULES)


# -- rules about several modules ----------------------------------------------------------------------------------


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms that import each other, directly or around corners."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(room: str, path: list[str]) -> None:
        if room in path:
            found.append([*path[path.index(room) :], room])
        elif room not in done:
            for other in sorted(graph.get(room, ())):
                visit(other, [*path, room])
            done.add(room)

    for start in sorted(graph):
        visit(start, [])
    return found


def import_graph() -> dict[str, set[str]]:
    """Every room and the rooms that it imports from, for types too; doors are no rooms of it."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if module.room.removesuffix(".__init__") not in DOORS:
            room = module.room.removesuffix(".__init__")
            targets = {room_of(i.target) for i in module.imports}
            graph.setdefault(room, set()).update(t for t in targets if t and t != room)
    return graph


CIRCLES_LEFT: tuple[tuple[str, ...], ...] = ()
"""Rooms that still import each other. It only gets shorter."""


def test_no_rooms_import_each_other() -> None:
    left = {frozenset(rooms) for rooms in CIRCLES_LEFT}
    assert {frozenset(circle) for circle in circles(import_graph())} == left
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]


SMALL = 100
SMALL_ROOMS = (
    "_version",
    "*__init__",
    "__main__",
    "world",
    "packages",
    "storage.local",
    "cli.*",
    "distributed.engines.*",
    "legacy.*",
    "redact",
    "*protocols",
)
"""Doors, commands, protocols, and rooms of one side effect: they may be short and have a single importer."""


def fragments(modules: list[Module], graph: dict[str, set[str]]) -> list[str]:
    """Modules of fewer than `SMALL` lines that a single other module imports: the two are one thought."""
    return [
        f"{module.room} has {len(module.source.splitlines())} lines and one importer, {importers[0]}: merge them"
        for module in modules
        if module.room not in DOORS and not module.is_in(SMALL_ROOMS) and len(module.source.splitlines()) < SMALL
        for importers in [[room for room, targets in graph.items() if module.room in targets]]
        if len(importers) == 1
    ]


def test_no_module_is_a_fragment_of_another() -> None:
    assert fragments(MODULES, import_graph()) == []
    assert fragments([Module("a", "x = 1"), Module("b", "import a")], {"b": {"a"}, "a": set()})


def repeated_classes(modules: list[Module]) -> dict[str, list[str]]:
    """Names of classes that several modules define."""
    rooms: dict[str, list[str]] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                rooms.setdefault(node.name, []).append(module.room)
    return {name: where for name, where in rooms.items() if len(where) > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    assert repeated_classes([module for module in MODULES if not module.is_in(INTEGRATION_ROOMS)]) == {}
    assert repeated_classes([Module("a", "class X: pass"), Module("b", "class X: pass")]) == {"X": ["a", "b"]}


FOREIGN = {"exn", "error", "filesystem", "_stream", "bearer"}
"""Names of values that are not ours: exceptions, fsspec's filesystems and their files, Google's credentials."""


def _declared(tree: ast.Module) -> Iterator[str]:
    """The attributes that the classes of a module declare."""
    for node in (node for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for node in ast.walk(cls)):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store):
            yield node.attr


def _made_here(function: ast.AST) -> set[str]:
    """Local names that a call's result is assigned to: who makes an object may fill it in."""
    made = (node for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
    return {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}


def assignments_into_other_rooms(modules: list[Module]) -> list[str]:
    """Assignments to an attribute of an object whose class lives in another room."""
    declared: dict[str, set[str]] = {}
    for module in modules:
        declared.setdefault(module.room.rpartition(".")[0] or module.room, set()).update(_declared(module.tree))
    everywhere = set().union(*declared.values())
    complaints = []
    for module in modules:
        foreign = everywhere - declared[module.room.rpartition(".")[0] or module.room]
        functions = (node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for scope in functions:
            spared = _made_here(scope) | FOREIGN | {"self", "cls"}
            complaints += [
                f"{module.room}, line {node.lineno}: {ast.unparse(node)} = …: call a method of its class"
                for node in ast.walk(scope)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store | ast.Del)
                and node.attr in foreign
                and ast.unparse(node.value).rpartition(".")[2] not in spared
            ]
    return complaints


def test_no_room_assigns_into_objects_of_another() -> None:
    # A callback corrects what its framework gives it.
    assert assignments_into_other_rooms([one for one in MODULES if not one.is_in(INTEGRATION_ROOMS)]) == []
    owner = Module("tar.parse", "class Parser:\n    def __init__(self):\n        self.depth = 0")
    for base, complains in (("parser", True), ("self", False)):
        user = Module("cli.ls", f"def f(self, parser):\n    {base}.depth = 1")
        assert bool(assignments_into_other_rooms([owner, user])) == complains


_IMPORT_ALL = """\
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({"torch", "s3fs", "gcsfs", "adlfs", "botocore", "azure", "PIL", "webdataset"} & set(sys.modules)))
"""


def test_importing_everything_brings_no_torch_and_no_cloud() -> None:
    rooms = [module.room.removesuffix(".__init__") for module in MODULES if not module.is_in(INTEGRATION_ROOMS)]
    names = [f"{PACKAGE}.{room}" for room in sorted(rooms) if room not in DOORS and ".shim." not in room]
    command = [sys.executable, "-c", _IMPORT_ALL, PACKAGE, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")
    assert subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, "PIL"], capture_output=True, text=True, check=True
    ).stdout.split() == ["PIL"]


def test_the_engine_is_imported_with_the_first_dataset() -> None:
    code = "import sys, wds_async; wds_async.WebDataset; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    modules = set(done.stdout.split())
    assert "wds_async.dataset" in modules
    assert not {"numpy", "asyncio", "ssl", "http.client", "httptools", "multiprocessing", "tempfile"} & modules
    assert not {name for name in modules if name.startswith(("wds_async.transfer", "wds_async.shardcache"))}


# The shim becomes another module when it is imported.
@pytest.mark.parametrize("room", sorted(r for r in ROOMS - {"__main__"} if ".shim." not in r))
def test_all_names_exist(room: str) -> None:
    if Module(room, "").is_in(INTEGRATION_ROOMS):
        need_package({"nodes": "torchdata"}.get(room, room.rpartition(".")[2]))
    module = importlib.import_module(PACKAGE if room == "__init__" else f"{PACKAGE}.{room}")
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []
