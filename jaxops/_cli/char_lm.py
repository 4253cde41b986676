"""A character-level language model of lightweight convolutions: what the demo trains."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxops._cli import corpus
from jaxops.flax.linen import LightConv

REPORT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Config:
    """The model, one block for each of `kernel_sizes`, its training and its sampling."""

    features: int = 96
    heads: int = 6
    kernel_sizes: tuple[int, ...] = (3, 7, 15, 31)
    window: int = 64
    batch: int = 8
    learning_rate: float = 4e-3
    train_characters: int = 3_000_000
    held_out_characters: int = 65_536
    prompt: str = "\ndef "
    sample_characters: int = 400
    temperature: float = 0.9

    @property
    def receptive_field(self) -> int:
        """How many characters decide what is predicted after the last of them."""
        return 1 + sum(size - 1 for size in self.kernel_sizes)


class Block(nn.Module):
    """One layer of the paper: the block of a lightweight convolution, then feed-forward."""

    config: Config
    kernel_size: int
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.config.features
        y = LightConv(self.config.heads, self.kernel_size, decode=self.decode)(x)
        x = nn.LayerNorm()(x + y)
        y = nn.Dense(width)(nn.relu(nn.Dense(4 * width)(x)))
        return nn.LayerNorm()(x + y)


class CharLM(nn.Module):
    """Symbols (B, T) to logits (B, T, symbols) of the symbol that follows each position.

    With `decode`, the symbols continue those of earlier calls, as in `jaxops.flax.linen.ShortConv`.
    """

    config: Config
    decode: bool = False

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        symbols = len(corpus.ALPHABET)
        x = nn.Embed(symbols, self.config.features)(text)
        for kernel_size in self.config.kernel_sizes:
            x = Block(self.config, kernel_size, self.decode)(x)
        return nn.Dense(symbols)(x)


@functools.partial(jax.jit, static_argnums=0)
def mean_bits(config: Config, params: Any, windows: jax.Array) -> jax.Array:
    """Bits per character of windows[:, 1:], each given what precedes it in its window."""
    logits: Any = CharLM(config).apply(params, windows[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].astype(jnp.int32))
    return nats.mean() / math.log(2)


def train(
    config: Config,
    text: np.ndarray,
    steps: int,
    seed: int,
    report: Callable[[int, float, float], None],
) -> Any:
    """The parameters after `steps` steps of AdamW on random windows of `text`.

    report(steps done, bits per character of the last batch, characters per second since the first
    step) is called now and then; the seconds do not count compilation.
    """
    # NumPy draws the batches: XLA's random generator is slow to compile, and stays out of the step.
    random = np.random.default_rng(seed)

    def batch():
        starts = random.integers(0, text.size - config.window, (config.batch, 1))
        return text[starts + np.arange(config.window + 1)]

    params, state = _start(config, steps, jax.random.key(seed), batch())
    step = _step.lower(config, steps, params, state, batch()).compile()
    start = time.perf_counter()
    for done in range(1, steps + 1):
        params, state, bits = step(params, state, batch())
        if done % REPORT_EVERY == 0 or done == steps:
            # float() waits for the step, so the clock is read after the work and not before.
            last_bits = float(bits)
            seconds = time.perf_counter() - start
            report(done, last_bits, done * config.batch * config.window / seconds)
    return params


def _optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, steps // 20, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    # One long vector instead of an update for each parameter: less for XLA to compile.
    return optax.flatten(optimizer)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(config: Config, steps: int, key: jax.Array, windows: jax.Array) -> tuple[Any, Any]:
    params = CharLM(config).init(key, windows)
    return params, _optimizer(config, steps).init(params)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    config: Config, steps: int, params: Any, state: Any, windows: jax.Array
) -> tuple[Any, Any, jax.Array]:
    bits, gradient = jax.value_and_grad(functools.partial(mean_bits, config))(params, windows)
    updates, state = _optimizer(config, steps).update(gradient, state, params)
    return optax.apply_updates(params, updates), state, bits


def evaluate(config: Config, params: Any, windows: np.ndarray) -> float:
    """Bits per character of windows[:, 1:], averaged over all windows."""
    batches = np.array_split(windows, math.ceil(len(windows) / config.batch))
    return sum(float(mean_bits(config, params, b)) * len(b) for b in batches) / len(windows)


def generate(config: Config, params: Any, seed: int, *, cached: bool = True) -> tuple[str, float]:
    """`config.sample_characters` characters sampled after `config.prompt`, and how many a second.

    With `cached`, a character costs one step of the model, which keeps the last inputs of its
    convolutions. Otherwise each is predicted from a window as wide as the model's receptive field,
    which is all that an unbounded window could tell it. Compilation is not timed.
    """
    width = config.receptive_field
    window = corpus.encode(config.prompt.encode().rjust(width, b"\n"))[-width:]
    sample = _sample_cached if cached else _sample
    arguments = params, window, jax.random.key(seed)
    compiled = sample.lower(config, *arguments).compile()
    start = time.perf_counter()
    symbols = np.asarray(compiled(*arguments))
    seconds = time.perf_counter() - start
    return corpus.decode(symbols), config.sample_characters / seconds


@functools.partial(jax.jit, static_argnums=0)
def _sample_cached(config: Config, params: Any, window: jax.Array, key: jax.Array) -> jax.Array:
    model = CharLM(config, decode=True)

    def continue_with(cache, text):
        logits, updated = model.apply({**params, **cache}, text[None], mutable=["cache"])
        return updated, logits[0, -1]

    def sample_one(carry, key):
        cache, logits = carry
        symbol = _draw(config, logits, key).astype(window.dtype)
        return continue_with(cache, symbol[None]), symbol

    keys = jax.random.split(key, config.sample_characters)
    return jax.lax.scan(sample_one, continue_with({}, window), keys)[1]


@functools.partial(jax.jit, static_argnums=0)
def _sample(config: Config, params: Any, window: jax.Array, key: jax.Array) -> jax.Array:
    def sample_one(window, key):
        logits: Any = CharLM(config).apply(params, window[None])
        symbol = _draw(config, logits[0, -1], key).astype(window.dtype)
        return jnp.append(window[1:], symbol), symbol

    return jax.lax.scan(sample_one, window, jax.random.split(key, config.sample_characters))[1]


def _draw(config: Config, logits: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, logits / config.temperature)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a run. The three bits are per character, of the same held-out characters.

    The speeds are those of sampling, in characters a second, with the cache and without.
    """

    model_bits: float
    unigram_bits: float
    bigram_bits: float
    trained_characters: int
    held_out_characters: int
    sample: str
    # Two runs with the same figures are equal whatever their speeds.
    cached_speed: float = dataclasses.field(compare=False)
    uncached_speed: float = dataclasses.field(compare=False)


def run(
    config: Config,
    steps: int,
    seed: int,
    report: Callable[[int, float, float], None],
) -> Figures:
    """Trains the model on the standard library's text and compares it with n-gram models."""
    text, held_out = corpus.standard_library()
    text = text[: config.train_characters]
    length = 4 * config.window
    windows = corpus.spaced_windows(held_out, config.held_out_characters // length, length + 1)
    params = train(config, text, steps, seed, report)
    sample, cached_speed = generate(config, params, seed)
    _, uncached_speed = generate(config, params, seed, cached=False)
    return Figures(
        model_bits=evaluate(config, params, windows),
        unigram_bits=corpus.unigram_bits(text, windows),
        bigram_bits=corpus.bigram_bits(text, windows),
        trained_characters=text.size,
        held_out_characters=windows[:, 1:].size,
        sample=config.prompt + sample,
        cached_speed=cached_speed,
        uncached_speed=uncached_speed,
    )
