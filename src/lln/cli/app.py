"""The command line: ``lln doctor | convert | …``, and the commands of the laboratory."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lln.cli.model_commands import convert
from lln.errors import BackendUnavailableError, LLNError

START, MODELS = "Start here", "Your Hugging Face model"
# Functions that take the app and add commands to it: the laboratory has one.
COMMANDS = "lln.commands"
OF_THE_LABORATORY = ("bench", "demo", "figure", "fit", "inspect", "peers", "recover")


class _Group(TyperGroup):
    """Says of a command that is not installed what to install."""

    # Any: typer brings a click of its own in some versions, and asks for click in others.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in OF_THE_LABORATORY:
            raise BackendUnavailableError(
                f'`lln {cmd_name}` comes with the laboratory; run pip install "lln[lab]".'
            )
        return found


app = typer.Typer(
    name="lln",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Paragraphs of the help are wrapped to the terminal's width, not as in the source.
    rich_markup_mode="markdown",
    help=(
        "Linear Log-Normal (LLN) attention: as concentrated as softmax, in linear time.\n\n"
        "`lln doctor` says what this machine can run. For your own model: `lln convert` replaces "
        "its attention with LLN attention."
    ),
    epilog=f'`pip install "lln[lab]"` adds {", ".join(OF_THE_LABORATORY)}.',
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from lln import __version__

        typer.echo(f"lln {__version__}")
        raise typer.Exit


@app.command(rich_help_panel=START)
def doctor() -> None:
    """Say what this machine can run, and check it on a small example.

    Exits with 1 if attention gives a wrong result on this machine.
    """
    from lln.testing.doctor import examine

    if not examine(typer.echo):
        raise typer.Exit(1)


@app.command(rich_help_panel=START)
def build_launcher() -> None:
    """Compile the launcher: calls on short sequences then cost the host less time.

    On an NVIDIA GPU, Python takes longer to ask for a short call (batch 1, hundreds of tokens) than
    the GPU takes to compute it. The compiled launcher asks in C++. It launches the same kernels, so
    the results are the same bits; long sequences and large batches gain nothing.

    Needs a C++ compiler and the headers of Python; takes about half a minute, once for every
    version of torch and Python. The library goes to `~/.cache/lln`, or where `LLN_BUILD_FOLDER`
    says. Programs use it from their next start, `LLN_LAUNCHER=python` does without it, and
    `lln doctor` says which one is used. To remove it, delete the file.
    """
    from lln.cli import launcher_build

    typer.echo("compiling launcher.cpp …")
    typer.echo(f"{launcher_build.build()} is ready; `lln doctor` says whether it is used.")


app.command(rich_help_panel=MODELS)(convert)


def with_commands(*additions: Callable[[typer.Typer], object]) -> typer.Typer:
    """The command line with the commands that these functions add to it."""
    whole = copy(app)
    whole.info, whole.registered_groups = copy(app.info), [*app.registered_groups]
    whole.registered_commands = [*app.registered_commands]
    # Once, although whoever runs a checkout may also have it installed.
    for add_to in dict.fromkeys(additions):
        add_to(whole)
    return whole


def main(*additions: Callable[[typer.Typer], object]) -> None:
    """Run the command line; errors raised on purpose are one sentence, not a traceback."""
    try:
        installed = [entry.load() for entry in metadata.entry_points(group=COMMANDS)]
        with_commands(*additions, *installed)()
    except LLNError as error:
        typer.secho(f"lln: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
