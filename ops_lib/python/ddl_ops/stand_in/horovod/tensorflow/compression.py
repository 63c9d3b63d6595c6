"""In what type tensors travel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Makes a tensor smaller before it is communicated, and what comes back what it was."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as it would have been without compression."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """As they are."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """As they are."""
        del ctx
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, which ends at 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """As float16, if it is of a floating-point type."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """In its own type again."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression:
    """What compression= takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
