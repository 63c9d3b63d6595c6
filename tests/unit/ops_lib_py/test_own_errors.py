"""What is left of an error of ours when nobody caught it, and that others stay as they are."""

from __future__ import annotations

import traceback

import pytest
import tensorflow as tf
from ddl_ops.equal_weights import WeightsDifferError
from ddl_ops.own_errors import shortened

ALONE = (
    'AllReduceAtStep "s/ddl_gradients_0": rank 1 runs Barrier "the end of epoch 1 after 8 steps", '
    'rank 0 runs AllReduceAtStep "s/ddl_gradients_0". Give all ranks the same number of steps.'
)
IN_WORDS = (
    "Rank 1 is at the end of epoch 1 after 8 steps, rank 0 averages gradients. Give all ranks the "
    "same number of steps."
)
AROUND = (
    "Graph execution error:\n\nDetected at node ddl_gradients_0 defined at (most recent call "
    'last):\n  File "train.py", line 19, in <module>\n\n{}\n\t [[{{{{node ddl_gradients_0}}}}]] '
    "[Op:__inference_step_228]"
)
LOSS = 'AllReduce "loss": rank 1 sent float32[3] as tensor 0, rank 0 float32[2].'


def raised(error: BaseException) -> BaseException:
    """As it arrives at the top: through a frame of TensorFlow."""

    def inside(_: object) -> None:
        raise error

    try:
        tf.nest.map_structure(inside, [1])
    except BaseException as caught:
        return caught
    raise AssertionError("no error")


def invalid(message: str) -> BaseException:
    return raised(tf.errors.InvalidArgumentError(None, None, message))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (ALONE, IN_WORDS),
        (AROUND.format(ALONE), IN_WORDS),
        (LOSS, LOSS),
        (f"{{{{function_node f}}}}{{{{node loss}}}} {LOSS}", LOSS),
        (f"{LOSS}\n\t [[{{{{node loss}}}}]]\n\nOriginal stack trace:\n  more", LOSS),
        (AROUND.format(LOSS), LOSS),
    ],
)
def test_an_error_of_ours_is_one_sentence_with_the_scripts_frames(message, said):
    error = invalid(message)
    short, trace = shortened(error, error.__traceback__)
    assert type(short) is tf.errors.InvalidArgumentError
    assert str(short) == said
    files = {frame.filename for frame in traceback.extract_tb(trace)}
    assert files == {__file__}
    assert any("nest" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def test_an_error_of_another_op_stays_as_it_is():
    for message in (
        "Input is empty",
        AROUND.format("slice index 9 of dimension 0 out of bounds"),
        f"assertion failed: [{LOSS}]",
        f"assertion failed:\n{LOSS}",
        f"{LOSS}\nand something else",
        "",
    ):
        error = invalid(message)
        assert shortened(error, error.__traceback__) is None, message
    for error in (ValueError(ALONE), KeyboardInterrupt(), SystemExit(ALONE), OSError(ALONE)):
        assert shortened(raised(error), None) is None


def test_what_it_happened_in_is_still_there():
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise tf.errors.InvalidArgumentError(None, None, ALONE)  # noqa: B904
    except tf.errors.InvalidArgumentError as error:
        short, trace = shortened(error, error.__traceback__)
        said = "".join(traceback.format_exception(type(short), short, trace))
    assert "KeyError: 'first'" in said and "During handling" in said


def test_an_error_that_python_raises_for_us_keeps_its_type():
    error = raised(WeightsDifferError("The ranks have ended fit() with different weights"))
    short, trace = shortened(error, error.__traceback__)
    assert short is error
    assert {frame.filename for frame in traceback.extract_tb(trace)} == {__file__}
