"""Train a RoBERTa on sequences that are divided between processes, with checkpoints.

    python examples/context_parallel.py       # one process; without a GPU a tiny model, seconds
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # without it PyTorch's restarts may not connect
    torchrun --standalone --nproc-per-node 8 --max-restarts 3 examples/context_parallel.py --out run

The made-up task: every blank asks for the first token of the sequence, which only the first process
has. Training goes on from the newest complete checkpoint in --out, also if a process died (torchrun
then starts all again) or after SIGTERM, which saves one before the end. A full disk is a warning,
and the next checkpoint tries again. Checkpoints need lln-lab (pip install "lln[lab]").
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import RobertaConfig, RobertaForMaskedLM

from lln.integrations.context_parallel import connect, shard_batch
from lln.integrations.transformers import register
from lln.parallel import sum_gradients
from lln_lab.rank_checkpoints import load_newest, save_checkpoint

VOCABULARY, MASK, IGNORED = 256, 3, -100
GPU = torch.cuda.is_available()
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NUMBERS = dict(zip(SIZES, (768, 12, 12, 3072) if GPU else (32, 2, 4, 64), strict=True))
NUMBERS |= {"tokens": 131_072 if GPU else 512, "batch": 1 if GPU else 4, "steps": 10, "every": 5}


def batch_of(options, step):
    """The whole batch of a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(4, VOCABULARY, (options.batch, options.tokens), generator=generator)
    blank = torch.rand(ids.shape, generator=generator) < 0.15
    blank[:, 0] = False
    answers = ids[:, :1].expand_as(ids).masked_fill(~blank, IGNORED)
    return {"input_ids": ids.masked_fill(blank, MASK), "labels": answers}


def loss_of(model, batch):
    """This rank's share of the mean over all blanks of the whole batch."""
    shard = {name: side.to(model.device) for name, side in shard_batch(model, batch).items()}
    labels = shard.pop("labels")
    blank = labels != IGNORED
    logits = model.lm_head(model.roberta(**shard).last_hidden_state[blank])
    total = F.cross_entropy(logits.float(), labels[blank], reduction="sum")
    return total / (batch["labels"] != IGNORED).sum()


def train(model, options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = {"model": model, "optimizer": optimizer}
    first, content = (options.out and load_newest(options.out)) or (0, {})
    for name, state in content.items():
        states[name].load_state_dict(state)
    stopped, losses = [], {}
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for step in range(first + 1, options.steps + 1):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=GPU):
            loss = loss_of(model, batch_of(options, step))
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        # Told to each other, so that all stop after the same step, whoever got the signal first.
        told = torch.stack([loss.detach(), loss.new_tensor(len(stopped))])
        dist.all_reduce(told)
        losses[step], ends = told[0].item(), bool(told[1]) or step == options.steps
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": losses[step]}), flush=True)
            if options.out and (ends or step % options.every == 0):
                content = {name: holder.state_dict() for name, holder in states.items()}
                save_checkpoint(options.out, step, content, required=ends)
        if ends:
            break
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="lln_diag", help="lln, lln_diag or lln_keys")
    parser.add_argument("--out", type=Path, help="folder of checkpoints; default: none")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else "cpu"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPU else "gloo", **alone)
    register()
    config = RobertaConfig(
        **{name: getattr(options, name) for name in SIZES},
        vocab_size=VOCABULARY,
        max_position_embeddings=options.tokens + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=options.attention,
    )
    torch.manual_seed(0)
    model = RobertaForMaskedLM(config).to(device)
    if GPU:
        # Newer versions of transformers have another name for it, and warn of this one.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    connect(model)
    losses = train(model, options)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
