"""Convert a model and train it to imitate its softmax original on text without labels.

    python examples/recover.py     # a tiny model that first learns a task, half a minute

The training is part of the laboratory, ``pip install "lln[hf,lab]"``. The same for a checkpoint
folder: ``lln recover FOLDER NEW_FOLDER --text text.txt``.
"""

import argparse
import tempfile

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from lln.integrations.convert import convert
from lln_lab.recovery.recover import recover

LENGTH, VOCABULARY, MASK = 32, 40, 3


def task(count, seed):
    """Random tokens with blanks in them; every blank asks for the first token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
    blank = torch.rand(count, LENGTH, generator=generator) < 0.15
    blank[:, 0] = False
    return ids.masked_fill(blank, MASK), blank, ids[:, :1].expand(-1, LENGTH)


def accuracy(model):
    inputs, blank, answers = task(256, seed=10**6)
    with torch.no_grad():
        found = model.eval()(inputs).logits.argmax(-1)
    return (found == answers)[blank].float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretraining", type=int, default=120, help="steps with softmax")
    parser.add_argument("--steps", type=int, default=100, help="steps of either recovery phase")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(options.pretraining):
        inputs, blank, answers = task(32, seed=step)
        loss = F.cross_entropy(model(inputs).logits[blank], answers[blank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    right = {"softmax": accuracy(model)}
    data = [{"input_ids": ids} for ids in task(512, seed=10**7)[0]]
    batch = {"input_ids": torch.stack([entry["input_ids"] for entry in data[:32]])}
    print(convert(model, "lln", calibrate=batch, statistics="running"))
    right["converted"] = accuracy(model)
    with tempfile.TemporaryDirectory() as folder:
        report = recover(
            model,
            data,
            output_dir=folder,
            layer_steps=options.steps,
            end_steps=options.steps,
            batch_size=32,
            end_learning_rate=5e-4,
        )
    right["recovered"] = accuracy(model)
    print("blanks filled right:", ", ".join(f"{name} {part:.1%}" for name, part in right.items()))
    print(f"output differs from softmax by {report.before:.1%}, then {report.after:.1%}")
    return right


if __name__ == "__main__":
    main()
