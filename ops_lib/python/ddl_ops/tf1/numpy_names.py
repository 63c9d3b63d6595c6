"""Names that NumPy had when TensorFlow 1 scripts were written, and has taken away since."""

from __future__ import annotations

from types import ModuleType

# Since 1.24 Python's own types go by their own names alone.
_BUILTIN = {"bool": bool, "complex": complex, "float": float, "int": int, "object": object}
_BUILTIN |= {"long": int, "str": str, "unicode": str}
# Gone since 2.0, and what they were other names of.
_RENAMED = {
    "Inf": "inf",
    "Infinity": "inf",
    "NaN": "nan",
    "alltrue": "all",
    "bool8": "bool_",
    "complex_": "complex128",
    "cumproduct": "cumprod",
    "float_": "float64",
    "infty": "inf",
    "int0": "intp",
    "product": "prod",
    "round_": "round",
    "row_stack": "vstack",
    "sometrue": "any",
    "string_": "bytes_",
    "trapz": "trapezoid",
    "unicode_": "str_",
}


def put_back(numpy: ModuleType) -> None:
    """Adds those that are missing. What NumPy has by such a name, as bool in 2, stays as it is."""
    there = vars(numpy)
    for name, builtin in _BUILTIN.items():
        there.setdefault(name, builtin)
    for name, now in _RENAMED.items():
        if now in there:
            there.setdefault(name, there[now])
