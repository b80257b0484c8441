"""What may the choice of pages be made by? Rules of a score, coarser numbers, and first stages.

    python -m lln_lab.experiments.page_rules --data FOLDER --out FILE     # with valid.txt[.xz]

SmolLM2-135M reads a window, sinks and pages in place of softmax, without training, as
`lln.page_attention` would if it chose by another rule. Perplexity and *copy* as in
`lln_lab.experiments.decoder_conversion`. Every query is compared with every key here, N × N, and
tokens that a rule would not look at are hidden afterwards: this says what a rule is worth, not what
it costs. Rows go to a JSON file as they are done; the same command goes on where it stopped.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F

from lln.files import write_atomically
from lln.matching.page_index import PageIndex
from lln_lab.bench.environment import describe
from lln_lab.experiments.decoder_conversion import FIRST_MEASURED, measure, smollm2, texts_of
from lln_lab.experiments.tasks.data_folder import text_file
from lln_lab.texts import read_utf8

WINDOW, SINKS, PAGE, RANK = 127, 16, 16, 32
# Pages per query, by the length of the texts.
PAGES = {2048: 16, 8192: 32}
CALIBRATION_TOKENS = 16384

# How the scores of the query heads of one key head, [..., R, T, S], become one. `seen` are all
# tokens that a query may see, `near` those of its window and the sinks.
RULES = {
    "sum of probabilities": lambda a, seen, near: (a - _mass(a, seen)).exp().sum(-3),
    "largest probability": lambda a, seen, near: (a - _mass(a, seen)).amax(-3),
    "largest score less the head's largest": lambda a, seen, near: (a - _top(a, seen)).amax(-3),
    "largest score less the largest near one": lambda a, seen, near: (a - _top(a, near)).amax(-3),
    "largest score less the mass of near ones": lambda a, seen, near: (a - _mass(a, near)).amax(-3),
    "largest score": lambda a, seen, near: a.amax(-3),
    "mean score": lambda a, seen, near: a.mean(-3),
}
USED = "largest score less the largest near one"

# Name of a row → what differs from the rule that is used.
ROWS = {
    "softmax": None,
    "window and sinks alone": {"pages": 0},
    **{name: {"rule": name} for name in RULES},
    "int8": {"int8": True},
    "all channels instead of 32": {"rank": None},
    "64 clusters of every 512 tokens, an eighth of the text": {"clusters": (512, 64, 0.125)},
    "16 clusters of every 256 tokens, a quarter of the text": {"clusters": (256, 16, 0.25)},
    "four times the pages by 16 channels first": {"first_rank": 16},
    "four times the pages by 8 channels first": {"first_rank": 8},
}


def _mass(scores, kept):
    return scores.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)


def _top(scores, kept):
    return scores.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)


def rounded(side):
    """As eight-bit integers with one factor per token would hold it."""
    step = side.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (side / step).round() * step


def in_best_clusters(query, key, stretch, clusters, share):
    """Which keys lie in the best clusters of every query: bool ``[B, Hk, T, S]``.

    Args:
        query: ``[B, Hk, R, T, r]``.
        key: ``[B, Hk, S, r]``.
        stretch: Tokens that are clustered together; those of a query's own stretch always count.
        clusters: Of every stretch.
        share: Of the tokens before a query, how many may be looked at.
    """
    tokens, device = key.shape[2], key.device
    rows = key.unflatten(2, (-1, stretch))
    centre = rows[..., torch.arange(clusters, device=device) * stretch // clusters, :]
    for _ in range(4):
        member = F.one_hot(torch.cdist(rows, centre).argmin(-1), clusters).float()
        centre = member.mT @ rows / member.sum(-2).clamp_min(1).unsqueeze(-1)
    home = torch.cdist(rows, centre).argmin(-1)
    place = torch.arange(tokens, device=device)
    home = (home + (place.view(-1, stretch)[:, :1] // stretch) * clusters).flatten(2)
    count = tokens // stretch * clusters
    ends = torch.arange(count, device=device) // clusters * stretch + stretch - 1
    scores = query @ centre.flatten(2, 3).unsqueeze(2).mT
    scores = scores.masked_fill(ends >= place[:, None], -torch.inf)
    scores = (scores - scores.amax(-1, keepdim=True).clamp_min(-1e30)).amax(2)
    sizes = F.one_hot(home, count).float().sum(2).unsqueeze(2).expand_as(scores)
    order = scores.argsort(-1, descending=True)
    before = sizes.gather(-1, order).cumsum(-1) - sizes.gather(-1, order)
    best = torch.zeros_like(scores, dtype=torch.bool)
    best.scatter_(-1, order, before < (place[:, None] + 1) * share)
    picked = best.gather(-1, home.unsqueeze(2).expand(-1, -1, tokens, -1))
    return picked | (place[:, None] // stretch == place // stretch)


def best_pages(scores, pages):
    """The tokens of the pages with the largest scores: bool like ``[B, Hk, T, S]``."""
    best = scores.unflatten(-1, (-1, PAGE)).amax(-1)
    top = best.topk(min(pages, best.shape[-1]), -1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    return chosen.scatter_(-1, top.indices, top.values > -torch.inf).repeat_interleave(PAGE, -1)


def find_indices(model, texts):
    """Projections of every layer and rank, from what softmax attends to in some texts."""
    ranks = {RANK, *(change.get("first_rank", RANK) for change in ROWS.values() if change)}
    found = {}

    def attend(module, query, key, value, attention_mask=None, **_options):
        found[module.layer_idx] = {rank: PageIndex.of(query, key, rank) for rank in ranks}
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("page_rule", attend)
    model.set_attn_implementation("page_rule")
    model(texts, use_cache=False)
    return found


class Variant:
    """Attention of one row, for transformers."""

    def __init__(self, change, pages, indices):
        self.change, self.indices = change, indices
        self.pages = change.get("pages", pages)

    def attend(self, module, query, key, value, attention_mask=None, **_options):
        texts = [
            self.one(*(side[None] for side in sides), self.indices[module.layer_idx])
            for sides in zip(query, key, value, strict=True)
        ]
        return torch.cat(texts).transpose(1, 2).contiguous(), None

    def one(self, query, key, value, indices):
        factor, tokens = query.shape[-1] ** -0.5, query.shape[2]
        place = torch.arange(tokens, device=query.device)
        seen = place[:, None] >= place
        near = seen & ((place[:, None] - place <= WINDOW) | (place < SINKS))
        kept = near
        if self.pages:
            far = self.scores(query, key, indices, seen, near, factor)
            kept = near | best_pages(far, self.pages).repeat_interleave(
                query.shape[1] // key.shape[1], 1
            )
        options = {"attn_mask": kept & seen, "enable_gqa": True}
        return F.scaled_dot_product_attention(query, key, value, **options)

    def scores(self, query, key, indices, seen, near, factor):
        """Of every token that may be chosen; minus infinity for the others: ``[B, Hk, T, S]``."""
        change, heads = self.change, key.shape[1]
        hidden = ~seen | near
        whole = query, key

        def compared(rank):
            sides = whole if rank is None else indices[rank](*whole)
            if change.get("int8"):
                sides = tuple(rounded(side) for side in sides)
            return sides[0].unflatten(1, (heads, -1)) * factor, sides[1]

        by, keys = compared(change.get("rank", RANK))
        rule = RULES[change.get("rule", USED)]
        scores = rule(by @ keys.unsqueeze(2).mT, seen, near).masked_fill(hidden, -torch.inf)
        if "clusters" in change:
            scores = scores.masked_fill(
                ~in_best_clusters(by, keys, *change["clusters"]), -torch.inf
            )
        if "first_rank" in change:
            few, few_keys = compared(change["first_rank"])
            first = RULES[USED](few @ few_keys.unsqueeze(2).mT, seen, near)
            first = best_pages(first.masked_fill(hidden, -torch.inf), 4 * self.pages)
            scores = scores.masked_fill(~first, -torch.inf)
        return scores


@torch.no_grad()
def main():
    """Measure row by row, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("LLN_DATA"))
    parser.add_argument("--model", type=Path, help="a folder with the model")
    parser.add_argument("--out", type=Path, default=Path("lab/results/experiments/page_rules.json"))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--texts", type=int, default=16, help="of 2,048 tokens; longer ones fewer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.data is None:
        parser.error("give --data FOLDER (or LLN_DATA) with valid.txt[.xz]")
    model, tokenizer = smollm2(given.model)
    model.to(given.device)
    results = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"rows": {}}
    results["setup"] = {
        **describe(given.device, "python -m lln_lab.experiments.page_rules"),
        "transformers": transformers.__version__,
        "calibration_tokens": CALIBRATION_TOKENS,
    }
    text = read_utf8(text_file(given.data, "valid"), "--data")
    for tokens in given.tokens:
        ids = texts_of(text, tokenizer, tokens).to(given.device)
        indices = find_indices(model, ids[: max(CALIBRATION_TOKENS // tokens, 1)])
        count = max(given.texts * 2048 // tokens, 1)
        for row in given.rows:
            cells = results["rows"].setdefault(row, {})
            if str(tokens) in cells:
                continue
            model.set_attn_implementation("sdpa")
            if ROWS[row] is not None:
                variant = Variant(ROWS[row], PAGES.get(tokens, 16), indices)
                transformers.AttentionInterface.register("page_rule", variant.attend)
                model.set_attn_implementation("page_rule")
            texts = ids[FIRST_MEASURED : FIRST_MEASURED + count]
            cells[str(tokens)] = measure(model, texts)
            print(row, tokens, cells[str(tokens)], flush=True)
            write_atomically(given.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
