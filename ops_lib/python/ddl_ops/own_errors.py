"""What an uncaught error of ours shows: the script's own lines, and one sentence.

TensorFlow puts some thirty lines in front of what an op of a tf.function says: how the op was made.
That is of use where the op is the script's; ours are made by ddl and by Keras.
"""

from __future__ import annotations

import os
import re
import sys
from types import TracebackType

# What an op of ours says, alone or at the end of what TensorFlow has put around it.
_SENTENCE = re.compile(
    r"(?:\A|\n)(?:\{\{.*?\}\} )?((?:AllReduceAtStep|AllReduceN|AllReduce|AllGatherN?|BcastN?|"
    r"DdlAllToAll|ReduceScatterN|TeamGradients|Barrier|Join) "
    r'"[^"\n]*": [^\n]*)(?:\n\t \[\[.*)?\s*\Z',
    re.DOTALL,
)
_AROUND = "Graph execution error:"
_GRADIENTS = r'AllReduce(?:AtStep|N) "[^"]*ddl_gradients[^"]*"'
# Their frames say nothing about the script.
_PACKAGES = (
    *("tensorflow", "keras", "tf_keras"),
    *("ddl", "ddl_ops", "dl_comm", "ml_comm", "mpi_collectives"),
)
_WEIGHTS = r'Bcast "(?:[^"]*/)?ddl_bcast/([^"]*)"'
_METRICS = r'AllReduceN "[^"]*ddl_metrics[^"]*"'
# What TensorFlow puts behind what an op says that did not run in a graph.
_EAGER = re.compile(r" \[Op:\w+\](?: name: \S+)?\Z")
_SENT = re.compile(r"rank (\d+) sent (\w+\[[^\]]*\]) as tensor \d+, rank (\d+) (\w+\[[^\]]*\])")
# An empty tensor as one of these, whose shape says what is None (ddl_ops.gradients).
_NONE = re.compile(r"\w+\[0,0,(\d+)((?:,\d+)+)\]")
_COUNTS = re.compile(rf"{_GRADIENTS}: rank \d+ sent \d+ tensors, rank \d+ \d+\.")
# More of them are not named.
_NAMED = 5
_GIVE_ZEROS = (
    "Give zeros where the loss of a rank does not depend on a variable, as with "
    "tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)."
)
# What to do where models differ.
BUILD_ALIKE = (
    "Build the same layers, in the same order, on all ranks: a number of classes or words has to "
    "come from all the data, not from a rank's own part."
)
_SAME_BATCHES = (
    "they have different numbers of batches. Give all ranks the same number of steps in each epoch "
    "(steps_per_epoch=, or dataset.take())."
)
_IN_KERAS = (
    "If its fit() ended by itself: does each rank's val_loss differ? Put "
    "ddl.keras.MetricAverageCallback before EarlyStopping. Else give all ranks the same number of "
    "steps (steps_per_epoch=, or dataset.take())."
)


def shortened(
    error: BaseException, traceback: TracebackType | None
) -> tuple[BaseException, TracebackType | None] | None:
    """An error of our own with one sentence, and the frames of its traceback that are the script's.

    None for any other error, which is to be shown as it is.
    """
    if type(error).__module__.partition(".")[0] == "ddl_ops":
        frames = _frames_of_script(traceback)
        return error.with_traceback(frames), frames
    if (sentence := _sentence_of(error)) is None:
        return None
    # Where the weights are broadcast it has not begun: then nothing can have stopped it.
    ended = "has already ended its script" in sentence and "broadcasts" not in sentence
    if ended and _is_in_fit(traceback):
        sentence = f"{sentence} {_IN_KERAS}"
    short: BaseException = type(error)(None, None, sentence)
    short.__cause__, short.__context__ = error.__cause__, error.__context__
    short.__suppress_context__ = error.__suppress_context__
    return short, _frames_of_script(traceback)


def sizes_differ(said: str) -> bool:
    """Whether a collective says that ranks gave it tensors of different shapes or types."""
    return _SENT.search(said) is not None


def _sentence_of(error: BaseException) -> str | None:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(error, tensorflow.errors.OpError):
        return None
    message = str(error.message)
    found = _SENTENCE.search(message)
    if found is None or (found.start() > 0 and not message.startswith(_AROUND)):
        return None  # another op's, which quotes one of ours
    return _in_words(found[1].strip())


def _in_words(said: str) -> str:
    """Without the names of ops where they are those of the optimizer and of Keras's callbacks."""
    said = _EAGER.sub("", said)
    if (sent := _SENT.search(said)) and (_NONE.match(sent[2]) or _NONE.match(sent[4])):
        return _of_none(*sent.groups())
    if _COUNTS.match(said):
        return (
            "The ranks have different numbers of gradients. If one is None, it has to be None on "
            f"all ranks. {_GIVE_ZEROS} Else they built different models. {BUILD_ALIKE}"
        )
    if found := re.match(rf"{_WEIGHTS}: ", said):
        said = _of_weights(found[1], said[found.end() :])
    elif found := re.match(rf"{_METRICS}: ", said):
        said = _of_metrics(said[found.end() :])
    elif found := re.match(rf"{_GRADIENTS}: ", said):
        said = said[found.end() :].replace("still runs this collective", "still averages gradients")
    said = re.sub(rf"\bruns {_GRADIENTS}", "averages gradients", said)
    said = re.sub(rf"\bruns {_METRICS}", "averages the metrics of an epoch", said)
    said = re.sub(rf"\bruns {_WEIGHTS}", "broadcasts the model's weights, as training begins", said)
    said = re.sub(r'\bruns Barrier "([^"]*)"', r"is at \1", said)
    if "averages gradients" in said and "averages the metrics" in said:
        said = f"{said.partition('. ')[0]}: {_SAME_BATCHES}"
    return said[:1].upper() + said[1:]


def _of_none(rank: str, theirs: str, other: str, ours: str) -> str:
    """Of gradients, of which other ones are None on another rank."""

    def on(rank: str, shape: str) -> str:
        if (found := _NONE.match(shape)) is None:
            return f"rank {rank} has others"
        numbers = found[2].strip(",").split(",")
        if len(numbers) == 1:
            return f"on rank {rank} number {numbers[0]} of the {found[1]} is None"
        if len(numbers) > _NAMED:
            named = ", ".join([*numbers[:_NAMED], "…"])
        else:
            named = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        return f"on rank {rank} numbers {named} of the {found[1]} are None"

    return (
        f"The ranks have gradients of different variables: {on(rank, theirs)}, {on(other, ours)}, "
        f"counted from 0. {_GIVE_ZEROS}"
    )


def _of_weights(name: str, said: str) -> str:
    """Of a broadcast of the weights, with which training begins, or ends an epoch."""
    if found := _SENT.match(said):
        rank, theirs, other, ours = found.groups()
        where = f"{name} is {theirs} on rank {rank}, {ours} on rank {other}"
        return f"The ranks built different models: {where}. {BUILD_ALIKE}"
    pair = re.match(rf"rank (\d+) runs {_WEIGHTS}, rank (\d+) runs {_WEIGHTS}\.", said)
    if pair:
        rank, theirs, other, ours = pair.groups()
        where = f"rank {rank} has {theirs} where rank {other} has {ours}"
        return f"The ranks built different models: {where}. {BUILD_ALIKE}"
    if ended := re.match(r"rank (\d+) has already ended its script, but rank (\d+) ", said):
        return (
            f"{ended[0]}still broadcasts the model's weights, as training begins. Do all ranks "
            f"call fit()? Look for an early exit on rank {ended[1]}."
        )
    return said


def _of_metrics(said: str) -> str:
    """Of MetricAverageCallback, at the end of an epoch."""
    if found := _SENT.match(said):
        rank, theirs, other, ours = found.groups()
        count = {text: text.partition("[")[2].rstrip("]") or "1" for text in (theirs, ours)}
        return (
            f"The ranks have different metrics at the end of an epoch: rank {rank} has "
            f"{count[theirs]}, rank {other} has {count[ours]}. Give all ranks the same metrics, "
            "and validation data to all or to none."
        )
    return said.replace("still runs this collective", "still averages the metrics of an epoch")


def _is_in_fit(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "fit_together":  # ddl_ops.keras_optimizer
            return True
        traceback = traceback.tb_next
    return False


def _frames_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Those that are in none of the packages above; all, if nothing else is left."""
    folders = tuple(
        os.path.join(os.path.realpath(folder), "")
        for name in _PACKAGES
        if (module := sys.modules.get(name)) is not None
        for folder in getattr(module, "__path__", ())
    )
    kept = []
    one = traceback
    while one is not None:
        file = one.tb_frame.f_code.co_filename
        if not file.startswith("<") and not os.path.realpath(file).startswith(folders):
            kept.append(one)
        one = one.tb_next
    if not kept:
        return traceback
    chain = None
    for one in reversed(kept):
        chain = TracebackType(chain, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return chain
