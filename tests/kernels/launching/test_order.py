"""Launches that are made ready early wait for the launch before them."""

import ast
import inspect

import pytest

pytest.importorskip("triton")
from importlib import import_module
from pathlib import Path

from lln import kernels
from lln.kernels.launching import recipes


def followers():
    """Name → source of every kernel that may follow another one without a pause."""
    found = {}
    for path in Path(kernels.__file__).parent.glob("*/triton_*.py"):
        module = import_module(f"lln.kernels.{path.parent.name}.{path.stem}")
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and "FOLLOWS" in getattr(kernel, "arg_names", ()):
                found[name] = inspect.getsource(kernel.fn)
    return found


def test_a_kernel_that_may_follow_waits_first():
    sources = followers()
    assert len(sources) >= 23
    for name, source in sources.items():
        kernel = ast.parse(source).body[0]
        first = kernel.body[1]
        assert ast.unparse(kernel.body[0].value).startswith(("'", '"')), name
        assert ast.unparse(first) == "wait_for_launch(FOLLOWS)", name
        assert source.count("wait_for_launch") == 1, name


class Kernel:
    def __init__(self, *names):
        self.arg_names = names


def test_only_later_steps_whose_kernels_wait_follow(monkeypatch):
    kernels = [Kernel("BT", "FOLLOWS"), Kernel("FOLLOWS"), Kernel("BT"), Kernel("FOLLOWS", "BT")]
    steps = [recipes.Step(kernel, (1,), {"BT": 16}, 4) for kernel in kernels]
    monkeypatch.setattr(recipes, "can_follow", lambda: True)
    monkeypatch.setattr(recipes.Step, "record", lambda step, live: None)
    recipes.Recipe(steps, {}).run({}, recipes.torch.device("cpu"), first=True)
    assert [step.follows for step in steps] == [False, True, False, True]
    assert [step.arguments for step in steps] == [[16, False], [True], [16], [True, 16]]
    assert ["launch_pdl" in step.how for step in steps] == [False, True, False, True]


@pytest.mark.parametrize(
    ("backend", "arch", "expected"),
    [("cuda", 80, False), ("cuda", 90, True), ("cuda", 100, True), ("hip", "gfx942", False)],
)
def test_from_hopper_on(monkeypatch, backend, arch, expected):
    class Driver:
        class Active:
            @staticmethod
            def get_current_target():
                return type("Target", (), {"backend": backend, "arch": arch})

        active = Active

    monkeypatch.setattr(recipes, "driver", Driver)
    monkeypatch.setattr(recipes, "is_interpreted", lambda: False)
    assert recipes.can_follow() == expected
    monkeypatch.setattr(recipes, "HAS_FOLLOWERS", False)
    assert not recipes.can_follow()
