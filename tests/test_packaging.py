"""The wheel, built and installed into a new virtual environment: what it holds, and that it starts.

Compared with: the tree it is built from. Dependencies are those of the running interpreter; that
they can be installed is what CI's own set-up shows. Run alone: pytest tests/test_packaging.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("loco", "coordinator", "worker", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as in the image, so that no build directory is left in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", str(out), str(source),
    )  # fmt: skip
    (wheel,) = out.glob("loco-*.whl")
    return wheel


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={"PATH": "/usr/bin"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("loco", "coordinator", "worker")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.suffix in (".py", ".typed", ".toml", ".html", ".css", ".js")
    }
    assert wanted - held == set()
    assert {name for name in held if name.startswith(("tests/", "docs/", "benchmarks/"))} == set()


@pytest.mark.slow
def test_it_starts_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", str(site), str(wheel),
    )  # fmt: skip
    where = run(
        python, "-c", "import loco, coordinator, worker; print(loco.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(site))
    for command in ([], ["worker"], ["coordinator"], ["data", "prepare"], ["doctor"]):
        assert "Usage:" in run(python, "-m", "loco", *command, "--help", cwd=tmp_path)
    assert "wrote run.toml" in run(python, "-m", "loco", "init", "run.toml", cwd=tmp_path)
    planned = run(
        python, "-m", "loco", "plan", "--params", "1e9", "--mbit", "100", "--step-seconds", "1",
        cwd=tmp_path,
    )  # fmt: skip
    assert "bound by" in planned


def test_the_version_comes_from_git(tmp_path: Path) -> None:
    """A tag, and commits after it; without any history the fallback, which the chart has, too."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    say = [sys.executable, "-m", "setuptools_scm"]
    fallback = run(*say, cwd=tmp_path).split()[-1]
    chart = (ROOT / "deploy" / "helm" / "loco" / "Chart.yaml").read_text()
    assert re.search(rf'^appVersion: "{re.escape(fallback)}"$', chart, re.M)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for command in (["init"], ["add", "."], ["commit", "-m", "x"], ["tag", "v3.4.5"]):
        run("git", *who, *command, cwd=tmp_path)
    assert run(*say, cwd=tmp_path).split()[-1] == "3.4.5"
    run("git", *who, "commit", "--allow-empty", "-m", "y", cwd=tmp_path)
    assert run(*say, cwd=tmp_path).split()[-1].startswith("3.4.6.dev1+g")
