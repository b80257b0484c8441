"""Export a model with LLN attention: torch.export with any length, and ONNX.

    python examples/export.py                 # a tiny random RoBERTa
    python examples/export.py --onnx FILE     # also ONNX; needs: pip install 'lln[onnx]'

What is exported takes any number of tokens, padded or not.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import RobertaConfig, RobertaModel

from lln.integrations.transformers import register


class Encoder(nn.Module):
    """Tensors in, a tensor out, as other runtimes want it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def batch_of(tokens):
    ids = torch.randint(5, 100, (2, tokens))
    mask = torch.ones_like(ids)
    mask[1, tokens // 2 :] = 0
    return ids, mask


def build():
    """The encoder to export, the same in every call."""
    register()
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=1026,
        attn_implementation="lln_diag",
    )
    return Encoder(RobertaModel(config)).eval()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--onnx", type=Path, help="where to write the ONNX file")
    options = parser.parse_args(arguments)

    encoder = build()
    # A length with several diagonal blocks, so that their number is not taken for a constant.
    example = batch_of(300)
    length = {1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(encoder, example, dynamic_shapes=(length, length))
    errors = []
    with torch.no_grad():
        for tokens in (100, 300, 900):
            other = batch_of(tokens)
            errors.append((program.module()(*other) - encoder(*other)).abs().max().item())
    print(f"torch.export: 100, 300 and 900 tokens, largest difference {max(errors):.1e}")

    if options.onnx:
        torch.onnx.export(
            program,
            f=options.onnx,
            dynamo=True,
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state"],
        )
        print(f"wrote {options.onnx} ({options.onnx.stat().st_size / 1024:.0f} KiB)")
    return max(errors)


if __name__ == "__main__":
    main()
