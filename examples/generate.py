"""Generate text at a cost per token that does not depend on the length so far.

    python examples/generate.py                    # a tiny random Llama
    python examples/generate.py --model FOLDER     # a causal checkpoint folder of yours

A causal model cannot take α and β from the sequence it is writing, so it is converted with a batch
to calibrate them on; then ``generate()`` keeps a state of fixed size by itself.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from lln.integrations.convert import convert
from lln.integrations.transformers import LLNCache


@torch.no_grad()
def seconds_per_token(model, cache, tokens, new=16):
    """Time of a step after ``tokens`` tokens, with the given cache."""
    ids = torch.randint(5, model.config.vocab_size, (1, tokens))
    model(ids, past_key_values=cache)
    start = time.perf_counter()
    for _ in range(new):
        model(ids[:, :1], past_key_values=cache)
    return (time.perf_counter() - start) / new


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: a tiny random model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True).eval()
    else:
        config = LlamaConfig(
            vocab_size=200,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config).eval()
    vocabulary = model.config.vocab_size
    prompt = torch.randint(5, vocabulary, (2, 24))
    text = {"input_ids": torch.randint(5, vocabulary, (4, 128))}
    text["attention_mask"] = torch.ones_like(text["input_ids"])

    softmax = {n: seconds_per_token(model, DynamicCache(), n) for n in options.lengths}
    print(convert(model, "lln_diag", calibrate=text))
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False
    )
    beams = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, num_beams=4
    )
    print(f"generated {tuple(out.shape)} greedily and {tuple(beams.shape)} with four beams")
    for length in options.lengths:
        cache = LLNCache(model)
        seconds = seconds_per_token(model, cache, length)
        print(
            f"after {length:5d} tokens: softmax {1e3 * softmax[length]:6.2f} ms a token, "
            f"LLN + Diag {1e3 * seconds:6.2f} ms, state {cache.size() / 1024:.0f} KiB"
        )
    return out


if __name__ == "__main__":
    main()
