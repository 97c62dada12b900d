"""The rules of the design that a reader relies on: who imports whom, how large a module gets, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "lucidrl"
MODULES = sorted(LIBRARY.rglob("*.py"))

# Every part may import those of lower rank; parts of equal rank never see each other.
RANKS = {
    "cli": 11,
    "trainers": 11,
    "lm_eval": 11,
    "recipes": 10,
    "report": 9,
    "algorithms": 8,
    "collectors": 7,
    "tools": 6.5,
    "models": 6,
    "envs": 6,
    "rewards": 6,
    "losses": 5,
    "data": 4,
    "checkpoint": 4,
    "distributed": 3,
    "utils": 2,
    "profiling": 1,
    "errors": 0,
}
OPTIONAL = {
    "ray",
    "vllm",
    "wandb",
    "mlflow",
    "trackio",
    "gymnasium",
    "plotly",
    "matplotlib",
    "reasoning_gym",
    "math_verify",
    "jsonschema",
    "pyarrow",
    "datasets",
    "imageio",
    "lm_eval",
}
HEAVY = {"torch", "tensordict", "transformers", "numpy", "tensorboard", "safetensors", *OPTIONAL}
MOST_LINES = 350


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Dotted names that import statements below `node` refer to, each `from` import with what it takes."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def imports_at_import_time(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported: neither in a function nor for type checkers only."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_modules(node)
        pending += ast.iter_child_nodes(node)


def own_imports(tree: ast.Module) -> Iterator[str]:
    yield from (name for name in imported_modules(tree) if name.startswith("lucidrl."))


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in MODULES}


def test_every_part_has_a_place_in_the_order():
    parts = {path.stem if path.is_file() else path.name for path in LIBRARY.iterdir()}
    parts -= {"__init__", "__pycache__", "py"}
    assert parts <= RANKS.keys()


def test_parts_import_only_those_below_them(trees):
    wrong = []
    for path, tree in trees.items():
        importer = name_of(path)
        part = importer.partition(".")[2].partition(".")[0]
        for imported in own_imports(tree):
            other = imported.split(".")[1]
            if other in (part, "errors", "__version__") or not part or "interfaces" in imported.split("."):
                continue
            if RANKS[other] >= RANKS[part]:
                wrong.append(f"{importer} imports {imported}")
    assert not wrong


def test_models_and_envs_never_see_each_other(trees):
    for path, tree in trees.items():
        part = name_of(path).split(".")[1:2]
        other = {"models": "envs", "envs": "models"}.get(part[0] if part else "")
        assert not [name for name in own_imports(tree) if other and name.split(".")[1] == other], path


@pytest.mark.parametrize(("file_name", "allowed"), [("interfaces.py", {"torch"}), ("config.py", set())])
def test_interfaces_and_configs_import_nothing_heavy(trees, file_name, allowed):
    for path, tree in trees.items():
        if path.name == file_name:
            found = {name.partition(".")[0] for name in imports_at_import_time(tree)}
            assert not found & (HEAVY - allowed), path


def test_optional_packages_are_imported_at_use(trees):
    for path, tree in trees.items():
        assert not {name.partition(".")[0] for name in imports_at_import_time(tree)} & OPTIONAL, path


def test_nothing_prints(trees):
    for path, tree in trees.items():
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"], path


def test_no_module_is_too_long_to_read():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in MODULES}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    "module",
    [
        "lucidrl",
        "lucidrl.cli",
        "lucidrl.recipes.configs",
        "lucidrl.models.policy",
        "lucidrl.recipes.profile",
        "lucidrl.report.run_data",
    ],
)
def test_what_answers_at_once_loads_nothing_heavy(module):
    heavy = sorted(HEAVY)
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_settings_are_looked_at_before_torch_is_loaded():
    """Per-frame ranges are armed then, and a mistake raises at once."""
    code = "import sys, lucidrl.recipes.run; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"
