"""A gated mixer with a short convolution: trained on packed texts, decoded with a cache.

    python examples/short_conv_mixer.py [--steps N] [--picture FILE]

The mixer is that of Mamba and of gated linear recurrences in small: a linear map to a path and a
gate, a short causal convolution with SiLU on the path (`jaxops.flax.linen.ShortConv`), a recurrence
whose decay depends on the input, and a linear map of the gated result. The texts are docstrings of
Python's built-in types, nothing is downloaded. They are packed into rows of one length:
`segment_ids` keep the convolution and the recurrence inside each text, so a packed text gives the
logits that it gives alone. The same weights decode character by character, where a cache holds the
last inputs of each convolution and the state of each recurrence. The picture shows the bits a
character during training; it needs matplotlib.
"""

import argparse
import builtins
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

from jaxops.flax.linen import ShortConv

LENGTH = 256  # steps of a row
SYMBOLS = 128  # ASCII; 0 begins a text
BATCH = 8


class Mixer(nn.Module):
    """A gated mixer of (B, T, features) over time."""

    inner: int
    decode: bool = False

    @nn.compact
    def __call__(self, x, segment_ids=None):
        """(B, T, features) to the same shape; a position sees its segment, and no later steps."""
        path, gate = jnp.split(nn.Dense(2 * self.inner)(x), 2, axis=-1)
        path = ShortConv(4, decode=self.decode)(path, segment_ids=segment_ids)
        decay = nn.sigmoid(nn.Dense(self.inner)(path) + 2)
        path = self.recur(decay, (1 - decay) * path, segment_ids)
        return nn.Dense(x.shape[-1])(path * nn.silu(gate))

    def recur(self, decay, update, segment_ids):
        """h[t] = decay[t] h[t - 1] + update[t], from zeros at the start of each segment."""
        if segment_ids is not None:
            starts = segment_ids[:, 1:] != segment_ids[:, :-1]
            decay = decay.at[:, 1:].multiply(1 - starts[..., None])
        state = jnp.zeros_like(update[:, 0])
        if self.decode:
            cache = self.variable("cache", "state", lambda: state)
            state = cache.value

        def step(h, now):
            h = now[0] * h + now[1]
            return h, h

        by_time = decay.swapaxes(0, 1), update.swapaxes(0, 1)
        state, h = jax.lax.scan(step, state, by_time, unroll=4)
        if self.decode and not self.is_initializing():
            cache.value = state
        return h.swapaxes(0, 1)


class Model(nn.Module):
    """Symbols (B, T) to logits (B, T, SYMBOLS) of the symbol that follows each."""

    features: int = 64
    layers: int = 2
    decode: bool = False

    @nn.compact
    def __call__(self, text, segment_ids=None):
        """(B, T) to (B, T, SYMBOLS)."""
        x = nn.Embed(SYMBOLS, self.features)(text)
        for _ in range(self.layers):
            x = x + Mixer(2 * self.features, self.decode)(nn.LayerNorm()(x), segment_ids)
        return nn.Dense(SYMBOLS)(nn.LayerNorm()(x))


def docstrings() -> list[np.ndarray]:
    """The docstrings of the built-in types' methods as symbols, each after a 0."""
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type)]
    objects = [member for kind in kinds for _, member in sorted(vars(kind).items())]
    texts = {text for o in objects if isinstance(text := getattr(o, "__doc__", None), str)}
    kept = sorted(text for text in texts if text.isascii() and 8 <= len(text) < LENGTH)
    return [np.frombuffer(b"\0" + text.encode(), np.uint8).astype(np.int32) for text in kept]


def pack(texts) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, LENGTH) of whole texts, and their segment ids; the rest of a row has the id -1."""
    rows, ids, end, number = [], [], LENGTH, 0
    for text in texts:
        if end + len(text) > LENGTH:
            rows.append(np.zeros(LENGTH, np.int32))
            ids.append(np.full(LENGTH, -1, np.int32))
            end, number = 0, 0
        rows[-1][end : end + len(text)] = text
        ids[-1][end : end + len(text)] = number
        end, number = end + len(text), number + 1
    return np.stack(rows), np.stack(ids)


def mean_bits(params, rows, ids):
    """Bits a character, each given what precedes it in its text."""
    logits = Model().apply(params, rows, ids)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    is_within = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    return jnp.sum(losses * is_within) / jnp.sum(is_within) / np.log(2)


def train(rows, ids, steps: int):
    """The parameters after `steps` steps of Adam, and the bits a character of each step."""
    rows, ids = jnp.asarray(rows), jnp.asarray(ids)
    params = Model().init(jax.random.key(0), rows[:1])
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, steps))

    @jax.jit
    def step(params, state, key):
        batch = jax.random.randint(key, (BATCH,), 0, len(rows))
        bits, gradients = jax.value_and_grad(mean_bits)(params, rows[batch], ids[batch])
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, bits

    state, bits = optimizer.init(params), []
    for key in track(jax.random.split(jax.random.key(1), steps), "training"):
        params, state, of_step = step(params, state, key)
        bits.append(float(of_step))
    return params, bits


@functools.partial(jax.jit, static_argnames="count")
def generate(params, prompt, count: int):
    """`count` likeliest symbols after the prompt (T,), and the logits after each symbol of both."""
    model = Model(decode=True)

    def continue_with(cache, text):
        logits, cache = model.apply({**params, **cache}, text[None], mutable=["cache"])
        return cache, logits[0]

    def step(carry, _):
        cache, symbol = carry
        cache, logits = continue_with(cache, symbol[None])
        return (cache, jnp.argmax(logits[0]).astype(symbol.dtype)), (symbol, logits[0])

    cache, of_prompt = continue_with({}, prompt)  # the whole prompt in one call
    first = jnp.argmax(of_prompt[-1]).astype(prompt.dtype)
    _, (symbols, logits) = jax.lax.scan(step, (cache, first), length=count)
    return symbols, jnp.concatenate([of_prompt, logits])


def largest_difference(actual, expected) -> float:
    """The largest difference in terms of the largest expected value."""
    return float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())


def compare(steps: int) -> dict:
    """Bits before and after training, a continuation, and two differences that should be none.

    "packed": the logits of packed texts and of each text alone. "decoded": the logits of decoding
    step by step and of one call on the text that came out.
    """
    texts = docstrings()
    rows, ids = pack(texts)
    params, bits = train(rows, ids, steps)
    model = jax.jit(Model().apply)

    packed, differences = model(params, rows[:1], ids[:1])[0], []
    for number in range(ids[0].max() + 1):
        (at,) = np.nonzero(ids[0] == number)
        # Zeros after the text make one length of all, for one compilation.
        alone = np.pad(rows[0, at], (0, LENGTH - len(at)))
        differences.append(largest_difference(packed[at], model(params, alone[None])[0, : len(at)]))

    prompt = np.frombuffer(b"\0Return ", np.uint8).astype(np.int32)
    symbols, logits = generate(params, prompt, 60)
    whole = np.concatenate([prompt, symbols])
    return {
        "texts": len(texts),
        "rows": len(rows),
        "bits": (bits[0], float(np.mean(bits[-10:]))),
        "curve": bits,
        "packed": max(differences),
        "decoded": largest_difference(logits, model(params, whole[None])[0]),
        "text": bytes(whole[1:].astype(np.uint8)).decode(),
    }


def draw(bits: list[float], file: str) -> None:
    """The bits a character over the steps of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(bits)
    axes.set(xlabel="step", ylabel="bits a character", ylim=(0, None))
    axes.set_title("A mixer with short convolutions, on packed docstrings")
    figure.savefig(file, dpi=100)


def main() -> None:
    """Prints what was found, and draws the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", default="short_conv_mixer.png")
    arguments = parser.parse_args()
    found = compare(arguments.steps)
    print(f"{found['texts']} docstrings in {found['rows']} rows of {LENGTH} characters")
    print("{:.2f} bits a character at first, {:.2f} after training".format(*found["bits"]))
    print(f"packed and alone, logits differ by {found['packed']:.1e}")
    print(f"decoded and whole, logits differ by {found['decoded']:.1e}")
    print(repr(found["text"]))
    draw(found["curve"], arguments.picture)
    print(f"the bits are in {arguments.picture}")


if __name__ == "__main__":
    main()
