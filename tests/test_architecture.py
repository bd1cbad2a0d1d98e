"""Structure of the code: imports go one way, functions and files are short, and nothing unpickles or evaluates."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest

from tlt.config.registry import DRAFTERS, REWARDS

SOURCE = Path(__file__).parent.parent / "src" / "tlt"
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"

# a module may import from its own line and from the lines above it
LAYERS = [
    line.split()
    for line in """
    types config sampling sampling_kernel cuda_graph files wording gain metrics trace energy spelling
    stopping progress report
    models attention
    data rewards
    draft
    engine vllm
    spot
    environments
    store
    build
    rl
    loop
    cluster
    run
    commands verify integrations
    cli __main__
    """.strip().splitlines()
]
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400
MAX_CLASS = (250, 15, 12)
"""lines, methods, attributes that methods set"""
LARGER = {
    "cluster/supervisor.py:Supervisor": (277, 24, 13),
    "cluster/drafter_training.py:DrafterTraining": (201, 19, 15),
    "cluster/run_worker.py:RunWorker": (129, 18, 4),
    "cluster/worker.py:Worker": (123, 19, 12),
    "cluster/workers.py:RayPool": (154, 18, 11),
    "draft/eagle.py:EagleLayer": (57, 7, 14),
    "draft/learned.py:EagleDrafter": (120, 12, 13),
    "engine/engine.py:Engine": (254, 27, 15),
    "engine/kv_cache.py:KVCache": (127, 18, 5),
    "engine/protocol.py:RolloutEngine": (73, 16, 0),
    "rewards/score_pool.py:ScorePool": (175, 18, 10),
    "spot/spot.py:SpotTrainer": (186, 18, 14),
    "spot/trainer.py:DrafterTrainer": (236, 18, 14),
    "vllm/vllm_engine.py:VllmEngine": (227, 21, 15),
    "vllm/target.py:VllmTarget": (131, 8, 13),
}
"""classes above a limit: their size, which may shrink and not grow"""
SAME_NAME = {"Rollout", "Saved"}
"""names that two classes have"""

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "numpy.load", "np.load", "os.system"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Return the dotted names of all imports, including those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "tlt." * bool(node.level) + (node.module or "")
            yield base
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def as_run(tree: ast.Module) -> ast.Module:
    """Return the code without imports for type checkers."""
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return ast.Module([node for node in tree.body if node not in hidden], [])


def module_of(path: Path) -> str:
    """The first name under tlt: `engine` for engine/committing.py, `cli` for cli.py."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def wrong_way(module: str, tree: ast.AST) -> list[str]:
    """Return the imports from a layer above the module's own."""
    inner = {name.split(".")[1] for name in imports(tree) if name.startswith("tlt.") and name.split(".")[1] in LAYER_OF}
    return sorted(name for name in inner if LAYER_OF[name] > LAYER_OF[module])


def imported(module: str) -> set[str]:
    """Return the first names under tlt that a package or module imports."""
    names = [name for path in files() if module_of(path) == module for name in imports(parse(path))]
    return {name.split(".")[1] for name in names if name.startswith("tlt.")} - {module}


def reachable(arrows: set[tuple[str, str]], start: str) -> set[str]:
    """Return the nodes that arrows lead to from `start`, directly or through others."""
    found, left = set[str](), [start]
    while left:
        new = {there for here, there in arrows if here == left[-1]} - found
        left.pop()
        found |= new
        left += new
    return found


def forbidden(tree: ast.AST) -> list[str]:
    found = [name for name in imports(tree) if name.split(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.append(ast.unparse(node.func))
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle", "shell"):
            found += [node.arg] if ast.unparse(node.value) != "False" else []
    return found


def long_functions(tree: ast.AST) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def class_sizes(tree: ast.AST) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            parts = [part for method in methods for part in ast.walk(method) if isinstance(part, ast.Attribute)]
            stored = [part for part in parts if isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"]
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.name, (lines, len(methods), len({part.attr for part in stored}))


def exceeds(size: tuple[int, ...], limits: tuple[int, ...]) -> bool:
    return any(number > limit for number, limit in zip(size, limits, strict=True))


def test_every_module_has_its_place_among_the_layers() -> None:
    unplaced = sorted({module_of(path) for path in files()} - LAYER_OF.keys() - {"__init__"})
    assert not unplaced, f"give {', '.join(unplaced)} a line in LAYERS"


def test_the_page_shows_the_imports_between_packages() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Who may import whom")[1].split("\n## ")[0]
    arrows = set(re.findall(r"^    (\w+) --> (\w+)$", section, re.MULTILINE))
    shown = {node for arrow in arrows for node in arrow}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {"config"} <= shown
    assert not [f"{here} --> {there}" for here, there in arrows if there not in imported(here)]
    missing = {node: imported(node) & shown - reachable(arrows, node) for node in sorted(shown)}
    assert not {node: names for node, names in missing.items() if names}


def faults(check: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return the findings of a check for each file that has some."""
    return {str(path.relative_to(SOURCE)): found for path in files() if (found := check(path))}


def test_imports_point_one_way() -> None:
    inner = [path for path in files() if module_of(path) != "__init__"]
    assert len(inner) == len(files()) - 1
    assert faults(lambda path: wrong_way(module_of(path), parse(path)) if path in inner else []) == {}
    light = imports(as_run(parse(SOURCE / "__init__.py")))
    assert "tlt" not in {name.split(".")[0] for name in light}


def test_files_and_functions_are_short() -> None:
    assert faults(lambda path: long_functions(parse(path))) == {}
    assert [path for path in files() if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES] == []


def test_a_short_module_has_several_importers() -> None:
    """A module under 40 lines that only one other imports belongs into that one."""
    users = Counter(name for path in files() for name in set(imports(parse(path))))
    short = [path for path in files() if len(path.read_text(encoding="utf-8").splitlines()) < 40]
    names = {".".join(("tlt", *path.relative_to(SOURCE).with_suffix("").parts)) for path in short}
    started = {"tlt.__main__", "tlt.integrations.verl_plugin", "tlt.integrations.verl_worker"}
    registered = {entry.make.partition(":")[0] for entry in [*DRAFTERS.values(), *REWARDS.values()]}
    apart = started | registered | {"tlt.vllm.processor"}  # these are started by their names
    assert {name for name in names - apart if not name.endswith("__init__") and users[name] < 2} == set()


def test_nothing_unpickles_or_evaluates() -> None:
    assert faults(lambda path: forbidden(parse(path))) == {}


@pytest.mark.parametrize(
    ("check", "code", "found"),
    [
        (partial(wrong_way, "draft"), "from tlt.engine.committing import num_accepted", ["engine"]),
        (partial(wrong_way, "draft"), "import tlt.engine.committing as w", ["engine"]),
        (partial(wrong_way, "draft"), "from tlt import engine", ["engine"]),
        (partial(wrong_way, "draft"), "def f():\n    from ..engine import num_accepted", ["engine"]),
        (
            partial(wrong_way, "models"),
            "from tlt.draft import chains\nfrom tlt.engine import rows",
            ["draft", "engine"],
        ),
        (partial(wrong_way, "engine"), "from tlt.draft.chains import a\nfrom tlt.types import Request", []),
        (forbidden, "import pickle", ["pickle"]),
        (forbidden, "def f():\n    from cloudpickle import loads", ["cloudpickle", "cloudpickle.loads"]),
        (forbidden, "torch.load('x')", ["torch.load"]),
        (forbidden, "eval('1')\nexec('1')", ["eval", "exec"]),
        (forbidden, "AutoModel.from_pretrained(p, trust_remote_code=flag)", ["trust_remote_code"]),
        (forbidden, "model.eval()\nload_file('x')\nrun(shell=False)", []),
    ],
)
def test_the_checks_see_every_form(check: Callable[[ast.AST], list[str]], code: str, found: list[str]) -> None:
    assert check(ast.parse(code)) == found


def test_each_class_has_a_name_of_its_own() -> None:
    trees = [parse(path) for path in files()]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == SAME_NAME


def test_each_module_has_a_file_name_of_its_own() -> None:
    names = Counter(path.name for path in files() if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_classes_are_small() -> None:
    sizes = [
        (f"{path.relative_to(SOURCE)}:{name}", size) for path in files() for name, size in class_sizes(parse(path))
    ]
    limits = {name: tuple(map(max, MAX_CLASS, size)) for name, size in LARGER.items()}
    assert [(name, size) for name, size in sizes if exceeds(size, limits.get(name, MAX_CLASS))] == []
    above = {name for name, size in sizes if exceeds(size, MAX_CLASS)}
    assert sorted(LARGER.keys() - above) == [], "these are within the limits now: remove them from LARGER"


def test_the_size_of_a_class_is_counted() -> None:
    code = "class A:\n  x = 1\n  def f(self):\n    self.a, self.b = 1, other.c\n  def g(self):\n    self.a = 2"
    assert list(class_sizes(ast.parse(code))) == [("A", (6, 2, 2))]
    assert [exceeds((250, 15, 12), MAX_CLASS), exceeds((250, 16, 12), MAX_CLASS)] == [False, True]


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest takes two files of one name for one module, and runs neither."""
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, after in pairwise(names) if name == after] == []
