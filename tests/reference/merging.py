"""The merges once more, in float64 NumPy, written from the papers and never from the library.

Plain and slow on purpose: full singular value decompositions, sorts, loops.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def polar(a: Array) -> Array:
    u, _, vh = np.linalg.svd(a, full_matrices=False)
    return u @ vh


def mean(stack: Array) -> Array:
    return np.add.reduce(stack) / len(stack)


def iso_c(stack: Array) -> Array:
    average = mean(stack)
    if average.ndim != 2 or average.size == 0:
        return average
    u, s, vh = np.linalg.svd(average, full_matrices=False)
    return u @ np.diag(np.full_like(s, s.mean())) @ vh


def iso_cts(stack: Array, common_space_fraction: float = 0.8) -> Array:
    if stack.ndim != 3:
        return mean(stack)
    workers, m, n = stack.shape
    w = stack / workers
    k = min(m, n)
    per_worker = min(round((k - int(k * common_space_fraction)) / workers), k // workers)
    common = k - workers * per_worker
    u, s, vh = np.linalg.svd(w.sum(0), full_matrices=False)
    u_common = u[:, :common]
    lefts, values, rights = [], [], []
    for one in w:
        ui, si, vhi = np.linalg.svd(one - u_common @ u_common.T @ one, full_matrices=False)
        lefts.append(ui[:, :per_worker])
        values.append(si[:per_worker])
        rights.append(vhi[:per_worker].T)
    left = polar(np.hstack([*lefts, u_common]))
    right = polar(np.hstack([*rights, vh[:common].T]))
    return np.concatenate([*values, s[:common]]).mean() * left @ right.T


def tsv(stack: Array, singular_ratio: float | None = None, decorrelate: bool = True) -> Array:
    if stack.ndim != 3:
        return mean(stack)
    if len(stack) == 1:
        return stack[0]
    ratio = 1 / len(stack) if singular_ratio is None else singular_ratio
    count = max(1, int(ratio * min(stack.shape[1:])))
    lefts, values, rights = [], [], []
    for one in stack:
        u, s, vh = np.linalg.svd(one, full_matrices=False)
        lefts.append(u[:, :count])
        values.append(s[:count])
        rights.append(vh[:count].T)
    left, right = np.hstack(lefts), np.hstack(rights)
    if decorrelate:
        left, right = polar(left), polar(right)
    return left @ np.diag(np.concatenate(values)) @ right.T


def ties(stack: Array, sparsity: float = 0.1) -> Array:
    flat = stack.reshape(len(stack), -1)
    trimmed = np.zeros_like(flat)
    for row, out in zip(flat, trimmed, strict=True):
        count = max(1, int((1 - sparsity) * row.size))
        order = np.argsort(-np.abs(row), kind="stable")[:count]
        out[order] = row[order]
    merged = np.zeros(flat.shape[1])
    for column in range(flat.shape[1]):
        entries = trimmed[:, column]
        sign = np.sign(entries.sum())
        agreeing = [entry for entry in entries if sign != 0 and np.sign(entry) == sign]
        merged[column] = np.mean(agreeing) if agreeing else 0.0
    return merged.reshape(stack.shape[1:])


def dare(stack: Array, masks: NDArray[np.bool_], sparsity: float = 0.1) -> Array:
    """Merge with the masks given: which entries are kept is chance."""
    return np.where(masks, stack / (1 - sparsity), 0.0).mean(0)


MERGES = {"mean": mean, "iso_c": iso_c, "iso_cts": iso_cts, "tsv": tsv, "ties": ties}
