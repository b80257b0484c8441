"""Convert a saved softmax model, layer by layer if you like, save it and load it anywhere.

    python examples/convert_checkpoint.py                                  # a tiny random model
    python examples/convert_checkpoint.py --model FOLDER --out NEW_FOLDER  # yours

The same from the command line: ``lln convert FOLDER NEW_FOLDER --calibrate text.txt``.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

from lln.integrations.convert import convert


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: a tiny random model")
    parser.add_argument("--out", type=Path, help="where to save; default: nowhere")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    if options.model:
        model = AutoModel.from_pretrained(options.model, local_files_only=True).eval()
    else:
        model = BertModel(
            BertConfig(vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
        ).eval()
    ids = torch.randint(5, model.config.vocab_size, (4, 96))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    # The first layer keeps softmax; the others learn a gate between LLN and Diag when trained.
    layers = range(1, model.config.num_hidden_layers)
    report = convert(
        model, "lln_diag", layers=list(layers), calibrate=batch, mix="gate", block_size=32
    )
    print(report)

    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "converted"
        model.save_pretrained(out)
        again = AutoModel.from_pretrained(out).eval()
        with torch.no_grad():
            same = torch.equal(again(**batch)[0], model(**batch)[0])
    print(f"saved and loaded: outputs equal {same}, attention {again.config._attn_implementation}")
    return report


if __name__ == "__main__":
    main()
