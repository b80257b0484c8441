"""Hugging Face models whose tokens lie on several ranks: loss and gradients of one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.checkpointing import checkpoint_layers
from tests.pages import blocks, needs_pages
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import lln
from lln.errors import CalibrationWarning
from lln.integrations.context_parallel import connect, disconnect, shard_batch
from lln.integrations.convert import convert
from lln.integrations.transformers import register
from lln.parallel import sum_gradients

TOKENS, VOCABULARY, PADDING, MULTIPLE = 22, 31, 1, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": TOKENS + 2,
    "pad_token_id": PADDING,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Converted models keep α, β, offset and join in modules of their own, others have none.
CONVERTED = {
    "lln fixed": ("lln", {"statistics": "fixed"}),
    "lln learned": ("lln", {"statistics": "learned"}),
    "lln_diag sample": ("lln_diag", {"statistics": "sample", "mix": "gate", "block_size": 5}),
    "lln_diag ratio": ("lln_diag", {"statistics": "learned", "mix": "ratio"}),
    "lln_keys learned": ("lln_keys", {"statistics": "learned", "keys": 3, "block_size": 4}),
}


def loaded(group, rank):
    """Nothing; but to be called, this file and with it transformers must have been loaded."""


@pytest.fixture(scope="module")
def pair(pool):
    """The pool, with two processes that have loaded transformers, which takes them long."""
    pool.run(loaded, 2, patience=200)
    return pool


def batch_of(padded=True):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 17:], mask[1, :3] = 0, 0
        ids = ids.masked_fill(mask == 0, PADDING)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_model(family, attention, positions=TOKENS + 2):
    register()
    torch.manual_seed(0)
    kind, config = {
        "roberta": (RobertaForMaskedLM, RobertaConfig),
        "bert": (BertForMaskedLM, BertConfig),
    }[family]
    sizes = SIZES | {"max_position_embeddings": positions}
    config = config(**sizes, attn_implementation=attention)
    if attention != "sdpa":
        config.lln = {"block_size": 4, "keys": 3} if attention == "lln_keys" else {"block_size": 5}
    return kind(config).double()


def converted_model(attention, options):
    model = plain_model("roberta", "sdpa")
    batch = {name: entry for name, entry in batch_of().items() if name != "labels"}
    with warnings.catch_warnings():
        # That so few tokens are little to calibrate on.
        warnings.simplefilter("ignore", CalibrationWarning)
        convert(model, attention, calibrate=batch, **options)
    return model


def step(model, batch, group=None):
    """The loss of all tokens and the gradients of all weights."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model.train()(**batch).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    if group is not None:
        dist.all_reduce(count, group=group)
    loss = total / count
    loss.backward()
    found = loss.detach().clone()
    if group is not None:
        dist.all_reduce(found, group=group)
        sum_gradients(model, group)
    # An unused weight has no gradient on one process, and zeros after a sum.
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return found, {name: grad for name, grad in gradients.items() if grad is not None}


def on_ranks(group, rank, model, padded, again=False):
    if again:
        checkpoint_layers(model, use_reentrant=False)
    connect(model, group)
    return step(model, shard_batch(model, batch_of(padded), group, multiple_of=MULTIPLE), group)


def assert_like_one_process(pair, model, padded=True, **options):
    loss, gradients = step(copy.deepcopy(model), batch_of(padded))
    for found, sums in pair.run(on_ranks, 2, model, padded, *options.values()):
        assert abs(found - loss) < 1e-10
        assert set(gradients) <= set(sums)
        for name, grad in sums.items():
            expected = gradients.get(name, torch.zeros_like(grad))
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "lln_keys"])
@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_a_model_learns_what_it_learns_on_one_process(pair, family, attention):
    assert_like_one_process(pair, plain_model(family, attention))


def test_a_batch_without_padding(pair):
    assert_like_one_process(pair, plain_model("roberta", "lln_diag"), padded=False)


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_model(pair, case):
    assert_like_one_process(pair, converted_model(*CONVERTED[case]))


def test_activation_checkpointing(pair):
    """The second forward pass happens inside backward, and has to be parallel too."""
    assert_like_one_process(pair, plain_model("roberta", "lln_diag"), again=True)


def message_of(call):
    try:
        call()
    except lln.LLNError as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused(group, rank, model, training=True):
    connect(model.train(training), group)
    batch = shard_batch(model, batch_of(), group, multiple_of=MULTIPLE)
    return message_of(lambda: model(**batch))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("lln", {"statistics": "running"}), "statistics='fixed', 'learned' or 'sample'"),
        (("lln_diag", {"mix": "scale"}), "mix='scale' has no parallel form; convert with"),
        (("lln_diag", {"layers": [0]}), "convert all of its layers"),
    ],
)
def test_models_that_cannot_be_divided(pair, options, fragment):
    model = converted_model(*options)
    assert all(fragment in text for text in pair.run(refused, 2, model))


def test_running_statistics_that_rest(pair):
    model = converted_model("lln", {"statistics": "running"})
    assert pair.run(refused, 2, model, False) == [None, None]


def causal(group, rank):
    register()
    config = LlamaConfig(**dict(list(SIZES.items())[:6]), attn_implementation="lln")
    config.lln = {"statistics": "fixed", "alpha": 1.2, "beta": 1.1}
    model = LlamaForCausalLM(config).double().eval()
    whole = {name: entry for name, entry in batch_of(False).items() if name != "labels"}
    # Without weights of its own every rank would draw others.
    for weight in model.parameters():
        dist.broadcast(weight.data, group_src=0, group=group)
    expected = model(**whole, use_cache=False).logits
    connect(model, group)
    shard = shard_batch(model, whole, group, multiple_of=MULTIPLE)
    found = model(**shard, use_cache=False).logits
    start = int(shard["position_ids"][0, 0])
    with_labels = message_of(lambda: shard_batch(model, batch_of(False), group, multiple_of=4))
    disconnect(model)
    alone = model(**shard, use_cache=False).logits
    place = slice(start, start + found.shape[1])
    return (found - expected[:, place]).abs().max(), (alone - found).abs().max(), with_labels


def test_a_causal_model(pair):
    first, second = pair.run(causal, 2)
    assert max(first[0], second[0]) < 1e-12
    # Disconnected, the second rank does not see the first one's tokens.
    assert second[1] > 1e-3
    assert "labels of a causal model" in first[2]


def wrong_use(group, rank):
    register()
    config = BertConfig(**SIZES, attn_implementation="lln")
    classifier, model = BertForSequenceClassification(config), BertForMaskedLM(config)
    batch = batch_of()
    connect(model, group)
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    return [
        message_of(lambda: connect(plain_model("bert", "sdpa"), group)),
        message_of(lambda: connect(classifier, group)),
        message_of(lambda: shard_batch(model, batch, group)),
        message_of(lambda: shard_batch(model, {"attention_mask": batch["labels"]}, group)),
        message_of(lambda: shard_batch(model, batch | {"labels": torch.ones(3)}, group)),
        message_of(lambda: model(**inputs, output_attentions=True)),
        message_of(lambda: convert(model, "lln_diag", batch=inputs)),
    ]


def test_wrong_use(pair):
    expected = (
        "call lln.integrations.convert.convert(model) first",
        "connect model.base_model",
        "22 tokens in pieces of 64 do not suffice for 2 ranks",
        "needs input_ids",
        "labels must have an entry for each of the 22 tokens",
        "output_attentions=True",
        "disconnect(model) first",
    )
    for found in pair.run(wrong_use, 2):
        for text, fragment in zip(found, expected, strict=True):
            assert fragment in (text or ""), (text, fragment)


def read_page(group, rank, model):
    names = {"model": model, "group": group, "batch": batch_of()}
    # Whole pieces of 64 tokens need a longer sequence.
    names["batch"] = {name: side.repeat(1, 4) for name, side in names["batch"].items()}
    exec(blocks("docs/parallel.md")[2], names)
    return names["loss"], names["shard"]["input_ids"].shape[1]


@needs_pages
def test_the_guide_runs(pair):
    model = plain_model("bert", "lln", positions=4 * TOKENS)
    (first, head), (second, tail) = pair.run(read_page, 2, model)
    assert (head, tail) == (64, 4 * TOKENS - 64)
    assert first + second > 0
