"""Commands look at the places they are given before they work."""

import os

import pytest
from lab.tests.commands import app
from tests.test_files import special  # noqa: F401
from typer.testing import CliRunner

from lln.errors import InvalidInputError

COMMANDS = {
    "bench": ("bench", "--device", "cpu", "--lengths", "16", "--operations", "lln"),
    "bench roberta": ("bench", "roberta", "--device", "cpu", "--lengths", "16", "--layers", "1"),
    "bench peers": ("bench", "peers", "--device", "cpu", "--lengths", "16", "--systems", "lln"),
    "fit": ("fit", "--quick"),
    "demo": ("demo", "--quick", "--seconds", "1"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_refuse_what_is_no_file_as_out(command, special):  # noqa: F811
    done = CliRunner().invoke(app, [*command, "--out", str(special)])
    assert isinstance(done.exception, InvalidInputError)
    assert str(done.exception).startswith("--out must name a file, got the ")


@pytest.mark.parametrize("command", [*COMMANDS, "figure", "inspect"])
def test_commands_refuse_a_place_that_cannot_be_written_before_any_work(
    command, tmp_path, monkeypatch
):
    def work(*args, **kwargs):
        raise AssertionError("work was begun")

    for name in (
        "lln_lab.bench.command.Bench._measure_all",
        "lln_lab.fitting.command.fit_constants",
        "lln_lab.demo.command.load_corpus",
        "lln_lab.figures.temperature_sweep.concentration",
        "lln_lab.inspection.command.read_text",
    ):
        monkeypatch.setattr(name, work, raising=False)
    words = {"figure": ("figure", "2", "--quick"), "inspect": ("inspect", "model")} | COMMANDS
    (tmp_path / "file").write_text("kept")
    out = tmp_path / "file" / "below" / "page.html"
    done = CliRunner().invoke(app, [*words[command], "--out", str(out)])
    assert isinstance(done.exception, InvalidInputError), done.exception
    assert str(done.exception).startswith("--out ")
    assert "cannot be written: Not a directory" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_inspect_looks_at_both_its_files(tmp_path, suffix):
    os.mkfifo(tmp_path / f"lln-inspect{suffix}")
    done = CliRunner().invoke(app, ["inspect", "model", "--out", str(tmp_path)])
    assert str(done.exception).startswith("--out must name a file, got the pipe")


def test_the_training_of_figure_1_is_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    arguments = ["figure", "1", "--out", str(tmp_path), "--work", str(tmp_path / "pipe")]
    done = CliRunner().invoke(app, arguments)
    assert str(done.exception).startswith("--work must name a file, got the pipe")
