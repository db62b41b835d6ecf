"""What is installed, what imports what, and that no folder of ours hides a library."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from chatd import __version__

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, cwd="/").stdout


def closure(extra: str | None) -> set[str]:
    """Return the names of all distributions that an install with one extra brings."""
    seen: set[tuple[str, str]] = set()
    todo = [("chatd", extra or "")]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                key = canonicalize_name(requirement.name)
                todo += [(key, inner) for inner in ("", *requirement.extras)]
    return {name for name, _ in seen}


@pytest.mark.parametrize("folder", ["kernels", "tui", "configs", "tests"])
def test_a_top_folder_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_there_is_no_root_conftest() -> None:
    assert not (ROOT / "conftest.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_transformers_finds_no_kernels_package_in_our_folder() -> None:
    """transformers asks the import system for `kernels`; ours must not answer with a package of that name."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert run("-c", code).strip() == "None"
    assert "LlamaConfig" in run("-c", "from transformers import LlamaConfig; print(LlamaConfig)")


def test_the_packages_import_by_their_own_names() -> None:
    for name in ("chatd", "chatd_kernels", "chatd_tui"):
        assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    "module", ["chatd.cli", "chatd.client", "chatd.protocol", "chatd_tui.app", "chatd.engine.core", "chatd.server.app"]
)
def test_no_front_module_loads_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    assert run("-c", code).strip() == "[]"


def test_the_client_loads_no_terminal_library() -> None:
    assert run("-c", "import sys, chatd.client; print('textual' in sys.modules)").strip() == "False"


def test_a_laptop_install_never_pulls_torch() -> None:
    names = closure("tui")
    assert {"textual", "websockets", "typer"} <= names
    assert not names & {"torch", "transformers", "numba", "triton", "numpy"}


def test_the_server_extra_brings_the_engine() -> None:
    assert {"torch", "tokenizers", "safetensors", "uvicorn"} <= closure("server")


def test_every_pinned_version_is_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    for requirement in map(Requirement, wanted):
        if requirement.name != "triton":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"chatd-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"chatd", "chatd_kernels", "chatd_tui", f"chatd-{__version__}.dist-info"}
