"""Recovery training: it helps, it resumes bit for bit, it runs on several processes."""

import copy
import json
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from tests.integrations.test_interface import check_what_to_install
from torch.utils.data import Dataset

from lln.errors import BackendUnavailableError, InvalidInputError
from lln.integrations.convert import convert
from lln_lab.recovery.recover import layer_names, load_checkpoint, recover, softmax_teacher
from lln_lab.recovery.recovery_loss import RecoveryLoss, divergence, measure, relative_error

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUICK = {"use_cpu": True, "disable_tqdm": True, "batch_size": 8}


class Sequences(Dataset):
    """Random tokens of different lengths; stops with an interrupt after ``patience`` items."""

    def __init__(self, patience=None):
        self.patience = patience

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.patience is not None:
            self.patience -= 1
            if self.patience < 0:
                raise KeyboardInterrupt
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 99, (16,), generator=generator)
        mask = (torch.arange(16) < 10 + index % 7).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": 1}


def batch(size=8):
    entries = [Sequences()[index] for index in range(size)]
    return {
        name: torch.stack([entry[name] for entry in entries])
        for name in ("input_ids", "attention_mask")
    }


def converted(tiny, name="bert", statistics="running", mix="gate", **options):
    model = tiny(name, **options)
    for parameter in model.parameters():
        # Larger weights: attention that is far from uniform has something to lose.
        if parameter.dim() > 1:
            parameter.data *= 5
    convert(
        model,
        "lln_diag",
        calibrate=batch(),
        statistics=statistics,
        mix=mix,
        block_size=4,
        verbose=False,
    )
    return model


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_recovery_brings_a_model_closer_to_its_original(tiny, tmp_path, name):
    model = converted(tiny, name)
    teacher = softmax_teacher(model)
    report = recover(
        model,
        Sequences(),
        output_dir=tmp_path,
        layer_steps=30,
        end_steps=30,
        end_learning_rate=5e-4,
        **QUICK,
    )
    assert report.done == ["layers", "output"]
    assert report.after < report.after_layers < report.before
    assert all(
        after < before
        for after, before in zip(report.layers_after, report.layers_before, strict=True)
    )
    assert report.after == pytest.approx(
        measure(model, teacher, layer_names(teacher), batch())[0], rel=1e-5
    )
    assert json.loads((tmp_path / "recovery.json").read_text())["after"] == report.after
    assert all(parameter.requires_grad for parameter in model.parameters())
    again = type(model).from_pretrained(tmp_path / "output" / "final").eval()
    assert torch.equal(again(**batch())[0], model.eval()(**batch())[0])


def test_the_teacher_is_the_softmax_model(tiny):
    soft = tiny("bert")
    model = copy.deepcopy(soft)
    convert(model, "lln_diag", calibrate=batch(), verbose=False)
    teacher = softmax_teacher(model)
    valid = batch()["attention_mask"].bool()
    found, expected = teacher(**batch())[0][valid], soft(**batch())[0][valid]
    assert (found - expected).abs().max() < 1e-6
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not any(".lln." in name for name in teacher.state_dict())


def test_the_first_phase_trains_attention_alone(tiny):
    model = converted(tiny)
    teacher = softmax_teacher(model)
    imitation = RecoveryLoss(model, teacher, layer_names(teacher), "layers", "auto").train()
    imitation(**batch())["loss"].backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved
    assert all(".attention.self." in name for name in moved)
    assert any("gate" in name for name in moved)
    assert not any(name.startswith("_teacher") for name in imitation.state_dict())
    # Running statistics go on in training, dropout does not.
    heads = model.encoder.layer[0].attention.self.lln
    assert heads.statistics.updates == 2
    losses = {imitation.eval()(**batch())["loss"].item() for _ in range(2)}
    assert len(losses) == 1
    assert heads.statistics.updates == 2


def test_layers_learn_from_the_originals_inputs(tiny):
    """Breaking the first layer must not change the second layer's loss."""
    model = converted(tiny, statistics="fixed", mix=0.5)
    teacher = softmax_teacher(model)
    names = layer_names(teacher)
    before = measure(model, teacher, names, batch())[1]
    model.encoder.layer[0].attention.self.value.weight.data.zero_()
    after = measure(model, teacher, names, batch())[1]
    assert after[0] > before[0]
    assert after[1] == before[1]


@pytest.mark.parametrize(
    "patience", [pytest.param(60, marks=pytest.mark.slow), 180], ids=["layers", "output"]
)
def test_an_interrupted_recovery_resumes_bit_for_bit(tiny, tmp_path, patience):
    options = {"layer_steps": 12, "end_steps": 12, "save_steps": 5, "probe": batch(), **QUICK}
    whole = converted(tiny)
    expected = recover(whole, Sequences(), output_dir=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        recover(converted(tiny), Sequences(patience), output_dir=tmp_path / "parts", **options)
    resumed = converted(tiny)
    found = recover(resumed, Sequences(), output_dir=tmp_path / "parts", **options)
    assert found == expected
    for (name, one), two in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
    # Finished: nothing is left to do, and the model is what it was.
    third = converted(tiny)
    assert recover(third, Sequences(0), output_dir=tmp_path / "parts", **options) == expected
    assert torch.equal(third.eval()(**batch())[0], whole.eval()(**batch())[0])


def extra_attention(module, query, key, value, attention_mask, **kwargs):
    """Softmax of keys that pass a layer of their own, as an attention with a core would be."""
    keep = attention_mask[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, module.core(key), value, attn_mask=keep
    )
    return out.transpose(1, 2).contiguous(), None


def with_cores(tiny):
    """A student whose attention is not ours and has submodules that no configuration names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from lln.integrations.masks import slicing_mask

    AttentionInterface.register("extra", extra_attention)
    AttentionMaskInterface.register("extra", slicing_mask)
    original = tiny("bert")
    reference = copy.deepcopy(original)
    convert(reference, "lln", layers=[], batch=batch(), verbose=False)
    torch.manual_seed(1)
    for layer in original.encoder.layer:
        layer.attention.self.core = torch.nn.Linear(8, 8)
    original.config._attn_implementation_internal = "extra"
    return original, softmax_teacher(reference)


@pytest.mark.slow
def test_a_model_with_further_submodules_resumes_bit_for_bit(tiny, tmp_path):
    options = {"layer_steps": 3, "end_steps": 6, "save_steps": 2, "probe": batch(), **QUICK}
    whole, teacher = with_cores(tiny)
    start = whole.encoder.layer[0].attention.self.core.weight.detach().clone()
    expected = recover(whole, Sequences(), output_dir=tmp_path / "a", teacher=teacher, **options)
    stopped, teacher = with_cores(tiny)
    with pytest.raises(KeyboardInterrupt):
        recover(stopped, Sequences(60), output_dir=tmp_path / "b", teacher=teacher, **options)
    resumed, teacher = with_cores(tiny)
    found = recover(resumed, Sequences(), output_dir=tmp_path / "b", teacher=teacher, **options)
    assert found == expected
    assert not torch.equal(whole.encoder.layer[0].attention.self.core.weight, start)
    for (name, one), two in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_weights_come_back_from_one_file_or_several(tiny, tmp_path, shard):
    """The output layer shares its weights with the embedding and is saved once."""
    model = converted(tiny, "bert", model="BertForMaskedLM")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    other = copy.deepcopy(model)
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.data = torch.zeros_like(tensor)
    other.tie_weights()
    assert other.cls.predictions.decoder.weight is other.bert.embeddings.word_embeddings.weight
    load_checkpoint(other, tmp_path)
    for (name, one), two in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def test_checkpoints_that_do_not_fit_are_refused(tiny, tmp_path):
    model = converted(tiny)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_checkpoint(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_checkpoint(model, tmp_path)
    converted(tiny, hidden_size=64).save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="of another model"):
        load_checkpoint(model, tmp_path)
    converted(tiny, statistics="fixed").save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match=r"of another model: .*statistics"):
        load_checkpoint(model, tmp_path)


def test_a_dataset_smaller_than_a_batch(tiny, tmp_path):
    data = [Sequences()[index] for index in range(3)]
    report = recover(
        converted(tiny), data, output_dir=tmp_path, layer_steps=1, end_steps=1, **QUICK
    )
    assert report.done == ["layers", "output"]


def test_without_transformers_a_sentence_says_what_to_install(tmp_path):
    names = ["recovery.recover", "training_log.trainer_callback"]
    check_what_to_install(tmp_path, [f"lln_lab.{name}" for name in names])


def test_without_accelerate_a_sentence_says_what_to_install(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(BackendUnavailableError, match=r"needs accelerate; pip install 'lln\[hf\]'"):
        recover(converted(tiny), Sequences(), output_dir=tmp_path, **QUICK)


@pytest.mark.parametrize("end_loss", ["hidden", "embedding", "custom"])
def test_end_losses(tiny, tmp_path, end_loss):
    model = converted(tiny)
    if end_loss == "custom":

        def end_loss(found, expected, inputs):
            return (found.pooler_output - expected.pooler_output).square().mean()

    report = recover(
        model,
        Sequences(),
        output_dir=tmp_path,
        layer_steps=0,
        end_steps=2,
        end_loss=end_loss,
        **QUICK,
    )
    assert report.done == ["output"]


def test_losses_are_what_they_are_called():
    found, expected = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    parts = [(found[0, :2], expected[0, :2]), (found[1, :1], expected[1, :1])]
    square = sum((one - two).square().sum() for one, two in parts)
    size = sum(two.square().sum() for _, two in parts)
    assert torch.allclose(relative_error(found, expected, mask), square / size)
    p, q = expected.softmax(-1), found.softmax(-1)
    exact = (p * (p.log() - q.log())).sum(-1)
    assert torch.allclose(divergence(found, expected, mask), exact[mask].mean())
    assert torch.allclose(divergence(found, expected, None), exact.mean())


def test_what_is_no_dataset_of_inputs_is_refused_with_how_to_make_one(tiny, tmp_path):
    model = converted(tiny)
    ragged = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in (5, 9, 7)]
    for wrong, message in (
        ([], "it is empty; make them with tokenizer"),
        (["a text"], "got str; make them with tokenizer"),
        (ragged, r"input_ids has shapes \(5,\) and \(9,\); make them with tokenizer"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            recover(model, wrong, output_dir=tmp_path, **QUICK)


def test_refusals(tiny, tmp_path):
    with pytest.raises(InvalidInputError, match="converted model"):
        recover(tiny("bert"), Sequences(), output_dir=tmp_path, **QUICK)
    model = converted(tiny)
    with pytest.raises(InvalidInputError, match="end_loss must be"):
        recover(model, Sequences(), output_dir=tmp_path, end_loss="mse", **QUICK)
    # Before any step: not after hours of the first phase.
    steps = {"layer_steps": 1, "end_steps": 1}
    with pytest.raises(InvalidInputError, match=r"does not fit BertModel.*'auto'"):
        recover(model, Sequences(), output_dir=tmp_path, end_loss="logits", **steps, **QUICK)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_train_one_model(tiny, tmp_path):
    """Under torchrun gradients are shared: both processes end with the same weights."""
    converted(tiny, statistics="learned").save_pretrained(tmp_path / "model")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, torch, transformers
            from lln.integrations.transformers import register
            from lln_lab.recovery.recover import recover

            register()
            torch.set_num_threads(1)
            model = transformers.AutoModel.from_pretrained({str(tmp_path / "model")!r})
            data = [
                {{"input_ids": torch.randint(3, 99, (16,), generator=torch.Generator()
                .manual_seed(i)), "attention_mask": torch.ones(16, dtype=torch.int64)}}
                for i in range(64)
            ]
            report = recover(model, data, output_dir={str(tmp_path / "out")!r}, layer_steps=10,
                             end_steps=10, batch_size=4, use_cpu=True, disable_tqdm=True)
            torch.save(model.state_dict(), {str(tmp_path)!r} + "/" + os.environ["RANK"] + ".pt")
            assert report.after < report.before
            """
        )
    )
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_command_recovers_a_folder(tiny, tmp_path, save_with_tokenizer):
    from lln_lab.recovery.recovered_folder import recover_folder

    save_with_tokenizer(tiny("bert"), tmp_path / "in")
    lines = "\n".join(" ".join(f"w{(i * j) % 57 + 2}" for j in range(9)) for i in range(1, 99))
    (tmp_path / "text.txt").write_text(lines)
    said = []
    recover_folder(
        tmp_path / "in",
        tmp_path / "out",
        attention="lln_diag",
        layers=None,
        text=tmp_path / "text.txt",
        tokens=16,
        work=None,
        overwrite=False,
        echo=said.append,
        statistics="running",
        mix="gate",
        training={"layer_steps": 2, "end_steps": 2, **QUICK},
    )
    assert "after recovery" in said[-1]
    assert (tmp_path / "out.work" / "recovery.json").exists()
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert model.config._attn_implementation == "lln_diag"
    assert model(**batch())[0].isfinite().all()


def test_recovery_trains_the_offset_of_exact_keys(tiny, tmp_path):
    model = tiny("bert")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 5
    options = {"statistics": "running", "keys": 2, "block_size": 4}
    convert(model, "lln_keys", calibrate=batch(), **options)
    offset = model.get_submodule("encoder.layer.0.attention.self").lln.offset.value
    before = offset.detach().clone()
    report = recover(model, Sequences(), output_dir=tmp_path, layer_steps=10, end_steps=10, **QUICK)
    assert report.after < report.before
    assert (offset - before).abs().min() > 1e-4
