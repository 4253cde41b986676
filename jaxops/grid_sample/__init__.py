"""Sampling of volumes and images at points.

public           grid_sample
map_coordinates  the same with the signature of jax.scipy.ndimage, and splines
sampling         what both share: the choice of primitives
taps             primitives that sum entries with given weights
"""

from jaxops.grid_sample.map_coordinates import map_coordinates
from jaxops.grid_sample.public import grid_sample

__all__ = ["grid_sample", "map_coordinates"]
