"""The package as it installs: what the wheel holds, what imports what, and what is imported when.

Hugging Face ships a package that is imported as `kernels`, so our folder of that name must never end up at the top of
an environment; and `info`, `verify` and the reader must not pay for torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "extractor", "training")  # each may import those before it
SOURCES = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = [
    ".".join(("permafrost", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCES
    if path.parent.name != "training"
]


def python(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints, started where no folder of ours is on its path."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# The wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree so that the checkout stays as it is."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in PACKAGES:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=out, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def test_the_wheels_top_level_is_permafrost_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_names(wheel)}
    assert tops == {"permafrost", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}


def test_the_wheel_holds_every_module_and_the_data(wheel: Path) -> None:
    names = set(wheel_names(wheel))
    expected = {f"permafrost/{p.relative_to(ROOT).as_posix()}" for p in SOURCES if p.parent.name != "training"}
    data = {f"permafrost/{name}" for name in ("extractor/sample.txt", "extractor/py.typed", "kernels/py.typed")}
    assert expected | data <= names
    assert not [name for name in names if "test" in name or "benchmark" in name]


def test_the_wheel_installs_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        entry_points = next(name for name in file.namelist() if name.endswith("entry_points.txt"))
        text = file.read(entry_points).decode()
    assert "extract = permafrost.extractor.cli:main" in text
    assert "permafrost = permafrost.extractor.cli:permafrost" in text


def test_the_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    """Unpacked and put first on the path, it serves its own modules and its sample."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", str(finder))]
sys.path.insert(0, {str(tmp_path)!r})
import permafrost.extractor.corpus as corpus
print(corpus.__file__)
print(sum(table.num_rows for _, table in corpus.open_corpus("sample").batches(("text",))))
"""
    file_name, rows = python(code, tmp_path).splitlines()
    assert file_name == str(tmp_path / "permafrost" / "extractor" / "corpus.py")
    assert rows == "600"


# What is imported.


def test_both_packages_called_kernels_live_in_one_environment(tmp_path: Path) -> None:
    code = (
        "import kernels as theirs, permafrost.kernels as ours; print(theirs.get_kernel, theirs.__file__, ours.__file__)"
    )
    *_, theirs_file, ours_file = python(code, tmp_path).split()
    assert Path(theirs_file).parent != ROOT / "kernels"
    assert Path(ours_file) == ROOT / "kernels" / "__init__.py"
    assert importlib.metadata.packages_distributions()["kernels"] == ["kernels"]


@pytest.mark.parametrize("module", ["cli", "reader", "verify", "report", "config", "corpus", "store"])
def test_what_needs_no_model_does_not_import_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, json, permafrost.extractor.{module}; print(json.dumps([*sys.modules]))"
    loaded = {name.split(".")[0] for name in json.loads(python(code, tmp_path))}
    assert loaded.isdisjoint({"torch", "triton", "transformers"})


def test_without_triton_every_module_imports_and_the_twin_serves(tmp_path: Path) -> None:
    code = f"""
import importlib, sys
sys.modules["triton"] = sys.modules["triton.language"] = None
for name in {MODULES!r}:
    importlib.import_module(name)
import torch
from permafrost.kernels.gather import gather
slab, nonfinite = torch.zeros(1, 1, 256, 3), torch.zeros(1, dtype=torch.int32)
gather(torch.ones(2, 3), torch.tensor([0, 2]), torch.tensor([5]), slab, 0, nonfinite, "sum")
print(slab[0, 0, 5].tolist())
"""
    assert python(code, tmp_path) == "[2.0, 2.0, 2.0]"


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports anywhere in it, by its full name; relative imports resolved."""
    package = ["permafrost", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    """`kernels` ← `extractor` ← `training`, and nothing imports `tests` or `benchmarks`."""
    mine = PACKAGES.index(path.relative_to(ROOT).parts[0])
    later = {f"permafrost.{name}" for name in PACKAGES[mine + 1 :]}
    test_modules = {p.stem for folder in ("tests", "benchmarks") for p in (ROOT / folder).glob("*.py")}
    for name in imported(path):
        assert ".".join(name.split(".")[:2]) not in later
        assert name.split(".")[0] not in {*PACKAGES, "tests", "benchmarks", *test_modules}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernels_know_torch_and_triton_only(path: Path) -> None:
    allowed = {"torch", "triton", "permafrost", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imported(path)} <= allowed


# What is pinned.


def test_constraints_pin_names_and_versions_alone() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.!+]*", line), line
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)


def test_every_dependency_of_ours_is_pinned() -> None:
    """The constraints name all that pyproject.toml asks for, so that two machines install the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    asked = importlib.metadata.requires("permafrost") or []
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9_.-]", spec)[0]).lower() for spec in asked}
    assert names - pinned == set()
