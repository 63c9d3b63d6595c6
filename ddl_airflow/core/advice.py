"""What to do about errors of a training script that its author meets first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

# What every rank has in its environment, besides PARAM_*: docs/process-contract.md.
VARIABLES = (
    *("DATA_DIR", "RESULT_DIR", "MODEL_DIR", "CHECKPOINT_DIR", "LOG_DIR", "JOB_STATE_DIR"),
    *("TRAINING_ID", "JOB_NAME", "EXPERIMENT_ID", "EXPERIMENT_DIR", "LEARNER_ID"),
    *("NUM_LEARNERS", "GPU_COUNT", "DLAAS_JOB_ID"),
)
LESS_MEMORY = "Give each rank a smaller batch, or run fewer ranks on a node."


class _Known(NamedTuple):
    """An error that is known by its type and words; ``say`` may find that it is not meant."""

    kinds: frozenset[str]
    words: re.Pattern[str]
    say: Callable[[re.Match[str]], str]


def _known(kinds: str, words: str, say: str | Callable[[re.Match[str]], str]) -> _Known:
    text = say if callable(say) else lambda _: say
    return _Known(frozenset(kinds.split()), re.compile(words), text)


def _variable(found: re.Match[str]) -> str:
    name = found[1]
    if parameter := re.fullmatch("PARAM_([A-Z0-9_]+)", name):
        return f"Add {parameter[1].lower()} to the manifest's parameters."
    near = difflib.get_close_matches(name, VARIABLES, 1, 0.75)
    return f"Did you mean {near[0]}?" if near and near[0] != name else ""


_TF1 = (
    'If the script is for TensorFlow 1, write framework: {version: "1.15"} in the manifest; '
    "by hand, ddl-run --tf1."
)
_ADVICE = (
    _known("NotFoundError", r"\bddl_MDR\.so: ", f"TensorFlow 1 mode has it. {_TF1}"),
    _known(
        "FileNotFoundError NotFoundError",
        r"No such file or directory: b?'[^/]",
        "A rank runs in a copy of the script's folder; staged data is in $DATA_DIR.",
    ),
    _known(
        "FileNotFoundError NotFoundError",
        r"No such file or directory",
        "Each host of ranks must have it; what is staged is in $DATA_DIR.",
    ),
    _known(
        "PermissionError PermissionDeniedError",
        "",
        "Ranks may write below $RESULT_DIR, $CHECKPOINT_DIR and $EXPERIMENT_DIR.",
    ),
    _known("KeyError", r"^'([A-Z][A-Z0-9_]+)'$", _variable),
    _known(
        "ModuleNotFoundError",
        r"No module named 'horovod\b",
        "ddl stands in for it in the ranks' own Python, `python` in the command: "
        "docs/coming-from-horovod.md says for which parts.",
    ),
    _known(
        "AttributeError ImportError ModuleNotFoundError",
        r"'multi_gpu_model'|No module named 'keras\.utils\.(multi_gpu|training)_utils'",
        "Take the call out: each rank trains on a GPU of its own, and `import ddl` joins them.",
    ),
    _known(
        "AttributeError ImportError ModuleNotFoundError",
        # Of PowerAI, in each of its releases.
        r"'tensorflow_large_model_support\b|\btensorflow\.contrib\.lms\b|'set_lms_enabled'",
        "Take it out: PowerAI's large model support moved tensors off the GPU, and what a model "
        "learns is the same without it. Where memory is short, give each rank a smaller batch.",
    ),
    _known(
        "AttributeError ModuleNotFoundError",
        r"module 'tensorflow' has no attribute|No module named 'tensorflow\.(contrib|examples)\b",
        _TF1,
    ),
    _known(
        "TypeError",
        r"__init__\(\) got multiple values for (keyword )?argument 'name'",
        "If it is of an optimizer's get_config(), Keras has the name in that by now: "
        'config.pop("name", None).',
    ),
    _known("MemoryError ResourceExhaustedError", "", LESS_MEMORY),
    _known(
        "EOFError",
        "EOF when reading a line",
        "A rank has no terminal in which somebody could type: make it one of the manifest's "
        "parameters.",
    ),
    _known(
        "Exception URLError ConnectionError ConnectionRefusedError TimeoutError gaierror",
        "URL fetch failure|urlopen error|[Nn]ame resolution|Connection refused|timed out",
        "Ranks may be without a network: name the data in training_data_reference, and read it "
        "from $DATA_DIR.",
    ),
)


def advice(kind: str, message: str) -> str:
    """A sentence about an exception of the script; empty if there is nothing to add.

    Args:
        kind: name of its type.
        message: its text.
    """
    for known in _ADVICE:
        if kind in known.kinds and (found := known.words.search(message)):
            return known.say(found)
    return ""
