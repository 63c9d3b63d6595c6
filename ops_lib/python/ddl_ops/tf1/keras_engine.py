"""What scripts import from keras.engine and its modules; Keras has it elsewhere by now."""

from keras.layers import Input, InputLayer, InputSpec, Layer  # noqa: TID253
from keras.models import Model, Sequential  # noqa: TID253

__all__ = ["Input", "InputLayer", "InputSpec", "Layer", "Model", "Sequential"]
__path__: list[str] = []  # it stands for a package, whose modules are this one
