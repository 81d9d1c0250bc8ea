"""Serve a small GPT: train it, then continue several prompts of different lengths at once.

The model is the one of `train_language_model.py`, over the bytes of the English text that ships with Python.
Its layers read their past from a cache: `fastattn.KVCache` in pages, or, to compare with, tensors padded to
the longest sequence with `F.scaled_dot_product_attention` and a mask. Greedy, with temperature, top-k, top-p
and by beam search. Both caches have to choose the same bytes; how fast they are is measured in turns.

    python examples/serve_gpt.py [--steps N] [--generate BYTES] [--out FOLDER] ...
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from train_language_model import LanguageModel, Trainer, corpus, held_out_loss, windows

import fastattn

PROMPTS = (
    "The ",
    "The statement ",
    "A class definition ",
    "If the iterable is empty, ",
    "An exception is raised when ",
    'The "with" statement is used to wrap the execution of ',
    "Lists are mutable sequences, typically used to store ",
    "Note: ",
)
PAGE_SIZE = 16


class PaddedCache:
    """What `KVCache` does, as it is commonly written: room for the longest sequence, and masks."""

    def __init__(self, batch: int, heads: int, head_dim: int, max_length: int, layers: int):
        self.keys, self.values = torch.zeros(2, layers, batch, heads, max_length, head_dim)
        self.lengths = torch.zeros(batch, dtype=torch.long)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        if layer == 0:
            self.rows = torch.arange(len(key))[:, None]
            self.columns = self.lengths[:, None] + torch.arange(key.shape[2])
            self.lengths = self.lengths + key.shape[2]
            self.longest = int(self.lengths.max())
            self.mask = (torch.arange(self.longest) <= self.columns[:, :, None])[:, None]
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[layer][self.rows, :, self.columns] = new.transpose(1, 2)
        key, value = (cache[layer, :, :, : self.longest] for cache in (self.keys, self.values))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)

    def truncate(self, lengths: Tensor) -> None:
        self.lengths = lengths.clone()

    def reorder(self, index: Tensor) -> None:
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.lengths = self.lengths[index]


Cache = fastattn.KVCache | PaddedCache


def new_cache(kind: str, model: LanguageModel, batch: int) -> Cache:
    attention = model.encoder.layers[0].self_attn
    heads, head_dim, layers = attention.num_heads, attention.head_dim, len(model.encoder.layers)
    if kind == "torch":
        return PaddedCache(batch, heads, head_dim, model.length, layers)
    return fastattn.KVCache(batch, heads, head_dim, model.length, layers=layers, page_size=PAGE_SIZE)


def logits_of(model: LanguageModel, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, L, 256) from L further bytes of every sequence, which the cache then holds."""
    x = model.bytes(tokens) + model.positions[cache.lengths[:, None].long() + torch.arange(tokens.shape[1])]
    for n, layer in enumerate(model.encoder.layers):
        attention = layer.self_attn
        projected = F.linear(layer.norm1(x), attention.in_proj_weight, attention.in_proj_bias)
        shape = (3, attention.num_heads, attention.head_dim)
        query, key, value = projected.unflatten(-1, shape).permute(2, 0, 3, 1, 4).unbind()
        out = cache.attend(query, key, value, layer=n)
        x = x + attention.out_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
    return model.head(model.encoder.norm(x))


def read_prompts(model: LanguageModel, prompts: list[bytes], cache: Cache) -> Tensor:
    """The logits (B, 256) behind each prompt. They are padded on the right, which the cache then forgets."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = max(map(len, prompts))
    tokens = torch.tensor([list(prompt.ljust(longest, b"\0")) for prompt in prompts])
    logits = logits_of(model, tokens, cache)
    cache.truncate(lengths)
    return logits[torch.arange(len(prompts)), lengths - 1]


class Sampler:
    """The next byte of each sequence: the likeliest at temperature 0, else a draw from those that remain of
    the `top_k` likeliest and of the fewest that together have probability `top_p`."""

    def __init__(self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0):
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator().manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        logits = logits / self.temperature
        if self.top_k > 0:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = F.softmax(logits, -1)
        if self.top_p < 1:
            ranked, order = probabilities.sort(descending=True)
            before = ranked.cumsum(-1) - ranked  # of those that are likelier
            kept = ranked.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(kept).scatter(-1, order, kept)
        return probabilities

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=self.generator).squeeze(-1)


@torch.no_grad()
def generate(model: LanguageModel, prompts: list[bytes], count: int, choose: Sampler, kind: str) -> Tensor:
    """(B, count) bytes behind the prompts."""
    cache = new_cache(kind, model, len(prompts))
    chosen = [choose(read_prompts(model, prompts, cache))]
    for _ in range(count - 1):
        chosen.append(choose(logits_of(model, chosen[-1][:, None], cache)[:, -1]))
    return torch.stack(chosen, 1)


@torch.no_grad()
def beam_search(model: LanguageModel, prompts: list[bytes], count: int, beams: int, kind: str) -> Tensor:
    """(B, count), the likeliest of `beams` continuations of each prompt that are kept at every byte."""
    B = len(prompts)
    cache = new_cache(kind, model, B)
    gain = F.log_softmax(read_prompts(model, prompts, cache), -1)
    score, chosen = gain.topk(beams)  # (B, beams)
    cache.reorder(torch.arange(B).repeat_interleave(beams))
    chosen = chosen.unsqueeze(-1)  # (B, beams, bytes)
    for _ in range(count - 1):
        gain = F.log_softmax(logits_of(model, chosen[:, :, -1].reshape(-1, 1), cache)[:, -1], -1)
        score, best = (score[:, :, None] + gain.view(B, beams, -1)).flatten(1).topk(beams)
        parent = best // gain.shape[-1]
        cache.reorder((torch.arange(B)[:, None] * beams + parent).flatten())
        before = chosen.gather(1, parent[:, :, None].expand(-1, -1, chosen.shape[2]))
        chosen = torch.cat([before, (best % gain.shape[-1])[:, :, None]], -1)
    return chosen[:, 0]  # topk sorts: the likeliest comes first


def train(options: argparse.Namespace) -> LanguageModel:
    tokens, held_out = corpus()
    trainer = Trainer("fastattn", options)
    generator = torch.Generator().manual_seed(options.seed)
    deadline = time.perf_counter() + options.time_limit
    with tqdm(total=options.steps, desc="training", unit="step", dynamic_ncols=True) as progress:
        for _ in range(options.steps):
            starts = torch.randint(len(tokens) - options.length, (options.batch,), generator=generator)
            loss = trainer.step(*windows(tokens, starts, options.length))
            progress.set_postfix(loss=f"{loss:.4f}")
            progress.update()
            if time.perf_counter() > deadline:
                break
    model = trainer.model.eval()
    print(f"held-out loss: {held_out_loss(model, held_out, options):.4f} nats per byte")
    return model


def measure(run: Callable[[str], Tensor], rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of both caches, which take turns, and of the ratios within rounds."""
    seconds: dict[str, list[float]] = {"torch": [], "fastattn": []}
    for n in range(rounds):
        for kind in list(seconds)[:: 1 if n % 2 else -1]:
            begin = time.perf_counter()
            run(kind)
            seconds[kind].append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    return {kind: statistics.median(values) for kind, values in seconds.items()}, statistics.median(ratios)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--time-limit", type=float, default=40.0, metavar="SECONDS", help="of the training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="FOLDER")
    parser.add_argument("--length", type=int, default=512, help="bytes of context")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--generate", type=int, default=200, metavar="BYTES", help="behind each prompt")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement")
    parser.add_argument("--held-out-windows", type=int, default=32)
    options = parser.parse_args(arguments)
    for name in ("steps", "generate", "beams", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    longest = max(map(len, PROMPTS)) + options.generate
    if longest > options.length:
        parser.error(f"--length must be at least {longest}: the longest prompt and --generate bytes")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    model = train(options)
    prompts = [prompt.encode() for prompt in PROMPTS]
    ways: dict[str, Callable[[str], Tensor]] = {
        "greedy": lambda kind: generate(model, prompts, options.generate, Sampler(), kind),
        "temperature 0.7": lambda kind: generate(
            model, prompts, options.generate, Sampler(0.7, seed=options.seed), kind
        ),
        "top-k 10": lambda kind: generate(
            model, prompts, options.generate, Sampler(1.0, top_k=10, seed=options.seed), kind
        ),
        "top-p 0.9": lambda kind: generate(
            model, prompts, options.generate, Sampler(1.0, top_p=0.9, seed=options.seed), kind
        ),
        f"{options.beams} beams": lambda kind: beam_search(
            model, prompts, options.generate, options.beams, kind
        ),
    }
    report: dict = {"ways": {}}
    lines = []
    for way, run in ways.items():
        chosen = {kind: run(kind) for kind in ("torch", "fastattn")}
        seconds, ratio = measure(run, options.rounds)
        count = chosen["torch"].numel()
        same = (chosen["torch"] == chosen["fastattn"]).float().mean().item()
        report["ways"][way] = {
            "tokens_per_second": {kind: count / taken for kind, taken in seconds.items()},
            "speed_ratio": ratio,
            "same_tokens": same,
        }
        rates = ", ".join(f"{kind} {count / taken:.0f}" for kind, taken in seconds.items())
        print(f"{way}: tokens per second {rates}; {ratio:.2f}x as fast, {same:.0%} of the bytes the same")
        for prompt, bytes_ in zip(PROMPTS, chosen["fastattn"].tolist(), strict=True):
            lines.append(f"--- {way}\n{prompt}|{bytes(bytes_).decode(errors='replace')}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "served.txt").write_text("\n".join(lines) + "\n")
    (options.out / "serve_gpt.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{lines[0]}\n\n{options.out / 'served.txt'} written")
    if report["ways"]["greedy"]["same_tokens"] < 1:
        raise SystemExit("the two caches chose different bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
