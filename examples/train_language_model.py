"""Train the same language model twice: as it is, and after `fastattn.replace_attention(model)`.

The model is a plain causal `nn.TransformerEncoder` over the bytes of the English text that ships with Python
(`pydoc_data.topics`). Both start from the same seed and see the same batches, so the loss curves have to
agree within rounding; their steps alternate, so that speed is compared under the same conditions. Peak memory
is taken in a process of its own for each. Writes the curves and a sample of generated text to `demo_output/`.

    python examples/train_language_model.py [--steps N] [--out FOLDER] ...
"""

import argparse
import json
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fastattn

VOCABULARY = 256  # bytes
HELD_OUT = 0.1  # the end of the text
VARIANTS = ("torch", "fastattn")
EMBEDDING_SCALE = 0.3
MEMORY_STEPS = 3
# Bounds on |difference of the losses| between the variants. The first step differs by rounding alone. AdamW
# then feeds the rounding of every step back into the parameters, so the curves drift apart slowly, like those
# of two runs of one model that add up in another order.
FIRST_STEP_BOUND = 1e-5
CURVE_BOUND = 1e-3


class LanguageModel(nn.Module):
    """Next-byte logits (B, L, 256) from bytes (B, L), L up to `length`."""

    def __init__(self, length: int, d_model: int, heads: int, layers: int):
        super().__init__()
        self.length = length
        self.bytes = nn.Embedding(VOCABULARY, d_model)
        # Without dropout both variants compute the same function, and their curves can be compared.
        layer = nn.TransformerEncoderLayer(
            d_model, heads, 4 * d_model, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.head = nn.Linear(d_model, VOCABULARY)
        # Sines and cosines of the position: a shift is linear in them, so that attention to the byte before
        # is learnt in few steps. Small, so that the layers count beside the embedding at once.
        angle = torch.arange(length)[:, None] * 1e-4 ** (torch.arange(0, d_model, 2) / d_model)
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer("positions", EMBEDDING_SCALE * waves)
        nn.init.normal_(self.bytes.weight, std=EMBEDDING_SCALE)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.bytes(tokens) + self.positions[:length]
        return self.head(self.encoder(x, mask=self.mask[:length, :length], is_causal=True))


def build(variant: str, options: argparse.Namespace) -> LanguageModel:
    torch.manual_seed(options.seed)
    model = LanguageModel(options.length, options.d_model, options.heads, options.layers)
    if variant == "fastattn":
        swapped = fastattn.replace_attention(model)
        assert swapped == options.layers, f"swapped {swapped} of {options.layers} attention modules"
    return model


def corpus() -> tuple[Tensor, Tensor]:
    """The text as bytes: (training part, held-out part)."""
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = torch.tensor(list(text.encode()))
    split = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:split], tokens[split:]


def windows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and the bytes that follow them, both (len(starts), length)."""
    spans = tokens[starts[:, None] + torch.arange(length + 1)]
    return spans[:, :-1], spans[:, 1:]


def loss_of(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Trainer:
    """A model with its optimizer: warm-up, then a cosine down to a tenth of the learning rate."""

    def __init__(self, variant: str, options: argparse.Namespace):
        self.model = build(variant, options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        warm_up = max(1, min(20, options.steps // 10))
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / warm_up, total_iters=warm_up),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps, options.lr / 10),
            ],
            [warm_up],
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        self.model.train()
        self.optimizer.zero_grad()
        loss = loss_of(self.model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def train(
    trainers: dict[str, Trainer], tokens: Tensor, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of every step. The variants take turns at going first."""
    generator = torch.Generator().manual_seed(options.seed)
    losses: dict[str, list[float]] = {variant: [] for variant in trainers}
    seconds: dict[str, list[float]] = {variant: [] for variant in trainers}
    deadline = time.perf_counter() + options.time_limit
    with tqdm(total=options.steps, desc="training both", unit="step", dynamic_ncols=True) as progress:
        for step in range(options.steps):
            starts = torch.randint(len(tokens) - options.length, (options.batch,), generator=generator)
            inputs, targets = windows(tokens, starts, options.length)
            for variant in list(trainers)[:: 1 if step % 2 else -1]:
                begin = time.perf_counter()
                losses[variant].append(trainers[variant].step(inputs, targets))
                seconds[variant].append(time.perf_counter() - begin)
            progress.set_postfix({variant: f"{values[-1]:.4f}" for variant, values in losses.items()})
            progress.update()
            if time.perf_counter() > deadline:
                tqdm.write(f"time limit of {options.time_limit:.0f} s reached after {step + 1} steps")
                break
    return losses, seconds


@torch.no_grad()
def held_out_loss(model: LanguageModel, tokens: Tensor, options: argparse.Namespace) -> float:
    model.eval()
    starts = torch.arange(0, len(tokens) - options.length - 1, options.length)[: options.held_out_windows]
    losses = [
        loss_of(model, *windows(tokens, some, options.length)).item() * len(some)
        for some in starts.split(options.batch)
    ]
    return sum(losses) / len(starts)


@torch.no_grad()
def generate(model: LanguageModel, prompt: str, count: int, seed: int, temperature: float = 0.7) -> str:
    """`count` bytes after the prompt, one forward over the whole context for each."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(tokens[:, -model.length :])[:, -1]
        drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def module_calls(run: Callable[[], object]) -> int:
    """How often `run` enters the forward of fastattn's module: proof that the swap is not bypassed."""
    forward = fastattn.nn.MultiheadAttention.forward
    with mock.patch.object(
        fastattn.nn.MultiheadAttention, "forward", autospec=True, side_effect=forward
    ) as counted:
        run()
    return counted.call_count


def check_swap(model: LanguageModel, options: argparse.Namespace) -> None:
    """Raise if a forward in training or in evaluation bypasses fastattn's module in some layer."""
    tokens = torch.zeros(1, min(8, options.length), dtype=torch.long)

    def evaluate():
        with torch.no_grad():
            model(tokens)

    model.train()
    training = module_calls(lambda: model(tokens))
    model.eval()
    evaluation = module_calls(evaluate)
    if (training, evaluation) != (options.layers, options.layers):
        raise AssertionError(
            f"of {options.layers} layers {training} use the swapped module in training, {evaluation} in eval"
        )


def _peak(text: str) -> int:
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def measure_memory(variant: str, options: argparse.Namespace) -> int:
    """Bytes by which the peak of this process grows from the first small step to some full ones."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("peak memory is read from /proc/self/status, which this system does not have")
    tokens, _ = corpus()
    trainer = Trainer(variant, options)
    trainer.step(
        *windows(tokens, torch.arange(1), min(8, options.length))
    )  # libraries, threads, optimizer state
    before = _peak(status.read_text())
    for _ in range(MEMORY_STEPS):
        trainer.step(*windows(tokens, torch.arange(options.batch), options.length))
    return _peak(status.read_text()) - before


def peak_memory(variant: str, arguments: list[str]) -> int | None:
    """`measure_memory` in a process of its own; None where this system does not tell."""
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, __file__, *arguments, "--memory-of", variant]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def plot(path: Path, losses: dict[str, list[float]], held_out: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, drift) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for variant, style in zip(VARIANTS, ({"linewidth": 3, "alpha": 0.5}, {"linewidth": 1}), strict=True):
        curves.plot(losses[variant], label=f"{variant} (held-out {held_out[variant]:.4f})", **style)
    curves.set(
        ylabel="loss (nats per byte)", title="nn.TransformerEncoder, before and after replace_attention"
    )
    curves.legend()
    drift.semilogy([max(abs(a - b), 1e-8) for a, b in zip(*losses.values(), strict=True)], color="black")
    drift.set(xlabel="step", ylabel="|difference|")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--time-limit", type=float, default=140.0, metavar="SECONDS", help="of the training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="FOLDER")
    parser.add_argument("--length", type=int, default=512, help="bytes of context")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--generate", type=int, default=160, metavar="BYTES")
    parser.add_argument("--held-out-windows", type=int, default=32)
    parser.add_argument("--prompt", default="The statement ")
    parser.add_argument("--memory-of", choices=VARIANTS, help="only print the peak memory of one variant")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    begin = time.perf_counter()
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options.memory_of, options))
        return

    tokens, held_out_tokens = corpus()
    trainers = {variant: Trainer(variant, options) for variant in VARIANTS}
    models = {variant: trainer.model for variant, trainer in trainers.items()}
    head_dim = options.d_model // options.heads
    query = torch.empty(options.batch, options.heads, options.length, head_dim)
    print(fastattn.explain(fastattn.scaled_dot_product_attention, query, query, query, is_causal=True))
    parameters = sum(parameter.numel() for parameter in models["torch"].parameters())
    print(f"{len(tokens)} bytes of text, {parameters / 1e6:.1f} M parameters, {options.threads} threads")
    check_swap(models["fastattn"], options)

    losses, seconds = train(trainers, tokens, options)
    step_tokens = options.batch * options.length
    speed = {variant: step_tokens / statistics.median(values) for variant, values in seconds.items()}
    speed_ratio = statistics.median(a / b for a, b in zip(seconds["torch"], seconds["fastattn"], strict=True))
    held_out = {variant: held_out_loss(model, held_out_tokens, options) for variant, model in models.items()}
    differences = [abs(a - b) for a, b in zip(losses["torch"], losses["fastattn"], strict=True)]

    samples, generation = {}, {}
    for variant, model in models.items():
        start = time.perf_counter()
        samples[variant] = generate(model, options.prompt, options.generate, options.seed)
        generation[variant] = options.generate / (time.perf_counter() - start)
    memory = {variant: peak_memory(variant, arguments) for variant in VARIANTS}

    options.out.mkdir(parents=True, exist_ok=True)
    plot(options.out / "loss.png", losses, held_out)
    (options.out / "sample.txt").write_text(samples["fastattn"])
    report = {
        "steps": len(differences),
        "loss": losses,
        "held_out_loss": held_out,
        "max_loss_difference": max(differences),
        "first_loss_difference": differences[0],
        "tokens_per_second": speed,
        "speed_ratio": speed_ratio,
        "generated_bytes_per_second": generation,
        "same_sample": samples["torch"] == samples["fastattn"],
        "peak_memory_bytes": memory,
        "seconds": time.perf_counter() - begin,
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    print(f"\ngenerated after {options.prompt!r}:\n{samples['fastattn']}\n")
    print(f"loss after {len(differences)} steps: " + _pair(losses, lambda values: f"{values[-1]:.4f}"))
    print("held-out loss: " + _pair(held_out, "{:.4f}".format))
    print(f"largest difference of the loss curves: {max(differences):.1e} (first step {differences[0]:.1e})")
    same = "the same" if report["same_sample"] else "different (a draw fell on the other side of rounding)"
    print(f"the two samples are {same}")
    print(
        f"training: {_pair(speed, '{:.0f} tokens/s'.format)}; fastattn is {speed_ratio:.2f}x as fast per step"
    )
    ratio = generation["fastattn"] / generation["torch"]
    print(f"generation: {_pair(generation, '{:.0f} bytes/s'.format)}; {ratio:.2f}x as fast")
    if None not in memory.values():
        ratio = memory["fastattn"] / memory["torch"]
        peaks = _pair(memory, lambda count: f"{count / 2**20:.0f} MiB")
        print(f"peak memory of training: {peaks}; {ratio:.2f}x as much")
    print(f"{options.out / 'loss.png'} written; {report['seconds']:.0f} s in total")

    if differences[0] > FIRST_STEP_BOUND or max(differences) > CURVE_BOUND:
        raise SystemExit("the loss curves differ by more than rounding")


def _pair(values: dict, text: Callable[[object], str]) -> str:
    return ", ".join(f"{variant} {text(value)}" for variant, value in values.items())


if __name__ == "__main__":
    main(sys.argv[1:])
