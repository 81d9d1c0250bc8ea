"""Train a small linear Transformer to draw handwritten digits, pixel by pixel, and let it draw.

The images are the 1797 real ones of scikit-learn's `load_digits`: 8x8 pixels of 17 grey levels. Training
sees whole images at once (causal linear attention); drawing is recurrent, one step per pixel with a state
that does not grow, and is checked to give the same probabilities. Writes real and drawn digits, bits per
pixel on images held out of the training, and the time per pixel beside a softmax Transformer of the same size
with a cache of keys and values, to `demo_output/`.

    python examples/generate_digits.py [--steps N] [--out FOLDER] ...
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import fastattn

SIDE, LEVELS, DIGITS = 8, 17, 10
PIXELS = SIDE * SIDE
HELD_OUT = 297
# Bound on |difference of the logits| between drawing and the whole image at once: both round, differently.
AGREEMENT = 1e-3
# Pixels per point of the plot; the two models take turns after as many.
BLOCK = 64


class SoftmaxAttention(nn.MultiheadAttention):
    """Causal softmax attention that keeps the keys and values of the past for its steps."""

    def forward(self, x: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, x, x, attn_mask=future, is_causal=True, need_weights=False)[0]

    def initial_state(self, batch: int, length: int) -> Tensor:
        return torch.zeros(2, batch, self.num_heads, length, self.head_dim)

    def step(self, x: Tensor, cache: Tensor, position: int) -> tuple[Tensor, Tensor]:
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, *new = projected.unflatten(-1, (3, self.num_heads, 1, self.head_dim)).unbind(1)
        cache[:, :, :, position] = torch.stack(new).squeeze(3)
        out = F.scaled_dot_product_attention(query, *cache[:, :, :, : position + 1])
        return self.out_proj(out.flatten(1)), cache


class LinearAttention(fastattn.nn.LinearMultiheadAttention):
    """The same with linear attention: what it keeps has a fixed size, whatever the length and position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, is_causal=True)[0]

    def initial_state(self, batch: int, length: int) -> fastattn.LinearAttentionState:
        return super().initial_state(batch)

    def step(self, x: Tensor, state, position: int) -> tuple[Tensor, fastattn.LinearAttentionState]:
        return super().step(x, state, inplace=not torch.is_grad_enabled())


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, dropout: float):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.feed_forward(self.norms[1](x)))

    def step(self, x: Tensor, state, position: int):
        out, state = self.attention.step(self.norms[0](x), state, position)
        x = x + out
        return x + self.feed_forward(self.norms[1](x)), state


class Painter(nn.Module):
    """Logits of every pixel (B, 64, 17) from the digit to draw (B,) and the pixels before it (B, 64)."""

    def __init__(self, attention: type[nn.Module], options: argparse.Namespace):
        super().__init__()
        d_model = options.d_model
        # What came before the first pixel is the digit that is to be drawn.
        self.tokens = nn.Embedding(LEVELS + DIGITS, d_model)
        self.positions = nn.Embedding(PIXELS, d_model)
        self.layers = nn.ModuleList(
            Layer(attention(d_model, options.heads, batch_first=True), d_model, options.dropout)
            for _ in range(options.layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, LEVELS))

    def forward(self, digits: Tensor, pixels: Tensor) -> Tensor:
        before = torch.cat([LEVELS + digits.unsqueeze(1), pixels[:, :-1]], dim=1)
        x = self.tokens(before) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def initial_states(self, batch: int, length: int = PIXELS) -> list:
        """One state per layer."""
        return [layer.attention.initial_state(batch, length) for layer in self.layers]

    def step(self, before: Tensor, position: int, states: list) -> tuple[Tensor, list]:
        """Logits of one pixel (B, 17) from what came directly before it (B,) and the states of the layers."""
        x = self.tokens(before) + self.positions.weight[position % PIXELS]
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer.step(x, state, position)
            after.append(state)
        return self.head(x), after


def images(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(digits, pixels) to train on and held out."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    digits = torch.from_numpy(data.target).long()[order]
    pixels = torch.from_numpy(data.data).long()[order]
    return (digits[:-HELD_OUT], pixels[:-HELD_OUT]), (digits[-HELD_OUT:], pixels[-HELD_OUT:])


def train(model: Painter, digits: Tensor, pixels: Tensor, options: argparse.Namespace) -> list[float]:
    """Bits per pixel of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps + 1)
    generator = torch.Generator().manual_seed(options.seed)
    deadline = time.perf_counter() + options.time_limit
    bits: list[float] = []
    model.train()
    with tqdm(total=options.steps, desc="training", unit="step", dynamic_ncols=True) as progress:
        for step in range(options.steps):
            batch = torch.randint(len(digits), (options.batch,), generator=generator)
            logits = model(digits[batch], pixels[batch])
            loss = F.cross_entropy(logits.flatten(0, 1), pixels[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bits.append(loss.item() / math.log(2))
            progress.set_postfix(bits=f"{bits[-1]:.3f}")
            progress.update()
            if time.perf_counter() > deadline:
                tqdm.write(f"time limit of {options.time_limit:.0f} s reached after {step + 1} steps")
                break
    return bits


@torch.no_grad()
def bits_per_pixel(model: Painter, digits: Tensor, pixels: Tensor) -> float:
    model.eval()
    loss = F.cross_entropy(model(digits, pixels).flatten(0, 1), pixels.flatten())
    return loss.item() / math.log(2)


def histogram_bits(train_set: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> float:
    """Bits per pixel of what counting gives: the levels of each position of each digit, all pixels alone."""
    counts = torch.ones(DIGITS, PIXELS, LEVELS)
    for digit, image in zip(*train_set, strict=True):
        counts[digit, torch.arange(PIXELS), image] += 1
    probability = counts / counts.sum(-1, keepdim=True)
    digits, pixels = held_out
    return -probability[digits.unsqueeze(1), torch.arange(PIXELS), pixels].log2().mean().item()


@torch.no_grad()
def draw(model: Painter, digits: Tensor, seed: int) -> Tensor:
    """One image (64 pixels) per digit, recurrently."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    states, before, drawn = model.initial_states(len(digits)), LEVELS + digits, []
    for position in range(PIXELS):
        logits, states = model.step(before, position, states)
        before = torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator).squeeze(1)
        drawn.append(before)
    return torch.stack(drawn, dim=1)


@torch.no_grad()
def draw_by_prefix(model: Painter, digits: Tensor, seed: int) -> Tensor:
    """The same images without steps: everything so far goes through the model again for every pixel."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.zeros(len(digits), PIXELS, dtype=torch.long)
    for position in range(PIXELS):
        # Causal: what stands at this position and later has no influence on the logits taken.
        logits = model(digits, pixels)[:, position]
        pixels[:, position] = torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator).squeeze(1)
    return pixels


@torch.no_grad()
def largest_difference(model: Painter, digits: Tensor, pixels: Tensor) -> float:
    """Between the logits of whole images and those of the recurrent steps on the same pixels."""
    model.eval()
    expected, states, before = model(digits, pixels), model.initial_states(len(digits)), LEVELS + digits
    worst = 0.0
    for position in range(PIXELS):
        logits, states = model.step(before, position, states)
        worst = max(worst, (logits - expected[:, position]).abs().max().item())
        before = pixels[:, position]
    return worst


def size_of(state) -> int:
    return sum(tensor.nbytes for tensor in state)


@torch.no_grad()
def time_per_pixel(models: dict[str, Painter], batch: int, length: int) -> dict[str, list[float]]:
    """Median seconds of a step in each block of positions, the models taking turns block by block.

    An image is too short for a cache to show, so the sequence goes on with one image behind the other.
    """
    states = {name: model.eval().initial_states(batch, length) for name, model in models.items()}
    before = torch.zeros(batch, dtype=torch.long)
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(20):  # threads and buffers exist before the count
            model.step(before, 0, model.initial_states(batch, 1))
    for start in tqdm(range(0, length, BLOCK), desc="timing", unit="block", dynamic_ncols=True):
        for name, model in models.items():
            seconds = []
            for position in range(start, min(start + BLOCK, length)):
                begin = time.perf_counter()
                logits, states[name] = model.step(before, position, states[name])
                logits.argmax(-1)
                seconds.append(time.perf_counter() - begin)
            times[name].append(statistics.median(seconds))
    return times


def quarters(times: list[float]) -> tuple[float, float]:
    """Medians of the first and the last quarter, which a moment's disturbance does not reach."""
    count = max(1, len(times) // 4)
    return statistics.median(times[:count]), statistics.median(times[-count:])


def plot_digits(path: Path, real: Tensor, drawn: Tensor) -> None:
    """A column per digit; real images above, drawn ones below. Both (10, rows, 64)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def mosaic(pictures: Tensor) -> Tensor:
        rows = pictures.shape[1]
        framed = F.pad(pictures.view(DIGITS, rows, SIDE, SIDE), (1, 1, 1, 1), value=LEVELS // 2)
        return framed.permute(1, 2, 0, 3).reshape(rows * (SIDE + 2), DIGITS * (SIDE + 2))

    figure, axes = plt.subplots(1, 2, figsize=(12, 0.6 + 0.55 * real.shape[1]), layout="constrained")
    for axis, title, pictures in zip(axes, ("real", "drawn by the model"), (real, drawn), strict=True):
        axis.imshow(mosaic(pictures), cmap="gray", vmin=0, vmax=LEVELS - 1)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_times(path: Path, times: dict[str, list[float]], batch: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, seconds in times.items():
        axis.plot([BLOCK * (i + 0.5) for i in range(len(seconds))], [1e3 * s for s in seconds], label=name)
    axis.axvline(PIXELS, color="gray", linestyle=":", linewidth=1)
    axis.annotate("one image", (PIXELS, 0), xytext=(4, 4), textcoords="offset points", color="gray")
    axis.set(
        xlabel="position in the sequence (pixels)",
        ylabel=f"ms per step, {batch} sequences",
        title="Time per pixel, images drawn one behind the other",
        ylim=(0, None),
    )
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--time-limit", type=float, default=100.0, metavar="SECONDS", help="of the training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="FOLDER")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=8, help="drawn images of each digit")
    parser.add_argument("--timed-pixels", type=int, default=2048, help="length of the sequence that is timed")
    parser.add_argument("--timed-batch", type=int, default=8)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    begin = time.perf_counter()
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train_set, held_out = images(options.seed)
    model = Painter(LinearAttention, options)
    query = torch.empty(options.batch, options.heads, PIXELS, options.d_model // options.heads)
    print(fastattn.explain(fastattn.linear_attention, query, query, query, is_causal=True))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(train_set[0])} images, {parameters / 1e6:.2f} M parameters, {options.threads} threads")

    curve = train(model, *train_set, options)
    bits = {
        "training set": bits_per_pixel(model, *train_set),
        "held out": bits_per_pixel(model, *held_out),
        "held out, pixels alone": histogram_bits(train_set, held_out),
        "all levels alike": math.log2(LEVELS),
    }
    difference = largest_difference(model, *held_out)

    digits = torch.arange(DIGITS).repeat_interleave(options.rows)
    seconds, drawn = {}, {}
    for name, method in (("recurrent", draw), ("whole prefix", draw_by_prefix)):
        start = time.perf_counter()
        drawn[name] = method(model, digits, options.seed)
        seconds[name] = time.perf_counter() - start
    same = (drawn["recurrent"] == drawn["whole prefix"]).all(1).double().mean().item()

    models = {"linear, recurrent": model, "softmax, KV cache": Painter(SoftmaxAttention, options)}
    times = time_per_pixel(models, options.timed_batch, options.timed_pixels)
    early_and_late = {name: quarters(values) for name, values in times.items()}
    memory = {
        name: sum(map(size_of, model.initial_states(1, options.timed_pixels)))
        for name, model in models.items()
    }

    options.out.mkdir(parents=True, exist_ok=True)
    real = torch.stack([held_out[1][held_out[0] == digit][: options.rows] for digit in range(DIGITS)])
    plot_digits(options.out / "digits.png", real, drawn["recurrent"].view(DIGITS, options.rows, PIXELS))
    plot_times(options.out / "digits_time.png", times, options.timed_batch)
    report = {
        "steps": len(curve),
        "training_bits": curve,
        "bits_per_pixel": bits,
        "largest_logit_difference": difference,
        "drawing_seconds": seconds,
        "same_images": same,
        "seconds_per_pixel": times,
        "first_and_last_quarter": early_and_late,
        "state_bytes": memory,
        "seconds": time.perf_counter() - begin,
    }
    (options.out / "digits.json").write_text(json.dumps(report, indent=1) + "\n")

    print(f"\nbits per pixel after {len(curve)} steps:")
    for name, value in bits.items():
        print(f"  {name:<24}{value:.3f}")
    print(f"recurrent and whole-image logits differ by {difference:.1e} at most")
    rates = ", ".join(f"{name} {len(digits) / taken:.0f}/s" for name, taken in seconds.items())
    print(f"{len(digits)} images drawn: {rates}; {same:.0%} of them pixel for pixel the same")
    print(
        f"time per step of {options.timed_batch} sequences in the first and the last quarter of "
        f"{options.timed_pixels} pixels, {options.timed_pixels / PIXELS:.0f} images one behind the other, "
        "because within one a cache hardly grows (the softmax model is untrained, which costs it no time):"
    )
    for name, (early, late) in early_and_late.items():
        print(
            f"  {name:<20}{1e3 * early:.2f} ms, {1e3 * late:.2f} ms ({late / early:.1f}x); "
            f"{memory[name] / 2**10:.0f} KiB kept per sequence"
        )
    print(f"{options.out / 'digits.png'}, digits_time.png written; {report['seconds']:.0f} s in total")
    if difference > AGREEMENT:
        raise SystemExit("the recurrent steps differ from the whole image by more than rounding")


if __name__ == "__main__":
    main(sys.argv[1:])
