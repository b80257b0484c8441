"""Recipes: what a repeated launch hands to a compiled kernel, without any kernel."""

import pytest
import torch

pytest.importorskip("triton")
from lln.kernels.launching import recipes
from lln.kernels.launching.recipes import Recipe, Step
from lln.kernels.summaries.lln_call import LLNCall


class Kernel:
    """Takes the place of a Triton kernel and of what it compiles to: notes every launch."""

    arg_names = ("first", "second", "number", "workspace", "stride", "SIZE")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launches.append(("through Triton", grid, arguments, num_warps))
            return self

        def runner(*arguments):
            self.launches.append(("told", grid, arguments))

        return runner if len(grid) == 3 else launch

    def run(self, *arguments):
        self.launches.append(("compiled", arguments[:3], arguments[9:], arguments[3:9]))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(recipes, "is_interpreted", lambda: False)
    monkeypatch.setattr(recipes, "can_follow", lambda: False)
    monkeypatch.setattr(recipes, "current_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return Kernel()


def runtime_args(*tensors, number):
    first, second = tensors
    return {"first": first, "second": second, "number": number, "unused": object()}


def test_repeated_launches_get_addresses_numbers_and_room(kernel):
    step = Step(kernel, (3, 2), {"stride": 7, "SIZE": 16, "OTHER": 1}, 4)
    recipe = Recipe([step], {"spare": ((5,), torch.float32), "workspace": ((3,), torch.float32)})
    cpu = torch.device("cpu")
    one, two, three, four = (torch.zeros(4) for _ in range(4))
    recipe.run(runtime_args(one, two, number=0.5), cpu, first=True)
    recipe.run(runtime_args(three, four, number=2.5), cpu, first=False)
    recorded, repeated = kernel.launches
    assert recorded[0] == "through Triton"
    assert recorded[2][:3] == (one, two, 0.5)
    assert recorded[2][3].shape == (3,)
    assert recorded[2][4:] == (7, 16)
    assert repeated[:2] == ("compiled", (3, 2, 1))
    assert repeated[2][:3] == (three.data_ptr(), four.data_ptr(), 2.5)
    # Behind 256 bytes for the other piece of workspace, in one allocation.
    assert repeated[2][3] % 4 == 0
    assert repeated[2][4:] == (7, 16)
    # The current stream, the code, and nobody to tell.
    assert repeated[3] == (77, "function", "metadata", None, None, None)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("is_chain", [True, False])
def test_who_watches_launches_hears_of_repeated_ones(kernel, monkeypatch, which, is_chain):
    """Triton's launch tells profilers; ours, which does not, is taken where nobody listens."""
    knobs = pytest.importorskip("triton.knobs")
    step = Step(kernel, (3,), {"stride": 7, "SIZE": 16}, 4)
    recipe = Recipe([step], {"workspace": ((3,), torch.float32)})
    cpu, live = torch.device("cpu"), runtime_args(torch.zeros(4), torch.zeros(4), number=1)
    recipe.run(live, cpu, first=True)
    hook = knobs.HookChain() if is_chain else print
    if is_chain:
        hook.add(print)
    monkeypatch.setattr(knobs.runtime, which, hook)
    recipe.run(live, cpu, first=False)
    monkeypatch.setattr(knobs.runtime, which, knobs.HookChain() if is_chain else None)
    recipe.run(live, cpu, first=False)
    _, heard, unheard = kernel.launches
    assert heard[:2] == ("told", (3, 1, 1))
    assert heard[2][:3] == unheard[2][:3] == (*(live[n].data_ptr() for n in ("first", "second")), 1)
    assert heard[2][4:] == unheard[2][4:] == (7, 16)
    assert unheard[0] == "compiled"


def test_an_older_triton_launches_by_itself(kernel, monkeypatch):
    monkeypatch.setattr(recipes, "knobs", None)
    step = Step(kernel, (3,), {"stride": 7, "SIZE": 16}, 4)
    recipe = Recipe([step], {"workspace": ((3,), torch.float32)})
    live = runtime_args(torch.zeros(4), torch.zeros(4), number=1)
    for first in (True, False):
        recipe.run(live, torch.device("cpu"), first=first)
    assert [launch[0] for launch in kernel.launches] == ["through Triton", "told"]


def test_room_stands_before_what_the_call_brings(kernel):
    step = Step(kernel, (1,), {"stride": 7, "SIZE": 16}, 4)
    recipe = Recipe([step], {"workspace": ((3,), torch.float32), "second": ((2,), torch.float32)})
    cpu = torch.device("cpu")
    one, two = torch.zeros(4), torch.zeros(4)
    for first in (True, False):
        recipe.run(runtime_args(one, two, number=1), cpu, first=first)
    assert kernel.launches[0][2][1] is not two
    assert kernel.launches[1][2][1] != two.data_ptr()


def test_every_tensor_of_a_call_shows_in_its_looks():
    """Compiled kernels rely on alignment: a call whose tensors lie elsewhere is another kind."""
    heads = torch.zeros(2, 3, 5, 4)
    numbers = (1.0, 1.0, 1.0, 0, 1.0, 0.0, 0, False, 5)
    scale, bounds = torch.zeros(3, 1, 1, 1), torch.tensor([0, 2, 5])
    mask = torch.zeros(2, 5, dtype=torch.bool)
    tensors = [heads, heads, heads, scale, scale, mask, heads, bounds]
    looks = LLNCall(*tensors, *numbers).layout_key()
    for index, tensor in enumerate(tensors):
        moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        others = [*tensors[:index], moved, *tensors[index + 1 :]]
        assert LLNCall(*others, *numbers).layout_key() != looks
        others[index] = None
        if index > 2:
            assert LLNCall(*others, *numbers).layout_key() != looks


def test_launches_of_fixed_sizes_are_told_apart_by_all_their_tensors(kernel, monkeypatch):
    monkeypatch.setattr(recipes, "_recipes", {})
    step = Step(kernel, (3,), {"stride": 7, "SIZE": 16}, 4)
    space = torch.zeros(9)
    first, moved, second = space[:4], space[1:5], torch.zeros(4)

    def launch(kind, side):
        workspace = {"workspace": ((0,), torch.float32)}
        runtime = {"first": side, "second": second, "number": 1}
        recipes.launch_fixed(kind, runtime, side.device, lambda: Recipe([step], workspace))
        return kernel.launches[-1][0]

    assert launch("one", first) == launch("one", moved) == launch("two", first) == "through Triton"
    assert launch("one", first) == launch("one", moved) == launch("two", first) == "compiled"
    # Empty workspace has an address, too.
    assert kernel.launches[-1][2][3] > 0
