"""Every example runs, on the tiny model it makes by itself, and does what it says."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

# Trainer and torch warn about GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments):
    return load(name).main(list(arguments))


def test_there_is_a_test_for_every_example_and_none_is_long():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {
        "classify_roberta",
        "context_parallel",
        "convert_checkpoint",
        "embed_long_documents",
        "export",
        "generate",
        "recover",
        "vision",
    }
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) < 120, path.name


def test_classify_roberta(capsys):
    run("classify_roberta", "--steps", "4")
    assert "loaded again with lln_diag" in capsys.readouterr().out


@pytest.mark.slow
def test_classify_roberta_learns():
    assert run("classify_roberta", "--steps", "200") > 0.95


def test_embed_long_documents(capsys):
    embeddings = run("embed_long_documents", "--tokens", "700")
    assert torch.allclose(embeddings.norm(dim=-1), torch.ones(2))
    moved = float(capsys.readouterr().out.split("padding moves an embedding by ")[1])
    assert moved < 1e-6


def test_embed_long_documents_with_positions_behind_the_padding(tmp_path, capsys):
    """RoBERTa's first position is not 0; one row too few and the longest document fails."""
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        max_position_embeddings=66,
    )
    torch.manual_seed(0)
    model = RobertaModel(config)
    learned = model.embeddings.position_embeddings.weight
    model.save_pretrained(tmp_path)
    run("embed_long_documents", "--tokens", "150", "--model", str(tmp_path))
    assert float(capsys.readouterr().out.split("moves an embedding by ")[1]) < 1e-6
    load("embed_long_documents").extend_positions(model, 150)
    table = model.embeddings.position_embeddings.weight
    assert torch.equal(table, torch.cat([learned, learned[2:], learned[2:24]]))
    assert model.embeddings.position_embeddings.padding_idx == 1


def test_vision():
    assert run("vision", "--steps", "2") >= 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["lln", "lln_diag"])
def test_vision_learns(attention):
    assert run("vision", "--attention", attention, "--steps", "120") > 0.9


def test_generate(capsys):
    out = run("generate", "--lengths", "64", "192")
    printed = capsys.readouterr().out
    assert out.shape == (2, 56)
    sizes = {line.split("state ")[1] for line in printed.splitlines() if "state " in line}
    assert len(sizes) == 1


def test_convert_checkpoint(tmp_path, capsys):
    report = run("convert_checkpoint", "--out", str(tmp_path / "out"))
    assert [layer.attention for layer in report.layers] == ["softmax"] + 3 * ["lln_diag"]
    assert "outputs equal True, attention lln_diag" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_export():
    assert run("export") < 1e-6


@pytest.mark.slow
def test_export_to_onnx(tmp_path):
    """The file gives the model's values at lengths and with padding it was not traced with."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    example = load("export")
    example.main(["--onnx", str(tmp_path / "model.onnx")])
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    encoder = example.build()
    for tokens in (90, 700):
        ids, mask = example.batch_of(tokens)
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        found = torch.from_numpy(session.run(None, inputs)[0])
        with torch.no_grad():
            expected = encoder(ids, mask)
        assert (found - expected).abs().max() < 1e-5
