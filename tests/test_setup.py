"""tools/setup.sh: its sentences, its stamps and its recovery.

Most tests run the real script in a small copy of the clone with a Python that only notes what it is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = Path("requirements/lock-linux-x86_64-py311-cpu.txt")
TORCH_LOCK = Path("requirements/torch-linux-x86_64-py311-cpu.txt")
GOOD = "CPython 3.11.7 Linux x86_64 glibc 2.36 complete"

# Answers the questions the script asks a Python; a file in $CALLS.d named as a word of the call is run by it.
STUB = r"""#!/bin/bash
case "$1 $2" in
  -c*) echo "${DESCRIBED-@GOOD@}"; exit ;;
esac
echo "$* | constraint=$PIP_CONSTRAINT user=$PIP_USER" >>"$CALLS"
case "$2" in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  pip) for word in "$@"; do
         action="$CALLS.d/$(basename -- "$word")"
         [[ ! -f $action ]] || source "$action"
       done ;;
  app.packaged) echo "/cache/$3" ;;
esac
""".replace("@GOOD@", GOOD)


@dataclass
class Clone:
    """A copy of the clone, with a stub Python in `bin`."""

    root: Path
    bin: Path
    calls_file: Path

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "DRAFTMILL_"))}
        kept.pop("PYTHON", None)
        own = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "PYENV_ROOT": str(self.root / "no-pyenv"),
            "CALLS": str(self.calls_file),
            "DRAFTMILL_CACHE": str(self.root / "cache"),
            "DRAFTMILL_SETUP_VENV_MIB": "1",
            "DRAFTMILL_SETUP_CACHE_MIB": "1",
        }
        return kept | own | extra

    def setup(self, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "tools/setup.sh"],
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    def calls(self) -> list[str]:
        """What the stub was asked since the last look: venv, the last word of each pip call, app.packaged."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        asked = [line.split(" | ")[0].split() for line in lines]
        return [words[1] if words[1] != "pip" else Path(words[-1]).name for words in asked]

    def on_pip(self, word: str, script: str) -> Path:
        """Runs `script` in every pip call that has `word` as an argument."""
        action = Path(f"{self.calls_file}.d") / word
        action.parent.mkdir(exist_ok=True)
        action.write_text(script)
        return action


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    root = tmp_path / "clone"
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "pyproject.toml", root)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    stub = bin_folder / "python3.11"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return Clone(root, bin_folder, tmp_path / "calls")


FULL = ["venv", LOCK.name, TORCH_LOCK.name, "clone", "app.packaged"]


def only_sentence(ran: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a set-up that failed."""
    assert ran.returncode != 0, ran.stdout
    assert ran.stderr.count("\n") == 1, ran.stderr
    return ran.stderr.strip()


# --------------------------------------------------------------------------------------------- python


def test_a_wrong_python_is_named(clone: Clone) -> None:
    sentence = only_sentence(clone.setup(PYTHON="python3.11", DESCRIBED=GOOD.replace("3.11.7", "3.9.18")))
    assert sentence == (
        "setup: draftmill's lock file is for CPython 3.11 on Linux x86-64; found 3.9.18. "
        "Install Python 3.11 or run make PYTHON=/path/to/python3.11"
    )
    assert clone.calls() == []
    assert not (clone.root / ".venv").exists()


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (GOOD.replace("CPython", "PyPy"), "found PyPy 3.11.7"),
        (GOOD.replace("x86_64", "aarch64"), "this is Linux on aarch64"),
        (GOOD.replace("Linux", "Darwin").replace("x86_64", "arm64"), "this is Darwin on arm64"),
        (GOOD.replace("glibc 2.36", "glibc 2.17"), "runs on glibc 2.17"),
        (GOOD.replace("glibc 2.36", "unknown 0"), "need glibc 2.28 or newer"),
        (GOOD.replace("complete", "no-venv"), "on Debian the package python3.11-venv"),
        ("", "found nothing that runs at python3.11"),
    ],
)
def test_an_unfit_python_is_named(clone: Clone, described: str, expected: str) -> None:
    assert expected in only_sentence(clone.setup(PYTHON="python3.11", DESCRIBED=described))


def test_a_python_that_does_not_run_is_passed_over(clone: Clone) -> None:
    """As pyenv's shim python3.11 does when no such version is chosen."""
    (clone.bin / "python3.11").rename(clone.bin / "python3")
    shim = clone.bin / "python3.11"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    ran = clone.setup()
    assert ran.returncode == 0, ran.stderr
    assert f"making .venv with {clone.bin / 'python3'}\n" in ran.stdout


def test_a_pyenv_version_is_found(clone: Clone) -> None:
    versions = clone.root / "pyenv/versions/3.11.9/bin"
    versions.mkdir(parents=True)
    (clone.bin / "python3.11").rename(versions / "python")
    wrong = clone.bin / "python3.11"
    wrong.write_text(f"#!/bin/sh\necho {GOOD.replace('3.11.7', '3.12.1')}\n")
    wrong.chmod(0o755)
    for name in ("python3", "python"):
        shutil.copy(wrong, clone.bin / name)
    ran = clone.setup(PYENV_ROOT=str(clone.root / "pyenv"))
    assert ran.returncode == 0, ran.stderr
    assert f"making .venv with {versions / 'python'}\n" in ran.stdout


# ----------------------------------------------------------------------------------------------- disk


def test_too_little_disk_at_the_clone(clone: Clone) -> None:
    sentence = only_sentence(clone.setup(DRAFTMILL_SETUP_VENV_MIB="999999999"))
    assert re.fullmatch(
        r"setup: the environment needs 999999999 MiB free at \S+/clone and finds \d+ MiB; "
        r"free some space there or clone elsewhere\.",
        sentence,
    )
    assert clone.calls() == []


def test_too_little_disk_at_the_cache(clone: Clone) -> None:
    sentence = only_sentence(clone.setup(DRAFTMILL_SETUP_CACHE_MIB="999999999"))
    assert "the packaged target needs 999999999 MiB free" in sentence
    assert sentence.endswith("or set DRAFTMILL_CACHE.")
    assert clone.setup().returncode == 0
    assert clone.calls() == FULL  # the environment was not made twice


def test_a_disk_that_fills_up_during_the_install(clone: Clone) -> None:
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    clone.on_pip(LOCK.name, f"echo '{full}' >&2; exit 1")
    assert "the disk (or $TMPDIR) filled up while installing" in only_sentence(clone.setup())


# --------------------------------------------------------------------------------------------- stamps


def test_the_second_setup_does_no_pip_work(clone: Clone) -> None:
    assert clone.setup().returncode == 0
    assert clone.calls() == FULL
    started = time.monotonic()
    ran = clone.setup(PATH="/usr/bin:/bin")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert time.monotonic() - started < 5
    assert clone.calls() == ["app.packaged"]


def test_a_changed_lock_makes_the_environment_again(clone: Clone) -> None:
    clone.setup()
    leftover = clone.root / ".venv/leftover"
    leftover.touch()
    with (clone.root / LOCK).open("a") as lock:
        lock.write("zzz==1\n")
    clone.calls()
    assert clone.setup().returncode == 0
    assert clone.calls() == FULL
    assert not leftover.exists()


def test_a_changed_pyproject_installs_only_the_project(clone: Clone) -> None:
    clone.setup()
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    clone.calls()
    assert clone.setup().returncode == 0
    assert clone.calls() == ["clone", "app.packaged"]


def test_a_moved_clone_makes_the_environment_again(clone: Clone) -> None:
    clone.setup()
    clone.calls()
    moved = Clone(clone.root.rename(clone.root.with_name("moved")), clone.bin, clone.calls_file)
    assert moved.setup().returncode == 0
    assert moved.calls() == [*FULL[:3], "moved", "app.packaged"]


@pytest.mark.parametrize("victim", [LOCK.name, TORCH_LOCK.name, "--no-build-isolation"])
def test_a_killed_setup_recovers(clone: Clone, victim: str) -> None:
    reached = clone.root / "reached"
    action = clone.on_pip(victim, f"touch '{reached}'; sleep 60")
    process = subprocess.Popen(
        [clone.root / "tools/setup.sh"],
        env=clone.environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert reached.exists()

    action.unlink()
    clone.calls()
    assert clone.setup().returncode == 0
    # Only a whole environment is kept: pip may take a half-written package for installed.
    assert clone.calls() == (["clone", "app.packaged"] if victim == "--no-build-isolation" else FULL)


def test_two_setups_take_turns(clone: Clone) -> None:
    clone.on_pip(LOCK.name, "sleep 0.5")
    first = subprocess.Popen([clone.root / "tools/setup.sh"], env=clone.environment(), stdout=subprocess.PIPE)
    second = clone.setup()
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(clone.calls()) == sorted([*FULL, "app.packaged"])


def test_a_foreign_environment_is_left_alone(clone: Clone) -> None:
    (clone.root / ".venv").mkdir()
    (clone.root / ".venv/own").touch()
    assert "was not made by this script; move or remove it" in only_sentence(clone.setup())
    assert (clone.root / ".venv/own").exists()


# ------------------------------------------------------------------------------------------------ pip


def test_torch_falls_back_to_its_own_index(clone: Clone) -> None:
    missing = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    clone.on_pip(TORCH_LOCK.name, f"[[ $* == *download.pytorch.org* ]] || {{ echo '{missing}'; exit 1; }}")
    ran = clone.setup()
    assert ran.returncode == 0, ran.stderr
    assert clone.calls() == ["venv", LOCK.name, TORCH_LOCK.name, TORCH_LOCK.name, "clone", "app.packaged"]


def test_another_pip_error_is_quoted_with_its_log(clone: Clone) -> None:
    clone.on_pip(LOCK.name, "echo 'ERROR: Could not find a version that satisfies ray==2.60.0'; exit 1")
    sentence = only_sentence(clone.setup())
    assert "Could not find a version that satisfies ray==2.60.0; full log: " in sentence
    assert Path(sentence.split("full log: ")[1]).read_text().startswith("ERROR")


# What the end-to-end tests install, with the real Python and pip: wheels of one line each.
BACKEND = """
import zipfile
from pathlib import Path

def make_wheel(folder, name, version, module=""):
    info = f"{name}-{version}.dist-info"
    wheel = Path(folder) / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", module)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel.name

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return make_wheel(wheel_directory, "draftmill", "0.1.0")
"""


@pytest.fixture
def real(clone: Clone) -> Clone:
    """The clone with the real Python, and nothing of this user's pip configuration."""
    (clone.bin / "python3.11").unlink()
    (clone.bin / "python3.11").symlink_to(Path(sys._base_executable))
    return clone


def test_no_package_index_is_one_sentence(real: Clone) -> None:
    ran = real.setup(PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    sentence = only_sentence(ran)
    assert sentence.startswith(f"setup: no package index could be reached while installing the packages of {LOCK};")
    assert "PIP_INDEX_URL" in sentence
    log = Path(sentence.split("full log: ")[1])
    assert log == real.root / ".setup.log"
    assert "NewConnectionError" in log.read_text()
    assert not (real.root / ".venv/.lock-installed").exists()


def test_a_users_pip_configuration_cannot_break_the_pins(real: Clone, tmp_path: Path) -> None:
    """With constraint and user in it, plain pip would refuse; the index of the same file is still used."""
    (real.root / "backend.py").write_text(BACKEND)
    spec = spec_from_file_location("backend", real.root / "backend.py")
    assert spec and spec.loader
    backend = module_from_spec(spec)
    spec.loader.exec_module(backend)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    backend.make_wheel(wheels, "tinyray", "2.0")
    backend.make_wheel(wheels, "tinytorch", "2.0+cpu", "answer = 42")
    (real.root / LOCK).write_text("tinyray==2.0\n")
    (real.root / TORCH_LOCK).write_text("tinytorch==2.0+cpu\n")
    (real.root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "draftmill"\nversion = "0.1.0"\n'
    )
    (real.root / "app").mkdir()
    (real.root / "app/packaged.py").write_text("import tinytorch\nprint(tinytorch.answer)\n")
    (tmp_path / "constraints.txt").write_text("tinyray<2\ntinytorch<2\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nconstraint = {tmp_path}/constraints.txt\nno-index = true\nfind-links = {wheels}\n"
        "[install]\nuser = true\n"
    )
    ran = real.setup(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert ran.returncode == 0, ran.stderr + (real.root / ".setup.log").read_text()
    assert ran.stdout.endswith("target smollm2-135m at 42\n")

    before = (real.root / ".setup.log").stat().st_mtime_ns
    started = time.monotonic()
    assert real.setup(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PATH="/usr/bin:/bin").returncode == 0
    assert time.monotonic() - started < 5
    assert (real.root / ".setup.log").stat().st_mtime_ns == before


# ----------------------------------------------------------------------------------------------- lock


def pins() -> dict[str, str]:
    lines = [*(ROOT / LOCK).read_text().splitlines(), *(ROOT / TORCH_LOCK).read_text().splitlines()]
    parsed = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    assert all(parsed), "a line of the lock is not a pin"
    return {canonicalize_name(match[1]): match[2] for match in parsed if match}


def test_the_lock_meets_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras if name != "gpu" for line in extras[name])]
    locked = pins()
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_what_breaks_imports_stays_out_of_the_lock() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "triton", "pip"} & pins().keys()
    assert "torch==" not in (ROOT / LOCK).read_text()


def test_make_uses_the_script() -> None:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "-n", "demo", "ARGS=--fresh train.epochs=1"]
    ran = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert ran.stdout.splitlines() == [
        "tools/setup.sh",
        ".venv/bin/draftmill plan configs/demo.yaml train.epochs=1",  # no flag of `run`
        ".venv/bin/draftmill run configs/demo.yaml --fresh train.epochs=1",
    ]
