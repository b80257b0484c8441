"""Hugging Face's Trainer with converted models: fifty steps, a checkpoint, and resuming from it."""

import pytest
import torch
import transformers
from tests import checkpointing
from torch.utils.data import Dataset

from lln.integrations.convert import convert

STEPS, HALF = 50, 25

# Trainer says where it saves and what it resumes; torch says that pinning needs a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Sequences(Dataset):
    """Random sequences of different lengths; the label is whether the first token is even."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 8 + index % 8
        ids = torch.randint(3, 99, (16,), generator=generator)
        ids[length:] = 0
        mask = (torch.arange(16) < length).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": int(ids[0]) % 2}


def build(tiny, text, statistics):
    model = tiny("roberta", model="RobertaForSequenceClassification")
    convert(model, "lln_diag", calibrate=text(), statistics=statistics, mix="gate", verbose=False)
    return model


def train(model, folder, resume=None, stop_at=None, **options):
    """The losses of the logged steps, of a run that may be interrupted."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == stop_at:
                control.should_training_stop = True
            return control

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=HALF,
        seed=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Sequences(), callbacks=[Stop()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.parametrize("statistics", ["running", pytest.param("learned", marks=pytest.mark.slow)])
def test_resumed_training_has_the_same_losses_bit_for_bit(tiny, text, tmp_path, statistics):
    whole = build(tiny, text, statistics)
    losses = train(whole, tmp_path / "whole")
    assert len(losses) == STEPS
    train(build(tiny, text, statistics), tmp_path / "parts", stop_at=HALF)
    checkpoint = tmp_path / "parts" / f"checkpoint-{HALF}"
    resumed = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert resumed.config._attn_implementation == "lln_diag"
    again = train(resumed, tmp_path / "parts", resume=str(checkpoint))
    assert {step: losses[step] for step in again} == again
    assert set(range(HALF + 1, STEPS + 1)) <= set(again)
    for (name, one), two in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def test_training_with_checkpointed_activations_and_accumulation(tiny, text, tmp_path):
    model = build(tiny, text, "running")
    losses = train(
        model,
        tmp_path,
        stop_at=6,
        gradient_accumulation_steps=2,
        **{checkpointing.NAME: True},
    )
    assert len(losses) == 6
    statistics = model.roberta.encoder.layer[0].attention.self.lln.statistics
    # Twice a step, and once when the model was converted.
    assert statistics.updates == 13
