"""Does a converted decoder still find what a long text said once? A pass key in a haystack.

    python -m lln_lab.experiments.needle --data FOLDER        # with valid.txt[.xz]

A pass key of five digits is said once in a text of N tokens, at one of several depths, and asked
for at its end. *exact*: the share of texts whose greedy answer is the key, which it is if and only
if each of its tokens is the likeliest after those before; *log-probability*: that of the key.
Softmax, window and sinks alone, and the conversion to pages read the same texts with the same keys,
so that the difference from softmax is one per text. At depth 0 the key lies among the first tokens,
near 1 in the window of the question; between them only pages find it.

Rows go to a JSON file as they are done; the same command goes on where it stopped. Model and data:
as in `lln_lab.experiments.decoder_conversion`.
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path
from statistics import mean, stdev

import torch
import transformers

import lln
from lln.files import write_atomically
from lln.integrations.convert import convert
from lln.integrations.settings import CAUSAL_PAGES
from lln_lab.bench.environment import describe
from lln_lab.experiments import decoder_conversion
from lln_lab.experiments.decoder_conversion import CALIBRATION_TEXTS, FIRST_MEASURED, texts_of
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.markdown import table
from lln_lab.texts import read_utf8

ALONE = "window and sinks alone"
# Name of a row → how `convert` is called; None = not at all.
ROWS = {"softmax": None, ALONE: None, "pages": decoder_conversion.ROWS["pages"]}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# What is said, the key between the two, and what is asked.
SAID, AFTER, ASKED = "\nThe pass key is", ". Remember it.\n", "\nThe pass key is"


def see_window_and_sinks(module, query, key, value, attention_mask=None, **_options):
    """Attention of `ALONE`, for transformers: that of a conversion, without pages."""
    form = CAUSAL_PAGES | {"pages": 0}
    out = lln.page_attention(query, key, value, **form, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def keys_of(texts, seed=0):
    """A key for every text and depth, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(10_000, 100_000, (texts, len(DEPTHS)), generator=generator)
    return numbers.tolist()


def hide(haystack, tokenizer, key, depth):
    """A text as long as the haystack that says the key at a depth, and how many tokens answer.

    The answer are its last tokens.
    """

    def ids(text):
        found = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return found.to(haystack.device)

    answer = ids(f" {key}")
    said, asked = torch.cat([ids(SAID), answer, ids(AFTER)]), torch.cat([ids(ASKED), answer])
    hay = haystack[: len(haystack) - len(said) - len(asked)]
    at = round(depth * len(hay))
    return torch.cat([hay[:at], said, hay[at:], asked]), len(answer)


@torch.no_grad()
def answer(model, ids, length):
    """Whether the greedy answer is right, and the log-probability of the right one."""
    logits = model(ids[None], use_cache=False, logits_to_keep=length + 1).logits[0, :-1].float()
    right = ids[-length:]
    likelihoods = logits.log_softmax(-1).gather(-1, right[:, None])
    return bool((logits.argmax(-1) == right).all()), likelihoods.sum().item()


def measure(model, tokenizer, haystacks):
    """Exact answers and log-probabilities by depth, over haystacks ``[texts, N]``."""
    cells = {}
    for place, depth in enumerate(DEPTHS):
        found = [
            answer(model, *hide(haystack, tokenizer, keys[place], depth))
            for haystack, keys in zip(haystacks, keys_of(len(haystacks)), strict=True)
        ]
        each = [round(log_probability, 4) for _, log_probability in found]
        exact = mean(float(is_right) for is_right, _ in found)
        cells[str(depth)] = {"exact": exact, "log_probability": mean(each), "each": each}
    return cells


def less_than_softmax(rows, row, tokens, depth):
    """Mean difference in log-probability from softmax, text by text, and its standard error."""
    own, other = (rows[name][tokens][depth]["each"] for name in (row, "softmax"))
    apart = [a - b for a, b in zip(own, other, strict=True)]
    return mean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0


def summary(results):
    """Exact answers, and what is lost of softmax's log-probability, by row, length and depth."""
    rows, lines = results["rows"], []
    for row, cells in rows.items():
        for tokens, by_depth in cells.items():
            line = [row, f"{int(tokens):,}"]
            for depth in map(str, DEPTHS):
                text = f"{by_depth[depth]['exact']:.0%}"
                if row != "softmax" and tokens in rows.get("softmax", {}):
                    less, error = less_than_softmax(rows, row, tokens, depth)
                    text += f" ({less:+.2f} ± {error:.2f})"
                line.append(text)
            lines.append(line)
    return table(["row", "tokens", *(f"depth {depth:g}" for depth in DEPTHS)], lines)


def prepare(original, row, known):
    """The model of a row."""
    model = copy.deepcopy(original)
    if row == ALONE:
        transformers.AttentionInterface.register("window_and_sinks", see_window_and_sinks)
        model.set_attn_implementation("window_and_sinks")
    elif ROWS[row] is not None:
        convert(model, calibrate=known, or_softmax=False, **ROWS[row])
    return model


def main(arguments=None):
    """Prepare, ask and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path, help="a folder with one GGUF file or safetensors")
    parser.add_argument("--out", type=Path, default=Path("lab/results/experiments/needle.json"))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--texts", type=int, default=32, help="or as many as there are")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with valid.txt[.xz]")
    original, tokenizer = decoder_conversion.smollm2(given.model)
    original.to(given.device)
    results = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"rows": {}}
    results["setup"] = {
        **describe(given.device, "python -m lln_lab.experiments.needle"),
        "transformers": transformers.__version__,
        "calibration_texts": CALIBRATION_TEXTS,
    }
    text = read_utf8(text_file(given.data, "valid"), "--data")
    for tokens in given.tokens:
        ids = texts_of(text, tokenizer, tokens).to(given.device)
        haystacks = ids[FIRST_MEASURED : FIRST_MEASURED + given.texts]
        if not len(haystacks):
            parser.error(
                f"valid.txt has {len(ids)} texts of {tokens} tokens, and the first "
                f"{FIRST_MEASURED} are not measured on; give a longer file or fewer --tokens."
            )
        for row in given.rows:
            cells = results["rows"].setdefault(row, {})
            if str(tokens) in cells:
                continue
            start = time.perf_counter()
            model = prepare(original, row, {"input_ids": ids[:CALIBRATION_TEXTS]})
            cells[str(tokens)] = measure(model, tokenizer, haystacks)
            cells[str(tokens)]["texts"] = len(haystacks)
            cells[str(tokens)]["seconds"] = round(time.perf_counter() - start, 1)
            exact = {depth: cells[str(tokens)][str(depth)]["exact"] for depth in DEPTHS}
            print(row, tokens, exact, flush=True)
            write_atomically(given.out, json.dumps(results, indent=1) + "\n")
    print(summary(results))


if __name__ == "__main__":
    main()
