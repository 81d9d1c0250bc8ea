"""Classify handwritten digits from a few labels, by their neighbours: a GCN, a GraphSAGE and a GAT.

The nodes are the 1797 images of scikit-learn's `load_digits`; each is joined to the images most like it.
The models are written against torch_geometric and know a few labels per class. Each is trained twice from the
same parameters: as it is, and after one line, `convert(model)`; their epochs alternate, so that speed is
compared under the same conditions. Then the trained model itself is converted, and has to say of every image
what it said before. Without torch_geometric the same models are made of fastattn.nn's layers and trained
once. Writes a picture of the graph coloured by prediction to `demo_output/`.

    python examples/classify_digits.py [--epochs N] [--out FOLDER] ...
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn
from tqdm import tqdm

import fastattn

try:
    import torch_geometric.nn as layers

    from fastattn.integrations.torch_geometric import convert
except ImportError:
    layers, convert = fastattn.nn, None

CLASSES = 10
VARIANTS = ("torch_geometric", "fastattn") if convert else ("fastattn",)
# Bounds on |difference of the losses| between the variants. The first epoch differs by rounding alone; Adam
# feeds the rounding of every epoch back into the parameters, so the curves drift apart slowly.
FIRST_EPOCH_BOUND = 1e-5
CURVE_BOUND = 5e-2


class Model(nn.Module):
    """Two graph layers: logits of the classes (N, 10) from features (N, F)."""

    def __init__(self, kind: str, features: int, options: argparse.Namespace):
        super().__init__()
        hidden = options.hidden
        if kind == "GCN":
            self.first = layers.GCNConv(features, hidden)
            self.second = layers.GCNConv(hidden, CLASSES)
        elif kind == "SAGE":
            self.first = layers.SAGEConv(features, hidden)
            self.second = layers.SAGEConv(hidden, CLASSES)
        else:
            self.first = layers.GATConv(features, hidden // options.heads, heads=options.heads)
            self.second = layers.GATConv(hidden, CLASSES)
        self.dropout = options.dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = F.elu(self.first(F.dropout(x, self.dropout, self.training), edge_index))
        return self.second(F.dropout(hidden, self.dropout, self.training), edge_index)


KINDS = ("GCN", "SAGE", "GAT")


class Digits:
    """The images and the graph that joins each to its nearest ones, in both directions."""

    def __init__(self, options: argparse.Namespace):
        images, labels = load_digits(return_X_y=True)
        images, labels = images[: options.images], labels[: options.images]
        self.x = torch.tensor(images, dtype=torch.float32) / 16
        self.labels = torch.tensor(labels)
        near = kneighbors_graph(images, options.neighbours).tocoo()
        edges = torch.tensor([near.col.tolist(), near.row.tolist()])
        self.edge_index = torch.unique(torch.cat([edges, edges.flip(0)], dim=1), dim=1).contiguous()
        # The images in random order; the first few of each class have a label.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
        known = [order[self.labels[order] == label][: options.labels] for label in range(CLASSES)]
        self.known = torch.cat(known)
        self.hidden = torch.ones(len(labels), dtype=torch.bool)
        self.hidden[self.known] = False
        if not self.hidden.any():
            raise SystemExit(f"--labels {options.labels} makes every image known: none is left to classify")

    def accuracy(self, predicted: Tensor) -> float:
        """On the images whose label the models have not seen."""
        return (predicted == self.labels)[self.hidden].double().mean().item()


class Trainer:
    def __init__(self, model: Model, digits: Digits, options: argparse.Namespace):
        self.model, self.digits, self.seed = model, digits, options.seed
        self.optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, weight_decay=5e-4)

    def epoch(self, number: int) -> float:
        digits = self.digits
        torch.manual_seed(self.seed + number)  # the same dropout for both variants
        self.model.train()
        self.optimizer.zero_grad()
        logits = self.model(digits.x, digits.edge_index)
        loss = F.cross_entropy(logits[digits.known], digits.labels[digits.known])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def predict(self) -> Tensor:
        self.model.eval()
        return self.model(self.digits.x, self.digits.edge_index).argmax(dim=1)


def build(kind: str, digits: Digits, options: argparse.Namespace) -> dict[str, Trainer]:
    """A trainer per variant, from the same initial parameters."""
    torch.manual_seed(options.seed)
    model = Model(kind, digits.x.shape[1], options)
    models = {variant: copy.deepcopy(model) for variant in VARIANTS}
    if convert:
        print(f"{kind}: {convert(models['fastattn'])}")
    return {variant: Trainer(model, digits, options) for variant, model in models.items()}


def train(
    kind: str, trainers: dict[str, Trainer], options: argparse.Namespace, deadline: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of every epoch. The variants take turns at going first."""
    losses: dict[str, list[float]] = {variant: [] for variant in trainers}
    seconds: dict[str, list[float]] = {variant: [] for variant in trainers}
    for number in tqdm(range(options.epochs), desc=f"training {kind}", unit="epoch", dynamic_ncols=True):
        for variant in list(trainers)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            losses[variant].append(trainers[variant].epoch(number))
            seconds[variant].append(time.perf_counter() - begin)
        if time.perf_counter() > deadline:
            tqdm.write(f"time limit reached after {number + 1} epochs of {kind}")
            break
    return losses, seconds


def run(kind: str, digits: Digits, options: argparse.Namespace, deadline: float) -> tuple[dict, Tensor]:
    """What became of one kind of model, and what it says of every image."""
    trainers = build(kind, digits, options)
    losses, seconds = train(kind, trainers, options, deadline)
    predicted = {variant: trainer.predict() for variant, trainer in trainers.items()}
    report = {
        "epochs": len(losses["fastattn"]),
        "loss": losses,
        "seconds_per_epoch": {variant: statistics.median(values) for variant, values in seconds.items()},
        "accuracy": {variant: digits.accuracy(values) for variant, values in predicted.items()},
    }
    if convert:
        theirs = trainers["torch_geometric"]
        convert(theirs.model)
        after = theirs.predict()
        differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
        report |= {
            "speed_ratio": statistics.median(
                a / b for a, b in zip(seconds["torch_geometric"], seconds["fastattn"], strict=True)
            ),
            "max_loss_difference": max(differences),
            "first_loss_difference": differences[0],
            "accuracy_after_conversion": digits.accuracy(after),
            "predictions_changed": int((after != predicted["torch_geometric"]).sum()),
        }
    return report, predicted["fastattn"]


def places(images: Tensor, seed: int) -> Tensor:
    """Where to draw each image, like ones beside each other."""
    if len(images) < 100:
        return torch.tensor(PCA(2, random_state=seed).fit_transform(images))
    return torch.tensor(TSNE(init="pca", random_state=seed, max_iter=500).fit_transform(images))


def plot(path: Path, digits: Digits, predicted: dict[str, Tensor], reports: dict, seed: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    position = places(digits.x, seed)
    lines = position[digits.edge_index].transpose(0, 1).numpy()
    figure, panels = plt.subplots(
        1, len(predicted), figsize=(6 * len(predicted), 6.4), layout="constrained", squeeze=False
    )
    for axes, (kind, labels) in zip(panels[0], predicted.items(), strict=True):
        axes.add_collection(LineCollection(lines, colors="0.6", linewidths=0.15, zorder=0))
        wrong = labels != digits.labels
        dots = axes.scatter(*position.T, c=labels, cmap="tab10", vmin=-0.5, vmax=9.5, s=7)
        axes.scatter(
            *position[wrong].T, facecolors="none", edgecolors="black", s=34, linewidths=0.8, label="wrong"
        )
        axes.scatter(
            *position[digits.known].T,
            c=digits.labels[digits.known],
            cmap="tab10",
            vmin=-0.5,
            vmax=9.5,
            s=70,
            marker="*",
            edgecolors="black",
            linewidths=0.6,
            label="label given",
        )
        axes.set_title(f"{kind}: {reports[kind]['accuracy']['fastattn']:.1%} of the others right")
        axes.set_axis_off()
        axes.legend(loc="lower right")
    figure.colorbar(dots, ax=panels[0], ticks=range(CLASSES), label="predicted digit", shrink=0.8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--time-limit", type=float, default=50.0, metavar="SECONDS", help="of all trainings")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="FOLDER")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--images", type=int, default=1797)
    parser.add_argument("--neighbours", type=int, default=10, help="of each image, before both directions")
    parser.add_argument("--labels", type=int, default=4, help="known per class")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    for name in ("epochs", "neighbours", "labels", "hidden", "heads", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.images <= options.neighbours:
        parser.error(f"--images must be more than the {options.neighbours} neighbours, got {options.images}")
    if options.hidden % options.heads:
        parser.error(f"--hidden must be a multiple of the {options.heads} heads, got {options.hidden}")
    if not 0 <= options.dropout <= 1:
        parser.error(f"--dropout must be between 0 and 1, got {options.dropout}")
    if not 0 <= options.seed < 2**32 - options.epochs:
        parser.error(f"--seed must be between 0 and 2**32 - epochs, got {options.seed}")
    return options


def main(arguments: list[str]) -> None:
    begin = time.perf_counter()
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    digits = Digits(options)
    graph = fastattn.Graph(digits.edge_index, num_nodes=len(digits.x))
    print(f"{graph}, {len(digits.known)} labels known, {options.threads} threads")
    print(fastattn.explain(fastattn.aggregate, digits.x, graph))
    if not convert:
        print("torch_geometric is not installed: the models are made of fastattn.nn's layers, trained once")

    reports, predicted = {}, {}
    start = time.perf_counter()
    for number, kind in enumerate(options.kinds, 1):
        deadline = start + options.time_limit * number / len(options.kinds)
        reports[kind], predicted[kind] = run(kind, digits, options, deadline)

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "digits_graph.png"
    plot(picture, digits, predicted, reports, options.seed)
    report = {"models": reports, "seconds": time.perf_counter() - begin}
    (options.out / "classify_digits.json").write_text(json.dumps(report, indent=1) + "\n")

    for kind, found in reports.items():
        print(f"\n{kind} after {found['epochs']} epochs")
        print(f"  accuracy on unknown labels: {_each(found['accuracy'], '{:.2%}'.format)}")
        print(f"  time per epoch: {_each(found['seconds_per_epoch'], lambda s: f'{s * 1e3:.2f} ms')}", end="")
        if not convert:
            print()
            continue
        print(f"; fastattn is {found['speed_ratio']:.2f}x as fast")
        print(f"  largest difference of the loss curves: {found['max_loss_difference']:.1e}")
        print(
            f"  the trained model converted: {found['accuracy_after_conversion']:.2%}, "
            f"{found['predictions_changed']} of {len(digits.x)} predictions changed"
        )
    print(f"\n{picture} written; {report['seconds']:.0f} s in total")

    for kind, found in reports.items() if convert else ():
        first, largest = found["first_loss_difference"], found["max_loss_difference"]
        if not (first <= FIRST_EPOCH_BOUND and largest <= CURVE_BOUND):  # a NaN is no agreement, either
            raise SystemExit(f"the loss curves of {kind} differ by more than rounding")
        if found["accuracy_after_conversion"] != found["accuracy"]["torch_geometric"]:
            raise SystemExit(f"the accuracy of {kind} is another one after the conversion")


def _each(values: dict, text: Callable[[object], str]) -> str:
    return ", ".join(f"{variant} {text(value)}" for variant, value in values.items())


if __name__ == "__main__":
    main(sys.argv[1:])
