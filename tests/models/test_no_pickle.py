"""No code path can unpickle, or run code that a model brings (SECURITY S12)."""

import ast
from pathlib import Path

import pytest

import chatd

ROOT = Path(chatd.__file__).parents[1]
SOURCES = sorted(path for part in ("chatd", "kernels", "tui") for path in (ROOT / part).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "yaml.load", "np.load", "numpy.load"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            found.append(dotted(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found.append("trust_remote_code")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_neither_unpickles_nor_runs_a_models_code(path: Path) -> None:
    assert violations(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "torch.load(path)", "f(trust_remote_code=True)"],
)
def test_the_check_finds_what_it_looks_for(line: str) -> None:
    assert len(violations(ast.parse(line))) == 1
