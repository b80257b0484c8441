"""Fine-tune a RoBERTa classifier with LLN + Diag attention, and load it again.

    python examples/classify_roberta.py                     # a tiny random model, half a minute
    python examples/classify_roberta.py --model FOLDER      # a checkpoint folder of yours

The made-up task: does the marker token occur in the first or the second half of the sequence?
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from lln.integrations.transformers import register

LENGTH, MARKER = 64, 7


class FirstOrSecondHalf(Dataset):
    """Random tokens with one marker; the label says in which half it is."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(10, 50, (size, LENGTH), generator=generator)
        place = torch.randint(LENGTH, (size,), generator=generator)
        self.ids[torch.arange(size), place] = MARKER
        self.labels = (place >= LENGTH // 2).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: a tiny random model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, help="where to save the model; default: nowhere")
    options = parser.parse_args(arguments)

    register()
    if options.model:
        model = AutoModelForSequenceClassification.from_pretrained(
            options.model, attn_implementation="lln_diag", local_files_only=True
        )
    else:
        config = RobertaConfig(
            vocab_size=50,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH + 2,
            attn_implementation="lln_diag",
        )
        config.lln = {"block_size": 16, "matching": "entropy"}
        model = RobertaForSequenceClassification(config)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=32,
                learning_rate=1e-3,
                save_strategy="no",
                report_to=[],
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=FirstOrSecondHalf(2048, seed=0),
            eval_dataset=FirstOrSecondHalf(256, seed=1),
            compute_metrics=lambda p: {"right": (p.predictions.argmax(-1) == p.label_ids).mean()},
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_right"]
        out = options.out or Path(folder) / "model"
        model.save_pretrained(out)
        again = AutoModelForSequenceClassification.from_pretrained(out)
    print(f"accuracy {accuracy:.3f}; loaded again with {again.config._attn_implementation}")
    return accuracy


if __name__ == "__main__":
    main()
