"""Every command's help shows the names of its options whole."""

import re

import pytest
import typer
from typer.testing import CliRunner

from lln.cli import app


def commands(app, group=None, path=()):
    """Every command and group, as the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(app, command, (*path, name))


def options(app, path):
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def check_help(app, path, width):
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(width)}).output
    assert max(map(len, shown.splitlines())) <= width
    named = set(re.findall(r"(?<=[\s,])--[\w-]+(?=[\s,])", shown))
    assert {name for name in options(app, path) if name.startswith("--")} <= named


@pytest.mark.parametrize("width", [80, 68])
@pytest.mark.parametrize("path", list(commands(app)), ids=" ".join)
def test_names_of_options_are_whole(path, width):
    check_help(app, path, width)
