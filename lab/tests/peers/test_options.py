"""Options are read from the classes, so that the command and the page cannot lag behind."""

import inspect

import pytest

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.options import Option, options_of


@pytest.mark.parametrize("name", peers.available())
def test_every_option_is_documented(name):
    options = options_of(name)
    keywords = {
        parameter.name
        for parameter in inspect.signature(peers.find(name)).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert keywords <= {option.name for option in options}
    for option in options:
        assert option.text, f"{name} does not say what {option.name} is"
        assert option.default is not inspect.Parameter.empty, f"{name} must have a {option.name}"


def test_arguments_of_class_and_init_are_read(monkeypatch):
    class Example:
        """A class.

        Args:
            host: Not an option.
            first: One line.
            second: Two
                lines: with a colon.

        Example:
            third: not here
        """

        def __init__(self, host, *, first=1, second="a", third=None):
            """Args: here.

            Args:
                third: From the initialiser.

            Raises:
                third: Nothing.
            """

    monkeypatch.setattr("lln_lab.peers.options.find", lambda name: Example)
    assert options_of("example") == (
        Option("first", 1, "One line."),
        Option("second", "a", "Two lines: with a colon."),
        Option("third", None, "From the initialiser."),
    )


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option.name)
        for name in peers.available()
        for option in options_of(name)
        if type(option.default) in (int, float) or option.name in ("shape", "shifts")
    ],
)
@pytest.mark.parametrize("wrong", [-1, "two", float("nan"), float("inf")])
def test_what_is_no_number_of_the_kind_gets_a_sentence(name, option, wrong):
    with pytest.raises(InvalidInputError, match="must "):
        peers.build(name, embed_dim=32, num_heads=2, max_len=64, **{option: wrong})


@pytest.mark.parametrize("layer", [-1, 2, 0.5, "first", True, None])
def test_a_layer_that_the_host_does_not_have_gets_a_sentence(layer):
    with pytest.raises(InvalidInputError, match="layer must be one of 0 … 1"):
        peers.build("elu", embed_dim=32, num_heads=2, max_len=64, layer=layer, layers=2)
