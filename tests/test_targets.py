"""Every test runs in a target of the Makefile; what a target selects is read from there."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("test", "test-oldest", "test-newest", "test-gpu", "nightly")
INTERPRET = "TRITON_INTERPRET=1"
# Writes {test: marks} of some paths to a file.
COLLECT = """
import json, sys
from pathlib import Path
import pytest

class Record:
    def pytest_collection_finish(self, session):
        found = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
        Path(sys.argv[1]).write_text(json.dumps(found))

sys.exit(pytest.main([*sys.argv[2:], "--collect-only", "-qq"], [Record()]))
"""


def selections_of(target):
    """The pytest commands that `make` would run, with variables, paths and marks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "--dry-run", target],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    ).stdout
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", default=["tests", "lab/tests"])
    parser.add_argument("-m", dest="expression", default="True")
    parser.add_argument("--ignore", action="append", default=[])
    parser.add_argument("-n", "--timeout")
    parser.add_argument("--dist")
    parser.add_argument("--doctest-modules", action="store_true")
    for line in printed.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if "pytest" in words:
            place = words.index("pytest")
            selection = parser.parse_args(words[place + 1 :])
            selection.variables = words[:place]
            selection.target = target
            yield selection


def is_under(test, path):
    return test == path or test.startswith((f"{path}/", f"{path}::"))


def selects(selection, test, marks, interpreted):
    # A GPU collects tests of kernels that no other machine does without the interpreter.
    if selection.target != "test-gpu" and interpreted != (INTERPRET in selection.variables):
        return False
    named, ignored = (
        max((len(path) for path in paths if is_under(test, path)), default=0)
        for paths in (selection.paths, selection.ignore)
    )
    # A file that is named is not ignored with its folder.
    if named <= ignored:
        return False
    known = {name: name in marks for name in ("gpu", "hypothesis", "slow")}
    return eval(selection.expression, {"__builtins__": {}}, known)


@pytest.fixture(scope="module")
def selections():
    return [selection for target in TARGETS for selection in selections_of(target)]


@pytest.fixture(scope="module")
def tests(request, tmp_path_factory):
    """Name, marks and whether it is for Triton's interpreter, of every test that pytest found.

    `make test` finds all but the kernels'. Those depend on the interpreter: two processes look.
    """
    record = tmp_path_factory.mktemp("found") / "tests.json"

    def kernels(interpreted):
        variables = {
            name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
        }
        done = subprocess.run(
            [sys.executable, "-c", COLLECT, str(record), "tests/kernels"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=variables | ({"TRITON_INTERPRET": "1"} if interpreted else {}),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found = json.loads(record.read_text())
        return [(test, marks, interpreted) for test, marks in found.items()]

    here = [
        (item.nodeid, [mark.name for mark in item.iter_markers()], False)
        for item in request.config.found_tests
        if not is_under(item.nodeid, "tests/kernels")
    ]
    return here + kernels(interpreted=False) + kernels(interpreted=True)


@pytest.mark.slow
def test_every_test_is_in_a_target(selections, tests):
    assert {True, False} == {interpreted for *_, interpreted in tests}
    selected = {test for test, *how in tests if any(selects(s, test, *how) for s in selections)}
    lost = {test for test, *_ in tests} - selected
    assert not lost


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["slow", "hypothesis"])
def test_nightly_runs_every_slow_test_and_every_property(selections, tests, mark):
    nightly = [s for s in selections if s.target == "nightly"]
    if mark == "hypothesis":
        nightly = [s for s in nightly if "HYPOTHESIS_PROFILE=nightly" in s.variables]
    for test in (test for test in tests if mark in test[1] and "gpu" not in test[1]):
        assert any(selects(selection, *test) for selection in nightly), test


def test_targets_name_paths_that_exist(selections):
    for selection in selections:
        for path in selection.paths + selection.ignore:
            assert (ROOT / path).exists(), f"make {selection.target}: {path}"
