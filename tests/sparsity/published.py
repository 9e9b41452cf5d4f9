"""The published algorithms once more, from the papers and as plainly as they can be: fp64, a column at a time.

Frantar and Alistarh, SparseGPT (2023), algorithm 1 and equation 3; Sun et al., Wanda (2023), equation 1. H^-1 is kept
whole and loses a row and a column by elimination; nothing is factored.
"""

from itertools import combinations

import torch


def hessian(inputs):
    """(2/n) sum x x^T."""
    total = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64)
    for x in inputs.double():
        total += torch.outer(x, x)
    return total * 2 / len(inputs)


def damped_inverse(matrix, damping=0.01):
    matrix = matrix.clone().double()
    for i in range(len(matrix)):
        if matrix[i, i] == 0:
            matrix[i, i] = 1
    matrix += torch.eye(len(matrix), dtype=torch.float64) * damping * matrix.diagonal().mean()
    return torch.linalg.inv(matrix)


def eliminated(inverse, i):
    """H^-1 of the columns after i: the inverse of H without its row and column i."""
    return inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]


def conditional_variances(inverse):
    """[H^-1]_ii as it is once all columns before i are gone."""
    values = []
    for i in range(len(inverse)):
        values.append(inverse[i, i].item())
        inverse = eliminated(inverse, i)
    return values


def by_group(scores, keep, group):
    """A mask from scores: of all ways to keep so many of a group, the one that keeps the most."""
    ways = list(combinations(range(group), keep))
    groups = scores.reshape(-1, group)
    best = torch.stack([groups[:, way].sum(1) for way in map(list, ways)], dim=1).argmax(1)
    masks = torch.tensor([[place in way for place in range(group)] for way in ways])
    return masks[best].view(scores.shape)


def wanda(weight, inputs, keep, group):
    norms = [sum(float(x) ** 2 for x in inputs[:, i]) ** 0.5 for i in range(inputs.shape[1])]
    return by_group(weight.double().abs() * torch.tensor(norms, dtype=torch.float64), keep, group)


def one_look(weight, inputs, keep, group):
    """`hessian`: SparseGPT's score of the weights as they are."""
    variances = torch.tensor(conditional_variances(damped_inverse(hessian(inputs))), dtype=torch.float64)
    return by_group(weight.double() ** 2 / variances, keep, group)


def sparsegpt(weight, inputs, keep, group, share=None, block=128):
    """The mask and the weights, column by column; without groups a share of each block of columns goes."""
    matrix = hessian(inputs)
    inverse = damped_inverse(matrix)
    variances = torch.tensor(conditional_variances(inverse), dtype=torch.float64)
    weight = weight.double().clone()
    weight[:, matrix.diagonal() == 0] = 0
    mask = torch.ones(weight.shape, dtype=torch.bool)
    for i in range(weight.shape[1]):
        if share is None and i % group == 0:
            ahead = slice(i, i + group)
            mask[:, ahead] = by_group(weight[:, ahead] ** 2 / variances[ahead], keep, group)
        elif share is not None and i % block == 0:
            scores = weight[:, i : i + block] ** 2 / variances[i : i + block]
            lowest = scores.flatten().argsort()[: int(scores.numel() * share)]
            mask[:, i : i + block] = torch.ones(scores.numel()).bool().index_fill(0, lowest, False).view(scores.shape)
        errors = torch.where(mask[:, i], 0.0, weight[:, i] / inverse[i, i])
        weight -= torch.outer(errors, inverse[i])
        weight[~mask[:, i], i] = 0
        inverse = eliminated(inverse, i)
        inverse[i] = inverse[:, i] = 0
    return mask, weight
