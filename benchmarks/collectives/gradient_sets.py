"""Shapes of the gradients of known models, in the order of their layers."""

from __future__ import annotations

Shape = tuple[int, ...]


def mnist_cnn() -> list[Shape]:
    """The CNN of TensorFlow's MNIST tutorial (deep_mnist): 8 tensors, 3.3 M elements."""
    return [
        *((5, 5, 1, 32), (32,)),
        *((5, 5, 32, 64), (64,)),
        *((7 * 7 * 64, 1024), (1024,)),
        *((1024, 10), (10,)),
    ]


def resnet50() -> list[Shape]:
    """ResNet-50 for 1000 classes: 161 tensors, 25.6 M elements.

    Source: He et al., Deep Residual Learning for Image Recognition, table 1, with projections where
    a stage begins (option B). Each convolution has no bias, and scale and offset of a batch
    normalisation after it.
    """

    def convolution(size: int, inputs: int, outputs: int) -> list[Shape]:
        return [(size, size, inputs, outputs), (outputs,), (outputs,)]

    shapes = convolution(7, 3, 64)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += convolution(1, inputs, width)
            shapes += convolution(3, width, width)
            shapes += convolution(1, width, outputs)
            if block == 0:
                shapes += convolution(1, inputs, outputs)
            inputs = outputs
    return [*shapes, (inputs, 1000), (1000,)]


def transformer() -> list[Shape]:
    """A small encoder-only transformer: 68 tensors, 5.3 M elements.

    4 layers, width 256, feed-forward 1024, 8,000 tokens (embedding and output share weights), 256
    positions, normalisation after each half of a layer. Source: Vaswani et al., Attention Is All
    You Need, section 3.
    """
    width, inner = 256, 1024
    projection: list[Shape] = [(width, width), (width,)]
    normalisation: list[Shape] = [(width,), (width,)]
    layer = [
        *(projection * 4),  # query, key, value, output
        *normalisation,
        *((width, inner), (inner,), (inner, width), (width,)),
        *normalisation,
    ]
    return [(8000, width), (256, width), *(layer * 4), *normalisation]


GRADIENT_SETS = {"mnist_cnn": mnist_cnn, "transformer": transformer, "resnet50": resnet50}
