"""The arrows between the modules, read off the import statements, and what no file may contain."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in ("impls", "harness")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
}
FRAMEWORKS = {"numpy": set(), "jax": {"jax", "flax"}, "torch": {"torch"}}


def imports(source: str, package: str = "") -> set[str]:
    """Every module that the source imports, also inside functions, by dotted name (`from a import b` gives a.b)."""

    def names(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in ("import_module", "__import__"):
                    yield module

    return {name for node in ast.walk(ast.parse(source)) for name in names(node)}


def imports_of(file: str) -> set[str]:
    return imports(SOURCES[file].read_text(encoding="utf-8"), ".".join(Path(file).parent.parts))


def outside(file: str, *allowed: str) -> set[str]:
    """What the file imports besides the standard library and modules at or below the allowed names."""
    found = {name for name in imports_of(file) if name.split(".")[0] not in sys.stdlib_module_names}
    return {name for name in found if not any(f"{name}.".startswith(f"{module}.") for module in allowed)}


def below(folder: str) -> list[str]:
    return sorted(file for file in SOURCES if file.startswith(folder))


def test_imports_are_found() -> None:
    source = "import a.b as c\ndef f():\n    from d import e\n    from . import g\n    importlib.import_module('h.i')"
    assert imports(source, "p.q") == {"a.b", "d.e", "p.q.g", "h.i"}
    assert imports("from ..x import y", "p.q") == {"p.x.y"}


@pytest.mark.parametrize("file", below("impls/"))
def test_an_implementation_knows_numpy_its_own_framework_and_the_contract(file: str) -> None:
    framework = Path(file).stem.split("_")[0]
    if framework not in FRAMEWORKS:  # spec, __init__
        assert not outside(file)
        return
    own = {name for name in imports_of(file) if name.startswith(f"impls.{framework}_")}
    assert not outside(file, "numpy", "jaxtyping", "impls.spec", *FRAMEWORKS[framework], *own)


@pytest.mark.parametrize("file", below("harness/gates/"))
def test_a_gate_knows_numpy_and_the_contract(file: str) -> None:
    assert not outside(file, "numpy", "jaxtyping", "impls.spec", "harness.gates", "harness.case")


@pytest.mark.parametrize("file", list(SOURCES))
def test_only_export_and_reference_import_transformers(file: str) -> None:
    if file not in ("harness/export.py", "harness/reference.py"):
        assert not any(name.split(".")[0] == "transformers" for name in imports_of(file))


@pytest.mark.parametrize("file", list(SOURCES))
def test_nothing_imports_the_tests(file: str) -> None:
    assert not any(name.split(".")[0] in ("tests", "pytest", "conftest") for name in imports_of(file))


def test_the_comparing_process_loads_no_framework() -> None:
    code = "import sys, harness.compare; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "harness" in loaded.split() and not {"torch", "jax", "flax", "transformers"} & set(loaded.split())


def test_two_implementations_read_side_by_side() -> None:
    """The same functions in the same order (an automatic backward needs no inverse_rms of its own)."""

    def functions(file: str) -> list[str]:
        tree = ast.parse(SOURCES[file].read_text(encoding="utf-8"))
        return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]

    page = functions("impls/numpy_attention.py")
    page = [name for name in page[page.index("project") : page.index("merge") + 1] if name != "inverse_rms"]
    for file in ("impls/jax_attention.py", "impls/torch_attention.py"):
        names = functions(file)
        assert names[names.index("project") : names.index("merge") + 1] == page


def test_no_file_names_a_path_of_a_machine() -> None:
    folders = (ROOT / name for name in (".ci", "artifacts/evidence", "harness", "impls", "tests"))
    files = [*ROOT.iterdir(), *(file for folder in folders for file in folder.rglob("*"))]
    files = [file for file in files if file.is_file() and file.name != ".git" and file.suffix != ".pyc"]
    assert {"README.md", "constraints.txt", "run", "spec.py"} <= {file.name for file in files}
    path = re.compile(rb"(?<![\w.~/-])(/(home|root|work|tmp|mnt|Users)/\w|[A-Z]:\\+Users)")
    found = {file: path.search(file.read_bytes()) for file in files}
    assert not {file.name: match[0] for file, match in found.items() if match}
