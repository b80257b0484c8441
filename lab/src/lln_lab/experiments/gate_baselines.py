"""Answers without a network, which a reader can check in the head: what a table has to beat."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from lln_lab.experiments.tasks import listops
from lln_lab.experiments.tasks.made_ahead import Arrays
from lln_lab.experiments.tasks.matched_retrieval import fitted_judge, judged
from lln_lab.experiments.tasks.retrieval import Pair


def most_frequent(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The most frequent label of the training examples with the same symbol.

    Args:
        train: ``[n]``, a symbol of every training example.
        labels: ``[n]``.
        test: ``[m]``, that of every example to answer.
    """
    table = np.zeros((max(train.max(), test.max()) + 1, labels.max() + 1), dtype=np.int64)
    np.add.at(table, (train, labels), 1)
    return table.argmax(1)[test]


def bag_of_symbols(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Answers of a multinomial logistic regression on how often every symbol occurs.

    Args:
        train: Ids ``[n, N]``.
        labels: ``[n]``.
        test: ``[m, N]``.
    """

    def counted(ids: np.ndarray) -> torch.Tensor:
        found = np.stack([(ids == symbol).sum(1) for symbol in range(1, listops.CLOSE + 1)], 1)
        # Whether at all, and how often, on a scale that deep trees do not dwarf.
        return torch.from_numpy(np.concatenate([found > 0, np.log1p(found)], 1).astype(np.float32))

    inputs, wanted = counted(train), torch.from_numpy(labels.astype(np.int64))
    weights = torch.zeros(inputs.shape[1], 10, requires_grad=True)
    bias = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(inputs @ weights + bias, wanted) + 1e-4 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return (counted(test) @ weights + bias).argmax(1).numpy()


def of_trees(train: Arrays, test: Arrays) -> dict[str, dict[str, Any]]:
    """Baselines of ListOps, by depth too."""
    ids, labels = train["ids"], train["labels"].astype(np.int64)
    nothing = np.zeros(len(labels), dtype=np.int64)
    answers = {
        "majority": most_frequent(nothing, labels, np.zeros(len(test["ids"]), dtype=np.int64)),
        "outermost operator": most_frequent(ids[:, 0], labels, test["ids"][:, 0]),
        "bag of symbols": bag_of_symbols(ids, labels, test["ids"]),
    }
    found = {}
    for name, given in answers.items():
        right = given == test["labels"]
        depths = {f"depth {depth}": float(right[test["depths"] == depth].mean())
                  for depth in np.unique(test["depths"])}  # fmt: skip
        found[name] = {"accuracy": float(right.mean()), **depths, "questions": len(right)}
    return found


def of_pairs(train: list[Pair], test: list[Pair]) -> dict[str, dict[str, Any]]:
    """Baselines of Retrieval: a logistic regression on byte counts, and their cosine alone."""
    first, second, labels = judged(train)
    tested = judged(test)
    cosines = (first * second).sum(1)
    borders = np.quantile(cosines, np.linspace(0.02, 0.98, 49))
    border = max(borders, key=lambda one: ((cosines > one) == labels).mean())
    answers = {
        "byte counts": fitted_judge(first, second, labels)(*tested[:2]) > 0,
        "cosine of byte counts": (tested[0] * tested[1]).sum(1) > border,
    }
    return {
        name: {"accuracy": float((given == tested[2]).mean()), "questions": len(test)}
        for name, given in answers.items()
    }
