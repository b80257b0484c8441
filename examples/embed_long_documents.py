"""Embed documents longer than a sentence encoder was made for, at linear cost.

    python examples/embed_long_documents.py                    # a tiny random encoder
    python examples/embed_long_documents.py --model FOLDER --tokens 8192

Positions beyond those the model learned repeat the learned ones. Without further training long
documents are embedded roughly: look at docs/huggingface.md for what conversion costs.
"""

import argparse
import time

import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertModel

from lln.integrations.convert import convert


def extend_positions(model, tokens):
    """Let a model like BERT or RoBERTa read ``tokens`` tokens by repeating its positions."""
    embeddings = model.embeddings
    padding = embeddings.position_embeddings.padding_idx
    # RoBERTa counts positions from behind its padding index, BERT from 0.
    first = 0 if padding is None else padding + 1
    before, learned = embeddings.position_embeddings.weight.data.split_with_sizes(
        [first, len(embeddings.position_embeddings.weight) - first]
    )
    repeats = -(-tokens // len(learned))
    table = torch.cat([before, learned.repeat(repeats, 1)[: max(tokens, len(learned))]])
    embeddings.position_embeddings = nn.Embedding.from_pretrained(
        table, freeze=False, padding_idx=padding
    )
    places = torch.arange(len(table), device=table.device)
    embeddings.register_buffer("position_ids", places[None], persistent=False)
    embeddings.register_buffer("token_type_ids", torch.zeros_like(places)[None], persistent=False)
    model.config.max_position_embeddings = len(table)


@torch.no_grad()
def embed(model, ids, mask):
    """Mean of the last hidden states over the valid tokens, of length one."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return nn.functional.normalize(mean, dim=-1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: a tiny random model")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the documents")
    options = parser.parse_args(arguments)

    if options.model:
        model = AutoModel.from_pretrained(options.model, local_files_only=True).eval()
    else:
        config = BertConfig(
            vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        model = BertModel(config).eval()
    extend_positions(model, options.tokens)

    # Stand-ins for tokenised documents of different lengths; the padding has no effect.
    generator = torch.Generator().manual_seed(0)
    shape = (2, options.tokens)
    ids = torch.randint(5, model.config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(ids)
    mask[1, options.tokens // 2 :] = 0

    softmax_seconds, expected = timed(embed, model, ids, mask)
    sample = {"input_ids": ids[:, :256], "attention_mask": mask[:, :256]}
    print(convert(model, "lln_diag", calibrate=sample))
    seconds, found = timed(embed, model, ids, mask)
    alone = embed(model, ids[1:, : options.tokens // 2], mask[1:, : options.tokens // 2])
    print(f"{options.tokens} tokens: softmax {softmax_seconds:.2f} s, LLN + Diag {seconds:.2f} s")
    print(f"cosine to softmax {(found * expected).sum(-1).min():.3f}")
    print(f"padding moves an embedding by {(found[1] - alone[0]).abs().max():.1e}")
    return found


def timed(function, *arguments):
    """Seconds of the second of two calls, and its result."""
    function(*arguments)
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
