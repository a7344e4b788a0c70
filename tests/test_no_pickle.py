"""Nothing that executes foreign bytes, in any source file of the product, nor beside it.

Compared with: the syntax trees. Run alone: pytest tests/test_no_pickle.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("loco", "coordinator", "worker", "benchmarks", "examples", "deploy", "docs")
FILES = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "torch.load", "torch.hub.load", "yaml.load"}
OBJECTS = {  # of torch.distributed: they unpickle what another rank sends
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "recv_object_list",
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    """`torch.load` of the tree of `torch.load`; empty for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=func) if dotted(func) in CALLS:
                yield dotted(func)
            case ast.Call(func=func) if dotted(func).rpartition(".")[2] in OBJECTS:
                yield dotted(func)
            case ast.keyword(arg="trust_remote_code" | "allow_pickle" as name):
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    yield name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_executes_foreign_bytes(path: Path) -> None:
    assert not list(found(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "eval(text)",
        "dist.broadcast_object_list(found)",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(found(ast.parse(code)))
