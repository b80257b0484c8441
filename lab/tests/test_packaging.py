"""What the laboratory ships, and how its commands behave as part of ``lln``."""

import subprocess
import sys
from importlib import metadata, resources
from types import SimpleNamespace

import pytest

from lln.cli import main
from lln.integrations.searches import load_search
from lln_lab.cli import add_to
from lln_lab.conversion.target import TargetSearch


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command line here, in an empty folder: a process of its own takes seconds."""

    def run_here(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["lln", *arguments])
        with pytest.raises(SystemExit) as stop:
            main(add_to)
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=stop.value.code, stdout=printed.out, stderr=printed.err)

    return run_here


def test_data_files_are_in_the_package():
    for page in ("report/base.html", "report/page.css", "demo/page.html", "inspection/page.html"):
        assert resources.files("lln_lab").joinpath(page).is_file()


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--help",), ("demo", "bench", "fit", "recover", "doctor")),
        (("demo", "--help"), ("--out", "--quick", "--seconds")),
        (("bench", "--help"), ("--lengths", "--resume", "roberta")),
        (("fit", "--help"), ("--device", "--seeds", "--figures")),
        (("figure", "--help"), ("--out", "--results", "--device", "--quick")),
    ],
    ids=" ".join,
)
def test_command_line(arguments, fragments, command, tmp_path):
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    for fragment in fragments:
        assert fragment in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--data", "no/such/file"),
        ("demo", "--seconds", "-1"),
        ("bench", "--device", "abacus"),
        ("bench", "roberta", "--lengths", "0"),
        ("fit", "--device", "abacus"),
        ("fit", "--seeds", "0"),
        ("figure", "3"),
        ("figure", "2", "--device", "abacus"),
    ],
    ids=" ".join,
)
def test_mistakes_of_the_user_are_one_line_and_exit_2(arguments, command):
    done = command(*arguments)
    assert done.returncode == 2, done.stderr[-1000:]
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("lln: ")


def test_the_program_finds_the_commands():
    # A checkout on PYTHONPATH may also be installed.
    (entry,) = set(metadata.entry_points(group="lln.commands"))
    assert entry.load() is add_to


def test_a_conversion_finds_the_search():
    (entry,) = set(metadata.entry_points(group="lln.searches"))
    assert load_search() is entry.load() is TargetSearch


# As if the laboratory were installed.
COMMAND = """
import sys
from importlib import metadata
import lln_command
def entry_points(group):
    made = metadata.EntryPoint("lab", "lln_lab.cli:add_to", group)
    return (made,) if group == "lln.commands" else ()
metadata.entry_points = entry_points
try:
    lln_command.main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("words", ["--help", "bench --help", "bench peers --help"])
def test_help_does_without_torch(words):
    """It takes seconds to load."""
    done = run("-c", COMMAND, *words.split())
    assert done.stdout.endswith("\nFalse\n"), done.stderr
    assert "--help" in done.stdout
    assert "bench" in done.stdout


def test_the_program_runs_the_commands():
    done = run("-c", COMMAND, "peers", "lln")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nTrue\n")


def test_a_checkout_that_is_not_installed_has_the_commands():
    done = run("-m", "lln_lab", "peers", "lln")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Linear Log-Normal")
