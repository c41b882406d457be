"""The wheel brings everything along, under one name, and works from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "tests", "__pycache__")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked as an installer does."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "source"], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_one_name_goes_into_site_packages(installed: Path) -> None:
    """`conf`, `methods` and `tasks` are too common to be installed as such."""
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"structkv_bench"}


def test_every_source_file_and_config_is_in_it(installed: Path) -> None:
    """A package or a kind of data file that pyproject.toml forgets shows here."""
    package = installed / "structkv_bench"
    places = {"structkv_bench": package, **{name: package / name for name in ("conf", "methods", "tasks")}}
    places["results/calibration"] = package / "calibrations"
    for top, place in places.items():
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert (place / file.relative_to(ROOT / top)).is_file(), file


@pytest.mark.parametrize("arguments", [["list", "methods"], ["results"]], ids=" ".join)
def test_commands_work_from_an_empty_folder(installed: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Nothing is looked up beside the working directory."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "structkv_bench", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0 if arguments[0] == "list" else 2, False)


def test_configs_of_the_wheel_compose(installed: Path, tmp_path: Path) -> None:
    """Every method and task of the wheel's own conf/ makes its cells, from the wheel's own code."""
    code = (
        "from structkv_bench import catalog; from structkv_bench.config import compose; "
        "from structkv_bench.plan import plan; "
        "names = {g: ','.join(catalog.choices(g)) for g in ('method', 'task')}; "
        "print(catalog.conf_dir(), len(plan(compose([f'{g}={n}' for g, n in names.items()]))))"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    folder, groups = done.stdout.split()
    assert Path(folder) == installed / "structkv_bench" / "conf"
    assert int(groups) == 2 + 13 + 16 + 1  # niah at two lengths, ruler's 13, longbench's 16, longbench_v2
