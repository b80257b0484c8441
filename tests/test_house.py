"""The shape of ``src`` and ``lab/src``: who imports whom, where files lie, what names are taken."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The library, and the laboratory beside it.
SOURCES = {"lln": ROOT / "src", "lln_lab": ROOT / "lab/src"}
PACKAGE = SOURCES["lln"] / "lln"

LOOSE = {
    "errors",
    "files",
    "observers",
    "precision",
    "reference",
    "tracing",
}
MOST_ROOMS = 12
# Of Python, comments and empty lines included; whoever reads it all has read this much.
MOST_LINES = 36_000
LONGEST_CHAIN_OF_ROOMS = 9
MOST_GROUPS_OF_KERNELS, LONGEST_CHAIN_OF_GROUPS = 8, 7

# A folder may have its own of these: they do the same there. ``run`` is what executes a call.
SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "command.py", "page.py", "report.py", "run.py"}


def name_of(path: Path, source: Path) -> str:
    """``lln.nn.heads`` for ``src/lln/nn/heads.py``, ``lln.nn`` for ``src/lln/nn/__init__.py``."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(package: str) -> dict[str, Path]:
    source = SOURCES[package]
    return {name_of(path, source): path for path in sorted((source / package).rglob("*.py"))}


MODULES = {package: modules_of(package) for package in SOURCES}
TREES = {
    name: ast.parse(path.read_text("utf-8"))
    for modules in MODULES.values()
    for name, path in modules.items()
}
each_package = pytest.mark.parametrize("package", SOURCES)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, functions included, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            children = child.orelse
        else:
            children = [child]
        for one in children:
            yield one
            yield from executed(one)


def imports_of(name: str, modules: dict[str, Path], tree: ast.AST) -> set[str]:
    """The modules of the package that a module imports, at any depth of its code."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in executed(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                home = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{home}.{base}".rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
    return (found & set(modules)) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting.extend(graph[name])
        reach[start] = seen
    groups = {
        tuple(sorted({one for one in reach[name] if name in reach[one]} | {name}))
        for name in graph
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The most nodes that import one another in a row; the graph has no circles."""
    chains: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in chains:
            chains[name] = [name, *max((chain(one) for one in graph[name]), key=len, default=[])]
        return chains[name]

    return max((chain(name) for name in graph), key=len)


def grouped(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """The imports among the folders and loose modules of a package."""

    def group(name: str) -> str:
        return name.removeprefix(f"{package}.").partition(".")[0]

    inside = [name for name in graph if name.startswith(f"{package}.")]
    found: dict[str, set[str]] = {group(name): set() for name in inside}
    for name in inside:
        others = (group(one) for one in graph[name] if one.startswith(f"{package}."))
        found[group(name)].update(other for other in others if other != group(name))
    return found


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


@each_package
def test_no_modules_import_each_other_in_a_circle(package):
    modules = MODULES[package]
    assert circles({name: imports_of(name, modules, TREES[name]) for name in modules}) == []


def test_the_search_for_circles_finds_them():
    modules = {name: Path(f"{name}.py") for name in ("lln.a", "lln.b", "lln.c", "lln.d")}
    codes = {
        "lln.a": "from lln import b\nfrom lln.d import x",
        "lln.b": "def f():\n    from lln.c import x",
        "lln.c": "from . import a",
        "lln.d": "if TYPE_CHECKING:\n    from lln import a",
    }
    found = {name: imports_of(name, modules, ast.parse(code)) for name, code in codes.items()}
    assert found["lln.d"] == set()
    assert circles(found) == [["lln.a", "lln.b", "lln.c"]]


def test_the_top_of_the_package_is_small():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    rooms = [path.name for path in entries if path.is_dir()]
    loose = {path.stem for path in entries if path.suffix == ".py"}
    assert len(rooms) <= MOST_ROOMS, rooms
    assert loose == LOOSE | {"__init__", "__main__"}


def test_the_library_is_small():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
    assert lines <= MOST_LINES


@each_package
def test_rooms_lie_above_one_another(package):
    modules = MODULES[package]
    rooms = grouped({name: imports_of(name, modules, TREES[name]) for name in modules}, package)
    assert circles(rooms) == []
    assert len(longest_chain(rooms)) <= LONGEST_CHAIN_OF_ROOMS, longest_chain(rooms)


def test_kernels_are_few_groups_above_one_another():
    modules = MODULES["lln"]
    graph = {name: imports_of(name, modules, TREES[name]) for name in modules}
    groups = grouped(graph, "lln.kernels")
    assert {"launching", "lln", "keys"} < set(groups)
    assert len(groups) <= MOST_GROUPS_OF_KERNELS, sorted(groups)
    assert circles(groups) == []
    assert len(longest_chain(groups)) <= LONGEST_CHAIN_OF_GROUPS, longest_chain(groups)


def test_the_search_for_the_longest_chain_finds_it():
    graph = {
        "lln.k.a.one": {"lln.k.b.two", "lln.k.a.other", "lln.top"},
        "lln.k.a.other": {"lln.k.c"},
        "lln.k.b.two": {"lln.k.c"},
        "lln.k.c": set(),
        "lln.top": {"lln.k.c"},
    }
    groups = grouped(graph, "lln.k")
    assert groups == {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert longest_chain(groups) == ["a", "b", "c"]
    graph["lln.k.c"] = {"lln.k.a.other"}
    assert circles(grouped(graph, "lln.k")) == [["a", "b", "c"]]


@each_package
def test_no_two_files_share_a_name(package):
    places = defaultdict(list)
    for name, path in MODULES[package].items():
        if path.name not in SHARED_FILE_NAMES:
            places[path.name].append(name)
    assert not repeated(places)


@each_package
def test_no_two_classes_share_a_name(package):
    places = defaultdict(list)
    for name in MODULES[package]:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not repeated(places)


def test_the_library_and_its_tests_do_without_the_laboratory():
    """Whoever installs ``lln`` alone can use it and test it."""
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] in ("lab", "lln_lab") for name in names), path
