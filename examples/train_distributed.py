"""A model with every operator, trained on one device, on many, or by many processes.

    python examples/train_distributed.py --mesh data=2,tensor=2,time=2   # one process, its devices
    python examples/train_distributed.py --processes 2                   # local processes
    srun python examples/train_distributed.py --cluster                  # SLURM, Kubernetes, ...

Each example has an image and a text. The image goes through `conv2d`, `im2col`, `concatenate`,
`grid_sample` and `trilinear_interpolate`, and the text, which is packed of segments, through
`lightweight_conv` and `dynamic_conv`. A softmax focal loss predicts the next symbols, a sigmoid
focal loss the objects of the image. The data are made from the number of the step, nothing is
downloaded.

The axis "data" of the mesh shards the batch, "tensor" the inner channels of both paths, and "time"
the steps of the text. Checkpoints in `--checkpoints FOLDER`, which all processes must reach, are
continued by any number of processes: another mesh gives the same losses but for roundings. They
need orbax.
`--collectives` shows what the devices of a step send, next to the same model in plain JAX.
`--picture FILE` trains on one device, then on all of them along each axis in turn, and draws the
losses; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

import jaxops
from jaxops.testing.measure import traffic
from jaxops.testing.processes import run_local

AXES = ("data", "tensor", "time")
BATCH, TIME, PIXELS = 16, 64, 16
FEATURES, INNER, HEADS, TAPS = 32, 64, 8, 4
SYMBOLS, OBJECTS, POINTS = 32, 6, 12
SEGMENT = 24  # steps of a segment
#: The arrays of a batch.
BATCH_SPECS = {
    "images": P("data"),
    "objects": P("data"),
    "text": P("data", "time"),
    "next": P("data", "time"),
    "segments": P("data", "time"),
}
#: The shape of each parameter and its parts: "tensor" has channels of the inner layers.
PARAMETERS = {
    "conv": ((3, 3, 3, INNER), P(None, None, None, "tensor")),
    "conv_bias": ((INNER,), P("tensor")),
    "patches": ((48, INNER), P(None, "tensor")),
    "points": ((POINTS, 2), P()),
    "context": ((INNER, FEATURES), P("tensor", None)),
    "objects": ((FEATURES, OBJECTS), P()),
    "embedding": ((SYMBOLS, FEATURES), P()),
    "in": ((FEATURES, INNER), P(None, "tensor")),
    "light": ((HEADS, TAPS), P("tensor", None)),
    "light_bias": ((INNER,), P("tensor")),
    "filters": ((FEATURES, HEADS, TAPS), P(None, "tensor", None)),
    "out": ((INNER, FEATURES), P("tensor", None)),
    "symbols": ((FEATURES, SYMBOLS), P()),
}


def make_batch(step: int) -> dict[str, np.ndarray]:
    """The examples of a step: the object of an image decides how its text goes on."""
    rng = np.random.default_rng(step)
    objects = rng.integers(OBJECTS, size=BATCH)
    colors = np.linspace(-1, 1, 3 * OBJECTS).reshape(OBJECTS, 1, 1, 3)[objects]
    images = colors + 0.3 * rng.standard_normal((BATCH, PIXELS, PIXELS, 3))
    steps = np.arange(TIME + 1)
    starts = rng.integers(SYMBOLS, size=(BATCH, TIME // SEGMENT + 1))[:, steps // SEGMENT]
    text = (starts + (objects[:, None] + 1) * (steps % SEGMENT)) % SYMBOLS
    is_within = (steps[1:] // SEGMENT) == (steps[:-1] // SEGMENT)
    return {
        "images": images.astype(np.float32),
        "objects": objects.astype(np.int32),
        "text": text[:, :-1].astype(np.int32),
        # No label where the next symbol begins another segment.
        "next": np.where(is_within, text[:, 1:], -1).astype(np.int32),
        "segments": np.broadcast_to(steps[:-1] // SEGMENT, (BATCH, TIME)).astype(np.int32),
    }


def look(params, images):
    """What the text is told of the images: (B, FEATURES)."""
    features = jaxops.conv2d(images, params["conv"], bias=params["conv_bias"], activation="silu")
    patches = jaxops.im2col(images, 4, strides=4).reshape(BATCH, 16, 48) @ params["patches"]
    means = features.reshape(BATCH, 4, 4, 4, 4, INNER).mean((2, 4)).reshape(BATCH, 16, INNER)
    scene = jaxops.concatenate([patches, means], axis=1)
    sampled = jaxops.grid_sample(features, jnp.tanh(params["points"])[None], align_corners=True)
    corners = scene.reshape(BATCH, 4, 8, INNER).mean(1)
    color = jnp.tanh(images.mean((1, 2)))
    seen = sampled.mean(1) + jaxops.trilinear_interpolate(corners, color)
    return seen @ params["context"]


def loss_of(params, batch):
    """The mean focal loss of the symbols that follow, and of the objects."""
    seen = look(params, batch["images"])
    x = params["embedding"][batch["text"]] + seen[:, None]
    inner = jaxops.lightweight_conv(
        x @ params["in"],
        jax.nn.softmax(params["light"]),
        bias=params["light_bias"],
        activation="silu",
        segment_ids=batch["segments"],
    )
    filters = jnp.einsum("btf,fhk->bthk", x, params["filters"])
    inner = jaxops.dynamic_conv(
        inner, filters, normalize=True, dilation=2, segment_ids=batch["segments"]
    )
    x = x + inner @ params["out"]
    of_symbols = jaxops.softmax_focal_loss(
        x @ params["symbols"], batch["next"], gamma=1, alpha=None, ignore_index=-1, reduction="mean"
    )
    of_objects = jaxops.sigmoid_focal_loss(
        seen @ params["objects"], batch["objects"], reduction="mean"
    )
    return of_symbols + of_objects


OPTIMIZER = optax.adam(5e-3)


def initial_state():
    """The parameters and the optimizer's state before the first step."""
    params = {}
    for number, (name, (shape, _)) in enumerate(PARAMETERS.items()):
        key = jax.random.fold_in(jax.random.key(0), number)
        scale = 1 / np.sqrt(np.prod(shape[:-1])) if "bias" not in name else 0
        params[name] = scale * jax.random.normal(key, shape)
    return params, OPTIMIZER.init(params)


def shardings_of_state(mesh):
    """Where the parameters lie, and with each the optimizer's moments of it."""

    def place(path, leaf):
        del leaf
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        return NamedSharding(mesh, PARAMETERS[names[-1]][1] if names else P())

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(initial_state))


def make_step(mesh, implementation=None):
    """The compiled function (state, batch) -> (state, loss) of a mesh, before it is called."""
    places = shardings_of_state(mesh)
    of_batch = {name: NamedSharding(mesh, spec) for name, spec in BATCH_SPECS.items()}

    @functools.partial(
        jax.jit,
        in_shardings=(places, of_batch),
        out_shardings=(places, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    def step(state, batch):
        params, moments = state
        with jaxops.use_implementation(implementation):
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = OPTIMIZER.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), loss

    return step


def traffic_of(mesh, implementation=None) -> dict[str, tuple[int, int]]:
    """The collectives of a step: how many of each kind, and the bytes of one device's results."""
    state = jax.eval_shape(initial_state)
    return traffic(make_step(mesh, implementation).lower(state, make_batch(0)).compile())


def make_mesh(text: str, devices=None):
    """The mesh of all devices: "data=2,time=4"; the data have what is not named."""
    devices = jax.devices() if devices is None else devices
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1:
            sys.exit(f"--mesh must be like data=2,tensor=2,time=2, got {text!r}")
        sizes[axis] = int(size)
    if "data=" not in text:
        sizes["data"] = len(devices) // (sizes["tensor"] * sizes["time"])
    if np.prod([*sizes.values()]) != len(devices):
        sys.exit(f"--mesh {text} must have all {len(devices)} devices, got {sizes}")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, types, devices=devices)


def put(batch, mesh):
    """The batch on the mesh, of which each process puts what its own devices have."""
    return {
        name: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, BATCH_SPECS[name]), array.__getitem__
        )
        for name, array in batch.items()
    }


def train(mesh, steps: int, folder: str | None, save_every: int, note=lambda step, loss: None):
    """The losses of the steps that are left after the newest checkpoint, and their mean time."""
    is_first = jax.process_index() == 0
    manager, begin = None, 0
    if folder is not None:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(save_interval_steps=save_every, max_to_keep=2)
        manager = ocp.CheckpointManager(pathlib.Path(folder).resolve(), options=options)
    places = shardings_of_state(mesh)
    if manager is not None and manager.latest_step() is not None:
        begin = manager.latest_step()
        like = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(initial_state),
            places,
        )
        state = manager.restore(begin, args=ocp.args.StandardRestore(like))
    else:
        state = jax.jit(initial_state, out_shardings=places)()
    step, losses, started = make_step(mesh), [], time.perf_counter()
    for number in track(range(begin, steps), "training", disable=not is_first):
        state, loss = step(state, put(make_batch(number), mesh))
        losses.append(float(loss))
        if len(losses) == 1:
            started = time.perf_counter()  # compiled
        if is_first:
            note(number, losses[-1])
        if manager is not None:
            is_last = number + 1 == steps
            manager.save(number + 1, args=ocp.args.StandardSave(state), force=is_last)
    seconds = (time.perf_counter() - started) / max(1, len(losses) - 1)
    if manager is not None:
        manager.wait_until_finished()
        manager.close()
    return losses, seconds


def compare(steps: int) -> dict[str, list[float]]:
    """The losses of one device, and of all devices along each axis of the mesh."""
    devices = jax.devices()
    meshes = {"one device": make_mesh("", devices[:1])}
    for axis in AXES:
        meshes[f"{axis}={len(devices)}"] = make_mesh(f"{axis}={len(devices)}", devices)
    return {name: train(mesh, steps, None, 0)[0] for name, mesh in meshes.items()}


def draw(losses: dict[str, list[float]], file: str) -> None:
    """The losses over the steps, and how far they are from those of the first mesh."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first, *others = losses
    for i, (name, values) in enumerate(losses.items()):
        # The losses are nearly equal. A line is thinner than the one below it, to show both.
        left.plot(values, color=f"C{i}", linewidth=8 - 2 * i, label=name)
    for i, name in enumerate(others, 1):
        difference = np.abs(np.subtract(losses[name], losses[first]))
        right.semilogy(difference, ".", color=f"C{i}", label=name)
    left.set(xlabel="step", ylabel="loss", ylim=(0, None), title="Losses by mesh")
    right.set(xlabel="step", title=f"Absolute difference from {first}")
    left.legend()
    right.legend()
    figure.savefig(file, dpi=100)


def sent_seconds(size: float, devices: int, node: int = 8, inside=450e9, outside=50e9, delay=5e-6):
    """The time of an all-reduce of `size` bytes on each device, by rings in and over nodes.

    t = 2 (n - 1)/n size/inside + 2 (m - 1)/m (size/n)/outside + 2 (n - 1 + m - 1) delay, with the n
    devices of a node, m nodes, the bytes a second of a link, and the delay of a message.
    """
    n = min(node, devices)
    m = devices // n
    sent = 2 * (n - 1) / n * size / inside + 2 * (m - 1) / m * size / n / outside
    return sent + 2 * (n + m - 2) * delay


def weak_scaling(size: float, seconds: float) -> dict[int, float]:
    """By number of devices, the share of a step that is computation, if sums are not hidden."""
    counts = [8 * 2**k for k in range(10)]
    return {n: seconds / (seconds + sent_seconds(size, n)) for n in counts}


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mesh", default="", help="like data=2,tensor=2,time=2")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="continued if it has any")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--losses", metavar="FILE", help="a line of JSON is added for each step")
    parser.add_argument("--cpu-devices", type=int, help="virtual devices of each process on CPUs")
    parser.add_argument("--collectives", action="store_true", help="show them, without training")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses of meshes; one process")
    parser.add_argument("--cluster", action="store_true", help="JAX finds the other processes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, help="the number of this one, from 0")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    given = parser.parse_args()
    if (given.process is None) != (given.coordinator is None):
        parser.error("--process and --coordinator belong together")
    if given.picture is not None and (given.cluster or given.processes > 1):
        parser.error("--picture needs one process")
    return given


def show_collectives(mesh, console) -> None:
    """The traffic of a step with our operators and in plain JAX."""
    for title, implementation in (("jaxops", None), ("plain JAX", "xla")):
        for kind, (count, size) in traffic_of(mesh, implementation).items():
            console.print(f"{title:9} {kind:20} {count:3} {size:8} bytes")


def main() -> None:
    """Trains, and prints the first and the last loss."""
    arguments = parse()
    if arguments.processes > 1 and arguments.process is None:
        sys.exit(run_local([sys.executable, *sys.argv], arguments.processes))
    if arguments.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)
    if arguments.cluster:
        jax.distributed.initialize()
    elif arguments.process is not None:
        own = arguments.process
        is_local = arguments.coordinator.startswith("localhost:")
        jax.distributed.initialize(
            arguments.coordinator, arguments.processes, own, [own] if is_local else None
        )
    if arguments.picture is not None:
        losses = compare(arguments.steps)
        draw(losses, arguments.picture)
        difference = np.ptp([*losses.values()], axis=0).max()
        print(f"the losses of the meshes differ by at most {difference:.1e}")
        print(f"they are in {arguments.picture}")
        return
    mesh = make_mesh(arguments.mesh)
    console = Console(highlight=False, quiet=jax.process_index() != 0)
    console.print(
        f"{jax.device_count()} devices, {jax.process_count()} processes, {dict(mesh.shape)}"
    )
    if arguments.collectives:
        show_collectives(mesh, console)
        return

    def note(step, loss):
        if arguments.losses is not None:
            with open(arguments.losses, "a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")

    losses, seconds = train(
        mesh, arguments.steps, arguments.checkpoints, arguments.save_every, note
    )
    if not losses:
        console.print("the checkpoint has all of the steps")
        return
    console.print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    console.print(f"{1000 * seconds:.1f} ms a step")
    size = sum(4 * np.prod(shape) for shape, _ in PARAMETERS.values())
    estimate = weak_scaling(size, seconds)
    shares = ", ".join(f"{n}: {share:.0%}" for n, share in estimate.items())
    title = "estimated share of computation with more devices, data-parallel"
    console.print(f"{title}: {shares}", soft_wrap=True)


if __name__ == "__main__":
    main()
