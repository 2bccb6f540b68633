"""Speed and accuracy of the polar factors and of the merges that need singular triples.

`python -m benchmarks.merging [--device cuda] [--quick] [--rounds N]` writes
results/merging.md and .json (merging-cuda.* on a GPU). Every method is timed against full SVDs in
the same process, rounds interleaved, medians; accuracies are against float64.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import Row, interleaved, median_ratio, write
from isoloco_flwr.merging import iso_cts, tsv
from isoloco_flwr.polar import METHODS, isotropic, polar

LLAMA_178M = Counter({(1024, 1024): 36, (2688, 1024): 18, (1024, 2688): 9, (32000, 1024): 2})
"""Matrices of the 178M Llama: 9 layers of q, k, v, o, of gate and up, of down; embedding, head."""

QUICK = Counter({(256, 256): 36, (672, 256): 18, (256, 672): 9, (4000, 256): 2})
"""The same model at a quarter of the width."""

SPECTRA = {"mild": 1.5, "steep": 3.5}
"""Decades over which the singular values decay, evenly on a logarithmic scale."""


def decaying(m: int, n: int, decades: float, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return a float32 matrix, its exact polar factor (float64) and its mean singular value."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left, right = (
        torch.linalg.qr(torch.randn(side, k, generator=generator, dtype=torch.float64))[0]
        for side in (m, n)
    )
    values = torch.logspace(0, -decades, k, dtype=torch.float64)
    return ((left * values) @ right.mT).float(), left @ right.mT, values.mean().item()


def accuracy(matrix: Tensor, factor: Tensor, mean_value: float, method: str) -> tuple[float, float]:
    """Return the relative error of the polar factor, and of mean(S)."""
    got = polar(matrix, method).cpu().double()
    scaled = isotropic(matrix, method).cpu().double()
    scale = ((scaled * got).sum() / (got * got).sum()).item()
    return ((got - factor).norm() / factor.norm()).item(), scale / mean_value - 1


def polar_rows(shapes: Counter[tuple[int, int]], repeats: int, device: str) -> list[Row]:
    """Time `isotropic` on every matrix of a model, method by method."""
    matrices = {shape: decaying(*shape, SPECTRA["mild"], 0)[0].to(device) for shape in shapes}
    seconds = interleaved(
        {
            (shape, method): partial(isotropic, matrix, method)
            for shape, matrix in matrices.items()
            for method in METHODS
        },
        repeats,
        device,
    )
    model = {
        method: [
            sum(count * seconds[shape, method][number] for shape, count in shapes.items())
            for number in range(repeats)
        ]
        for method in METHODS
    }
    square, tall, _, embedding = shapes
    errors = {
        (method, name, shape): accuracy(matrix.to(device), factor, mean_value, method)
        for name, decades in SPECTRA.items()
        for shape in (square, tall)
        for matrix, factor, mean_value in [decaying(*shape, decades, 1)]
        for method in METHODS
    }
    rows: list[Row] = []
    for method in METHODS:
        row: dict[str, object] = {"method": method}
        for shape in (square, tall, embedding):
            row[f"{shape[0]}×{shape[1]}, ms"] = f"{1e3 * median(seconds[shape, method]):.0f}"
        row["whole model, s"] = f"{median(model[method]):.1f}"
        row["times faster than SVD"] = f"{median_ratio(model['svd'], model[method]):.2f}"
        for name in SPECTRA:
            worst = max(errors[method, name, shape][0] for shape in (square, tall))
            row[f"polar factor off, {name}"] = f"{worst:.1e}"
        for name in SPECTRA:
            worst = max((errors[method, name, shape][1] for shape in (square, tall)), key=abs)
            row[f"mean(S) off, {name}"] = f"{100 * worst:+.2f} %"
        rows.append(row)
    return rows


def plain_tsv(stack: Tensor) -> Tensor:
    """TSV-M as it is written down: full SVDs of all workers, SVDs of both stacks."""
    count = max(1, min(stack.shape[1:]) // len(stack))
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    left = _svd_polar(torch.cat([one[:, :count] for one in u], dim=1))
    right = _svd_polar(torch.cat([one[:count].mT for one in vh], dim=1))
    return (left * torch.cat([one[:count] for one in s])) @ right.mT


def plain_iso_cts(stack: Tensor, fraction: float = 0.8) -> Tensor:
    """Iso-CTS as it is written down: full SVDs of the sum, of all residuals, of both stacks."""
    w = stack / len(stack)
    k = min(stack.shape[1:])
    task = min(round((k - int(k * fraction)) / len(w)), k // len(w))
    common = k - len(w) * task
    u, s, vh = torch.linalg.svd(w.sum(0), full_matrices=False)
    u, s, vh = u[:, :common], s[:common], vh[:common]
    ui, si, vhi = torch.linalg.svd(w - u @ (u.mT @ w), full_matrices=False)
    left = _svd_polar(torch.cat([*(one[:, :task] for one in ui), u], dim=1))
    right = _svd_polar(torch.cat([*(one[:task].mT for one in vhi), vh.mT], dim=1))
    size = torch.cat([*(one[:task] for one in si), s]).mean()
    return (size * left) @ right.mT


def _svd_polar(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    factor: Tensor = u @ vh
    return factor


def workers(count: int, m: int, n: int, decades: float) -> Tensor:
    """Return a float64 stack: half of each worker's matrix is common to all."""
    parts = [decaying(m, n, decades, seed)[0].double() for seed in range(count + 1)]
    return torch.stack([0.5 * parts[0] + 0.75**0.5 * part for part in parts[1:]])


def merge_rows(side: int, repeats: int, device: str) -> list[Row]:
    """Time TSV and Iso-CTS of 8 workers against full SVDs."""
    merges: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "tsv": (tsv, plain_tsv),
        "iso_cts": (iso_cts, plain_iso_cts),
    }
    rows: list[Row] = []
    for name, decades in SPECTRA.items():
        exact = workers(8, side, side, decades).to(device)
        stack = exact.float()
        for method, (ours, plain) in merges.items():
            want = plain(exact)
            off = {
                key: ((function(stack).double() - want).norm() / want.norm()).item()
                for key, function in {"ours": ours, "plain": plain}.items()
            }
            seconds = interleaved(
                {"ours": partial(ours, stack), "plain": partial(plain, stack)}, repeats, device
            )
            rows.append(
                {
                    "merge": method,
                    "spectrum": name,
                    "full SVDs, s": f"{median(seconds['plain']):.2f}",
                    "ours, s": f"{median(seconds['ours']):.2f}",
                    "times faster": f"{median_ratio(seconds['plain'], seconds['ours']):.2f}",
                    "full SVDs off": f"{off['plain']:.1e}",
                    "ours off": f"{off['ours']:.1e}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--quick", action="store_true", help="a quarter of the width")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    arguments = parser.parse_args()
    device, quick = arguments.device, arguments.quick
    repeats = arguments.rounds
    side = 256 if quick else 1024
    sections = {
        "Isotropic matrices of the "
        + ("178M Llama at a quarter of its width" if quick else "178M Llama"): polar_rows(
            QUICK if quick else LLAMA_178M, repeats, device
        ),
        f"Merges of 8 workers, {side}×{side}": merge_rows(side, repeats, device),
    }
    name = "merging" + ("" if device == "cpu" else f"-{device}") + ("-quick" if quick else "")
    path = write(name, "Merging", sections, device)
    print(path.read_text())


if __name__ == "__main__":
    main()
