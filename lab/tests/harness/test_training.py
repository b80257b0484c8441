"""Hosts, cells and training of the experiments: what is computed, kept, skipped and resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lln import calibrate
from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.experiments import choosing
from lln_lab.experiments.answering import accuracy, answers
from lln_lab.experiments.calibrated import ROWS, CalibratedTemperatures
from lln_lab.experiments.cells import Cell, is_finished, read_all, write
from lln_lab.experiments.choosing import Chooser
from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.hosts import Sizes, host_of, started_host
from lln_lab.experiments.methods import Method, all_methods
from lln_lab.experiments.observing import Observer, can_be_observed
from lln_lab.experiments.random_keys import random_keys
from lln_lab.experiments.runner import cells_of, run
from lln_lab.experiments.tasks.masked_text import byte_code, masked_text
from lln_lab.experiments.tasks.task import NO_QUESTION, Examples, Task, padded
from lln_lab.experiments.training import Recipe, train

SIZES = Sizes(layers=2, width=16, heads=2, feed_forward=32, length=24)
RECIPE = Recipe(steps=6, batch=4, rate=1e-2, saves=2, points=6)


def toy_task(examples=16, tokens=24, classes=2, pairs=False):
    rng = np.random.default_rng(0)
    lengths = rng.integers(tokens // 2, tokens + 1, examples).astype(np.int32)
    texts = [rng.integers(1, 9, count).astype(np.uint8) for count in lengths]
    ids, lengths = padded(texts, tokens, np.uint8)
    labels = (ids[:, 0] > 4).astype(np.int64)
    if classes == 0:
        labels = np.where(np.arange(tokens) % 5 == 0, ids.astype(np.int64), NO_QUESTION)
    if pairs:
        lengths = None
    part = Examples(ids, labels, lengths)
    return Task("toy", "toy", classes, 16, part, part, part, pairs)


def host(name="lln", **task):
    torch.manual_seed(0)
    return host_of(Method.parse(name), SIZES, toy_task(**task))


def batch_of(task, count=4):
    entries = [task.train[index] for index in range(count)]
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


@pytest.mark.parametrize("task", [{}, {"pairs": True}, {"classes": 0}])
def test_every_host_has_a_loss_whose_gradient_reaches_the_words(task):
    model, batch = host(**task), batch_of(toy_task(**task))
    output = model(**batch)
    output["loss"].backward()
    assert model.encoder.word.weight.grad.abs().sum() > 0
    found, expected = model.questions(output, batch["labels"])
    assert found.shape == expected.shape
    assert found.dim() == 1


def test_padding_changes_no_answer():
    model, batch = host("softmax"), batch_of(toy_task())
    model.eval()
    first = model(**batch)["logits"]
    ids = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 7)
    torch.testing.assert_close(model(**batch | {"input_ids": ids})["logits"], first)


def test_two_systems_alternate():
    names = [layer.attention.card.name for layer in host("diag/softmax").encoder.layers]
    assert names == ["diag", "softmax"]
    assert host("elu+conv").encoder.layers[0].attention.convolution is not None


def test_all_methods_start_from_the_same_weights():
    task = toy_task()
    softmax = started_host(Method.parse("softmax"), SIZES, task, seed=3).state_dict()
    for name in ("lln", "diag/softmax", "performer", "hedgehog+conv", "flash"):
        own = started_host(Method.parse(name), SIZES, task, seed=3).state_dict()
        same = [key for key, side in softmax.items() if key in own and torch.equal(own[key], side)]
        # FLASH is a block of its own: embeddings and head alone are the same.
        assert len(same) == len(softmax) or (name == "flash" and "head.0.weight" in same)
    other = started_host(Method.parse("softmax"), SIZES, task, seed=4).state_dict()
    assert not torch.equal(other["head.0.weight"], softmax["head.0.weight"])


def test_methods_are_read_and_refused():
    assert Method.parse("hedgehog+diag").branches == {"diagonal": 64}
    one = Method.parse("diag/lln_keys@keys=4,group_size=8+conv")
    assert one.systems == (("diag", {}), ("lln_keys", {"keys": 4, "group_size": 8}))
    assert one.title.endswith("(keys 4, group_size 8) + convolution")
    assert set(all_methods()) == set(peers.available())
    for wrong in ("nothing", "lln+nothing", "lln/elu/diag", "lln@alpha"):
        with pytest.raises(InvalidInputError):
            Method.parse(wrong)


def test_answers_are_counted_over_questions():
    task = toy_task(classes=0)
    model = host(classes=0)
    given, right, loss = answers(model, task.test, batch=3)
    assert len(right) == (task.test.labels != NO_QUESTION).sum()
    # Nothing depends on the batches.
    again, right_again, loss_again = answers(model, task.test, batch=16)
    assert (given == again).all()
    assert (right == right_again).all()
    assert loss == pytest.approx(loss_again, rel=1e-5)
    assert accuracy(given, right) == {"accuracy": (given == right).mean()}


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def hidden_text():
    texts = {part: [f"a small text of {part}, {turn}" for turn in range(20)] for part in PARTS}
    return masked_text(texts, byte_code(), "toy", length=24)


PARTS = ("train", "valid", "test")


@pytest.mark.parametrize("make", [toy_task, pytest.param(hidden_text, marks=pytest.mark.slow)])
def test_a_stopped_training_ends_as_if_it_had_not_been_stopped(tmp_path, make):
    def start():
        torch.manual_seed(0)
        return host_of(Method.parse("lln"), SIZES, make())

    whole = start()
    # Two epochs or more, the second one cut.
    recipe = replace(RECIPE, batch=8) if make is toy_task else replace(RECIPE, batch=16)
    assert len(make().train) < 4 * recipe.batch
    expected = train(whole, make().train, recipe, tmp_path / "whole", seed=1)

    def stop(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(start(), make().train, recipe, tmp_path / "cut", seed=1, tell=stop)
    steps = []
    # Other weights at the start: those of the checkpoint count.
    again = start()
    with torch.no_grad():
        again.encoder.word.weight += 1
    found = train(again, make().train, recipe, tmp_path / "cut", seed=1, tell=steps.append)
    assert steps == [5, 6]
    assert torch.equal(weights(again), weights(whole))
    assert found["curve"] == expected["curve"]
    # Stopped once more, after the last step but before its result was kept: nothing is lost.
    late = start()
    once_more = train(late, make().train, recipe, tmp_path / "cut", seed=1, tell=steps.append)
    assert steps == [5, 6]
    assert torch.equal(weights(late), weights(whole))
    assert once_more["curve"] == expected["curve"]
    assert once_more["seconds"] > 0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps_end_where_others_end(tmp_path, monkeypatch, backend):
    """Traced, and compiled at night; what looks at the model meanwhile is not compiled."""
    task, graphs, plain = toy_task(classes=0), [], torch.nn.Module.compile
    whole = Examples(task.train.ids, task.train.labels)

    def traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = traced if backend == "eager" else backend
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: plain(self, backend=backend, **options)
    )
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = host_of(Method.parse("lln"), SIZES, task)
        watcher = Observer(whole, 2)
        folder = tmp_path / str(compiled)
        result = train(model, whole, RECIPE, folder, 0, watchers=[watcher], compiled=compiled)
        assert result["compiled"] is compiled
        before = len(graphs)
        found.append((weights(model), result["observed"], answers(model, whole, 3)[2]))
        assert len(graphs) == before
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-5)
    entropies = [np.array(one[1]["entropy"]) for one in found]
    np.testing.assert_allclose(*entropies, rtol=1e-3)
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-4)
    if backend is traced:
        assert graphs


def test_what_cannot_be_compiled_says_what_to_do(tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise TypeError("list indices must be integers")

    task, plain = toy_task(classes=0), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: plain(self, backend=broken, **options)
    )
    whole = Examples(task.train.ids, task.train.labels)
    model = host_of(Method.parse("softmax"), SIZES, task)
    with pytest.raises(InvalidInputError, match=r"indices.*run it again without --compile") as told:
        train(model, whole, RECIPE, tmp_path, 0, compiled=True)
    assert "\n" not in str(told.value)


DRAWN = "diag/lln_keys@keys=4,block_size=8,offset=-1e4"


def test_what_has_no_matrix_is_not_observed():
    assert can_be_observed(Method.parse("diag/lln_diag@join=gate"))
    assert not can_be_observed(Method.parse("diag/lln_diag@join=ratio"))
    assert not can_be_observed(Method.parse("elu"))


def test_what_differs_between_two_means_is_brought_to_one_scale():
    torch.manual_seed(0)
    model = host_of(Method.parse("softmax"), SIZES, toy_task(pairs=True)).train()
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    # Texts that differ in one token out of twelve, so that their means hardly differ.
    ids = torch.full((32, 24), 3)
    ids[:, 5] = torch.randint(1, 9, (32,))
    model(ids, torch.zeros(32, dtype=torch.long))
    first, second, difference, product = seen[0].chunk(4, dim=1)
    both = torch.cat([first, second])
    torch.testing.assert_close(both.mean(0), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(both.std(0, correction=0), torch.ones(16), rtol=0.02, atol=0)
    torch.testing.assert_close(difference, first - second)
    torch.testing.assert_close(product, first * second)


def test_keys_at_random_are_others_in_every_call():
    chosen, drawn = (
        host_of(Method.parse(name), SIZES, toy_task(classes=0))
        for name in (DRAWN, DRAWN + "+random")
    )
    assert Method.parse(DRAWN + "+random").title.endswith("at random")
    ids = torch.arange(24)[None] % 8
    with torch.no_grad():
        assert torch.equal(chosen.encoder(ids), chosen.encoder(ids))
        assert not torch.equal(drawn.encoder(ids), drawn.encoder(ids))
    with pytest.raises(InvalidInputError, match="draws the keys of lln_keys"):
        Method.parse("diag+random")
    with pytest.raises(InvalidInputError, match="without padding"):
        drawn.encoder(ids, ids > 0)


def test_keys_at_random_lie_outside_of_the_block():
    found = random_keys(torch.zeros(2, 3, 150, 4), 20, 64)
    assert found.shape == (2, 3, 3, 20)
    assert (found // 64 != torch.arange(3)[:, None]).all()
    assert all(len(set(line)) == 20 for line in found.flatten(0, 2).tolist())
    assert random_keys(torch.zeros(1, 1, 70, 4), 20, 64).shape == (1, 1, 2, 6)


def test_alpha_and_beta_are_measured_now_and_then_in_training_only():
    def temperatures():
        return [(one.alpha.clone(), one.beta.clone()) for one in sources]

    torch.manual_seed(0)
    model = host_of(Method.parse("lln/lln_diag+calibrated"), SIZES, toy_task(classes=0))
    sources = [one for one in model.modules() if isinstance(one, CalibratedTemperatures)]
    assert len(sources) == SIZES.layers
    ids = torch.randint(1, 8, (8, 24))
    with torch.no_grad():
        model.eval().encoder(ids)
        assert all((one.alpha == 1).all() for one in sources)
        model.train().encoder(ids)
        first = temperatures()
        model.encoder.word.weight.mul_(3)
        for _ in range(sources[0].every - 1):
            model.encoder(ids)
        torch.testing.assert_close(temperatures(), first, rtol=0, atol=0)
        model.encoder(ids)
    assert not any((one.alpha == 1).any() for one in sources)
    assert not torch.equal(sources[0].alpha, first[0][0])
    with pytest.raises(InvalidInputError, match="neither"):
        Method.parse("softmax+calibrated")
    with pytest.raises(InvalidInputError, match="future"):
        sources[0](*torch.randn(2, 1, 2, 8, 4), is_causal=True)


def test_measured_alpha_and_beta_have_the_entropy_of_softmax():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 2, 64, 16)
    found = CalibratedTemperatures(2).train()(2 * query, key)
    wanted = calibrate(2 * query, key, scope="batch", rows=ROWS)
    torch.testing.assert_close(found, wanted)


def toy_experiment():
    plan = Plan(SIZES, RECIPE, lambda data: toy_task())
    plans = {scale: {"toy": plan} for scale in ("smoke", "small", "full")}
    return Experiment("trial", "A trial", plans, ("softmax", "lln"), seeds=(0,))


def test_finished_cells_are_skipped_and_other_settings_refused(tmp_path):
    experiment, lines = toy_experiment(), []
    cells = cells_of(experiment, "smoke", ["toy"], ["softmax", "elu"], [0])
    folders = {"out": tmp_path / "out", "work": tmp_path / "work"}
    shared = {"data": None, "command": "test", **folders}
    assert run(experiment, cells[:1], echo=lines.append, **shared) == 1
    assert run(experiment, cells, echo=lines.append, **shared) == 1
    assert [line.split(":")[0] for line in lines] == ["toy softmax 0", "toy elu 0"]
    stored = read_all(tmp_path / "out", "trial", "smoke")
    assert {one["cell"]["method"] for one in stored} == {"softmax", "elu"}
    assert {"accuracy", "seconds", "parameters", "curve", "setup"} <= stored[0].keys()
    assert not list((tmp_path / "work").rglob("checkpoint-*"))
    with pytest.raises(InvalidInputError, match="other settings"):
        is_finished(cells[0], {"recipe": "another"}, tmp_path / "out")


def test_a_cell_has_a_name_without_slashes(tmp_path):
    odd = Cell("trial", "small", "toy", "diag/lln_keys@keys=8+conv", 3)
    write(odd, {}, {"accuracy": 1.0}, tmp_path)
    path = odd.path(tmp_path)
    assert path.name == "toy.diag-lln_keys_keys_8_with_conv.seed3.json"
    assert json.loads(path.read_text())["cell"]["method"] == "diag/lln_keys@keys=8+conv"


@pytest.mark.parametrize("task", [{}, {"pairs": True}, {"classes": 0}])
@pytest.mark.parametrize("name", ["softmax", "lln_diag", "lln_keys", "performer"])
def test_no_mask_is_a_mask_of_ones(name, task):
    model, batch = host(name, **task), batch_of(toy_task(**task))
    batch.pop("attention_mask", None)
    full = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        losses = [model(**batch)["loss"], model(**batch, attention_mask=full)["loss"]]
    torch.testing.assert_close(*losses)


def test_attention_is_measured_on_the_way_where_instruments_know_it(tmp_path):
    task = toy_task(classes=0)
    plan = Plan(SIZES, RECIPE, lambda data: task, observed=3)
    one = Experiment("toy", "Toy", {"small": {"toy": plan}}, ("lln", "elu"), seeds=(0,))
    cells = cells_of(one, "small", ["toy"], ["lln", "elu"], [0])
    run(one, cells, data=None, out=tmp_path / "out", work=tmp_path / "work", command="")
    known, unknown = (json.loads(cell.path(tmp_path / "out").read_text("utf-8")) for cell in cells)
    assert "observed" not in unknown
    assert set(known["observed"]) == {"temperature", "entropy", "spectral_gap"}
    steps, values = zip(*known["observed"]["entropy"], strict=True)
    assert steps == (1, 2, 4, 6)
    # Bits per row, of at most 24 tokens.
    assert all(0 < value < np.log2(24) for value in values)
    assert len(set(values)) == len(values)


def test_measuring_changes_nothing_that_is_trained(tmp_path):
    task, weights = toy_task(classes=0), []
    for place, watchers in enumerate(((), [Observer(task.valid, 2)])):
        model = started_host(Method.parse("lln"), SIZES, task, 0)
        train(model, task.train, RECIPE, tmp_path / str(place), 0, watchers=watchers)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_training_that_was_stopped_keeps_what_was_measured(tmp_path):
    task = toy_task(classes=0)

    def trained(folder, stop=None):
        def tell(step):
            if step == stop:
                raise KeyboardInterrupt

        model = started_host(Method.parse("lln"), SIZES, task, 0)
        observer = Observer(task.valid, 1)
        return train(model, task.train, RECIPE, tmp_path / folder, 0, tell, [observer])["observed"]

    with pytest.raises(KeyboardInterrupt):
        trained("stopped", stop=5)
    assert trained("stopped") == trained("whole")


def test_examples_are_told_every_epoch(tmp_path):
    class Told(Examples):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    task = toy_task(classes=0)
    examples = Told(task.train.ids, task.train.labels, task.train.lengths)
    train(started_host(Method.parse("lln"), SIZES, task, 0), examples, RECIPE, tmp_path, 0)
    # 16 examples in batches of 4: six steps are one epoch and a half.
    # The Trainer tells, more than once.
    assert tuple(dict.fromkeys(examples.epochs)) == (0, 1)


def chosen_run(folder, task, stop=None, choices=3):
    """Results and model of a training whose valid part is asked on the way."""

    def tell(step):
        if step == stop:
            raise KeyboardInterrupt

    model = started_host(Method.parse("lln"), SIZES, task, 0)
    chooser = Chooser(task.valid, RECIPE.steps // choices, 4, "float32", folder / "best")
    return train(model, task.train, RECIPE, folder, 0, tell, [chooser]), model


def test_the_weights_that_answer_most_of_valid_right_are_taken(tmp_path, monkeypatch):
    task, weights = toy_task(), {}
    shares = iter([0.25, 0.75, 0.5, 0.75, 0.5, 0.25])

    def scripted(model, *_):
        weights[len(weights) + 1] = {k: v.clone() for k, v in model.state_dict().items()}
        right = np.arange(4) < 4 * next(shares)
        return right, np.ones(4, dtype=bool), 0.0

    monkeypatch.setattr(choosing, "answers", scripted)
    found, model = chosen_run(tmp_path, task, choices=6)
    assert found["valid"] == [[1, 0.25], [2, 0.75], [3, 0.5], [4, 0.75], [5, 0.5], [6, 0.25]]
    # The first of equals.
    assert found["chosen"] == 2
    taken = model.state_dict()
    assert all(torch.equal(taken[name], weights[2][name]) for name in taken)
    assert any(not torch.equal(taken[name], weights[6][name]) for name in taken)


@pytest.mark.slow
def test_a_training_that_was_stopped_chooses_the_same_weights(tmp_path):
    task = toy_task(examples=64)
    with pytest.raises(KeyboardInterrupt):
        chosen_run(tmp_path / "stopped", task, stop=5)
    (found, model), (whole, other) = (
        chosen_run(tmp_path / name, task) for name in ("stopped", "whole")
    )
    assert {name: found[name] for name in ("valid", "chosen", "curve")} == {
        name: whole[name] for name in ("valid", "chosen", "curve")
    }
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_cell_says_which_step_was_chosen(tmp_path):
    plan = Plan(SIZES, replace(RECIPE, choices=2), lambda data: toy_task())
    one = Experiment("toy", "Toy", {"small": {"toy": plan}}, ("lln",), seeds=(0,))
    cells = cells_of(one, "small", ["toy"], ["lln"], [0])
    run(one, cells, data=None, out=tmp_path / "out", work=tmp_path / "work", command="")
    kept = json.loads(cells[0].path(tmp_path / "out").read_text("utf-8"))
    assert [step for step, _ in kept["valid"]] == [3, 6]
    assert kept["chosen"] in (3, 6)
    assert not list((tmp_path / "work").rglob("best-*"))
