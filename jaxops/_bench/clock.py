"""Two clocks: the time that a GPU was busy, from the profiler, and the time on the wall.

A clock runs batches, calls queued one after another, and tells the seconds of each. All batches of
one case run under one clock, in the order in which the rounds interleave them.
"""

from __future__ import annotations

import bisect
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxops._bench.contenders import Call, Contender

_WINDOW = "jaxops-bench-batch-"
# Between batches: half of it is what the clocks of host and device may disagree by.
_PAUSE = 1e-3


@dataclasses.dataclass(frozen=True)
class Batch:
    """Calls of one contender, which a clock runs and times together."""

    contender: Contender
    calls: Sequence[Call]


class ProfileError(Exception):
    """A profile does not show what was run."""


Interval = tuple[float, float]
#: Gives the seconds of each batch, or why it has none.
Clock = Callable[[Sequence[Batch]], "Sequence[float | ProfileError]"]


def wall_seconds(batches: Sequence[Batch]) -> list[float]:
    """Seconds on the wall. Each call is waited for: a host may run queued calls side by side."""
    seconds = []
    for batch in batches:
        # Not timed: it meets the threads of another contender, which may still spin.
        batch.contender.block(batch.calls[-1]())
        start = time.perf_counter()
        for call in batch.calls:
            batch.contender.block(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def device_seconds(batches: Sequence[Batch]) -> list[float | ProfileError]:
    """Seconds that the GPU was busy with each batch, or why the profile does not tell.

    Busy is with kernels, copies and fills.
    """

    def run() -> None:
        for i, batch in enumerate(batches):
            # Not timed, and a pause away from what is: arguments that fit the caches would be
            # found there or not, as the batch before left them.
            time.sleep(_PAUSE)
            _run_queued(batch)
            time.sleep(_PAUSE)
            with jax.profiler.TraceAnnotation(f"{_WINDOW}{i}"):
                _run_queued(batch)
        time.sleep(_PAUSE)

    windows, events = read_profile(profile_of(run))
    return [_seconds(events, windows.get(i)) for i in range(len(batches))]


def profile_of(run: Callable[[], object]) -> Any:
    """The profile of a call: what devices did, and the annotations of the host."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # the annotations
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def gpu_events(profile: Any) -> list[Any]:
    """The kernels, copies and fills of all GPUs in a profile, which have a name and times in ns."""
    return [
        event
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def _seconds(events: Sequence[Interval], window: Interval | None) -> float | ProfileError:
    # One contender that the profile does not see must not cost the others their times.
    if window is None:
        return ProfileError("the profile does not show when the calls were made")
    try:
        return 1e-9 * busy(events, window)
    except ProfileError as error:
        return error


def _run_queued(batch: Batch) -> None:
    result = None
    for call in batch.calls:
        result = call()
    batch.contender.block(result)


def read_profile(profile: Any) -> tuple[dict[int, Interval], list[Interval]]:
    """The windows of the batches by their number, and when the GPU was busy; in nanoseconds."""
    windows = {
        int(e.name.removeprefix(_WINDOW)): interval(e)
        for plane in profile.planes
        if not plane.name.startswith("/device:GPU")
        for line in plane.lines
        for e in line.events
        if e.name.startswith(_WINDOW)
    }
    return windows, sorted(map(interval, gpu_events(profile)))


def interval(event: Any) -> Interval:
    """When an event of a profile was."""
    return event.start_ns, event.start_ns + event.duration_ns


def busy(events: Sequence[Interval], window: Interval) -> float:
    """How long the sorted `events` that begin in a window lasted, overlaps counted once.

    Raises:
      ProfileError: none begins in it.
    """
    margin = 0.5e9 * _PAUSE
    start, end = window[0] - margin, window[1] + margin
    total, covered = 0.0, start
    first_inside = bisect.bisect_left(events, (start,))
    inside = events[first_inside : bisect.bisect_right(events, (end, float("inf")))]
    if not inside:
        first, last = (events[0][0], events[-1][1]) if events else (float("nan"), float("nan"))
        raise ProfileError(
            f"the profile shows nothing that the device did from {start:.0f} to {end:.0f} ns, only "
            f"{len(events)} events from {first:.0f} to {last:.0f} ns"
        )
    for event_start, event_end in inside:
        total += max(0.0, event_end - max(event_start, covered))
        covered = max(covered, event_end)
    return total
