"""Whole models whose training steps are timed, with our operators and with those of plain JAX.

Each is a small Flax module that is told its `Operators`; nothing else differs between the two.
"""

from __future__ import annotations

from jaxops._bench.models import language, resnet, retinanet, unet, volume
from jaxops._bench.models.model import Model
from jaxops._bench.models.operators import Operators, ours, plain

__all__ = ["MODELS", "Model", "Operators", "ours", "plain"]

#: The models by the names that the command line takes.
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        resnet.BFLOAT16,
        resnet.FLOAT32,
        unet.BFLOAT16,
        retinanet.BFLOAT16,
        language.LIGHT_CONV,
        language.SHORT_CONV,
        volume.FLOAT32,
    )
}
