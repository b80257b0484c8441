"""Help of the laboratory's commands shows the names of their options whole."""

import pytest
from lab.tests.commands import app
from tests.cli.test_help import check_help, commands


@pytest.mark.parametrize("width", [80, 68])
@pytest.mark.parametrize("path", list(commands(app)), ids=" ".join)
def test_names_of_options_are_whole(path, width):
    check_help(app, path, width)
