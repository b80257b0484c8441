"""ConcentrationCallback inside a real Trainer, on a tiny BERT."""

import pytest
import torch
from tests import checkpointing
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from lln.errors import InvalidInputError
from lln_lab.training_log.run_log import read_records
from lln_lab.training_log.trainer_callback import ConcentrationCallback


class Sentences(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.randint(3, 40, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder, *callbacks, steps=6, **options):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
    )
    settings = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**settings | options)
    return Trainer(
        BertForMaskedLM(config), args, train_dataset=Sentences(), callbacks=list(callbacks)
    )


def test_records_of_a_run(tmp_path):
    trainer = make_trainer(tmp_path, ConcentrationCallback(tensorboard=False))
    trainer.train()
    records = read_records(tmp_path / "concentration")
    assert [record["step"] for record in records] == [1, 2, 4, 6]
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    for record in records:
        assert list(record["layers"]) == [
            f"bert.encoder.layer.{layer}.attention.self" for layer in range(2)
        ]
        assert record["gradient_norm"] > 0
        if record["step"] in logged:
            assert record["loss"] == logged[record["step"]]["loss"]
            assert record["gradient_norm"] == logged[record["step"]]["grad_norm"]


def test_clipped_norms_say_so_where_the_trainer_does_not_log(tmp_path):
    callback = ConcentrationCallback(every=1, tensorboard=False)
    trainer = make_trainer(tmp_path, callback, steps=3, logging_steps=2, max_grad_norm=1e-3)
    trainer.train()
    records = {record["step"]: record for record in read_records(tmp_path / "concentration")}
    assert records[1]["gradient_norm_is_clipped"]
    assert records[1]["gradient_norm"] == pytest.approx(1e-3, rel=1e-2)
    assert "gradient_norm_is_clipped" not in records[2]
    assert records[2]["gradient_norm"] > 1e-2


def test_training_is_not_changed(tmp_path):
    def weights(*callbacks):
        trainer = make_trainer(tmp_path / "run", *callbacks, steps=3)
        trainer.train()
        return list(trainer.model.parameters())

    watched = weights(ConcentrationCallback(tmp_path / "log", every=1, tensorboard=False))
    for plain, other in zip(weights(), watched, strict=True):
        assert torch.equal(plain, other)


def test_resuming_from_a_checkpoint_leaves_no_duplicates(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(tmp_path, ConcentrationCallback(tensorboard=False), steps=6, **options).train()
    with pytest.raises(InvalidInputError, match="already holds records up to step 6"):
        make_trainer(tmp_path, ConcentrationCallback(tensorboard=False), **options).train()
    trainer = make_trainer(tmp_path, ConcentrationCallback(tensorboard=False), steps=8, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    records = read_records(tmp_path / "concentration")
    assert [record["step"] for record in records] == [1, 2, 4, 6, 8]
    again = ConcentrationCallback(tensorboard=False, overwrite=True)
    make_trainer(tmp_path, again, steps=2, **options).train()
    assert [record["step"] for record in read_records(tmp_path / "concentration")] == [1, 2]


def test_gradient_accumulation_and_checkpointing(tmp_path):
    options = {"gradient_accumulation_steps": 2, checkpointing.NAME: True}
    callback = ConcentrationCallback(every=2, tensorboard=False)
    make_trainer(tmp_path, callback, steps=4, **options).train()
    records = read_records(tmp_path / "concentration")
    assert [record["step"] for record in records] == [1, 2, 4]
    assert all(not record["problems"] for record in records)


def test_loss_scale_of_fp16_training(tmp_path):
    # accelerate has no fp16 on a CPU: the scaler is where its optimiser would keep it.
    trainer = make_trainer(tmp_path, steps=1)
    callback = ConcentrationCallback(tmp_path / "log", tensorboard=False)
    trainer.create_optimizer()
    trainer.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    given = (trainer.args, trainer.state, trainer.control)
    kwargs = {"model": trainer.model, "optimizer": trainer.optimizer}
    callback.on_train_begin(*given, **kwargs)
    callback.on_step_begin(*given, **kwargs)
    batch = {name: tensor[None] for name, tensor in Sentences()[0].items()}
    trainer.model(**batch).loss.backward()
    callback.on_pre_optimizer_step(*given, **kwargs)
    callback.on_train_end(*given, **kwargs)
    (record,) = read_records(tmp_path / "log")
    assert record["loss_scale"] == 512.0
