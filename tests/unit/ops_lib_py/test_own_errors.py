"""What is left of an error of ours when nobody caught it, and that others stay as they are."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import tensorflow as tf
from ddl_ops import equal_weights
from ddl_ops.equal_weights import ModelsDifferError, WeightsDifferError
from ddl_ops.own_errors import BUILD_ALIKE, shortened

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


SAME_PROGRAM = (
    "All ranks must run the same collectives in the same order: let each run the same program."
)
ENDED = (
    "rank 1 has already ended its script, but rank 0 still runs this collective. Let all ranks do "
    "the same number of steps, and look for an early exit on rank 1."
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            'Bcast "ddl_bcast/dense/kernel": rank 1 sent float32[6,5] as tensor 0, rank 0 '
            "float32[6,4]. Shape, dtype and kind of device must agree on all ranks.",
            "The ranks built different models: dense/kernel is float32[6,5] on rank 1, "
            f"float32[6,4] on rank 0. {BUILD_ALIKE}",
        ),
        (
            'Bcast "ddl_bcast/a/kernel": rank 1 runs Bcast "ddl_bcast/b/kernel", rank 0 runs '
            f'Bcast "ddl_bcast/a/kernel". {SAME_PROGRAM}',
            "The ranks built different models: rank 1 has b/kernel where rank 0 has a/kernel. "
            f"{BUILD_ALIKE}",
        ),
        (
            f'Bcast "ddl_bcast/dense/kernel": {ENDED}',
            "Rank 1 has already ended its script, but rank 0 still broadcasts the model's weights, "
            "as training begins. Do all ranks call fit()? Look for an early exit on rank 1.",
        ),
        (
            'Bcast "ddl_bcast/dense/kernel": rank 1 is at my place, rank 0 runs Bcast '
            f'"ddl_bcast/dense/kernel". {SAME_PROGRAM}',
            "Rank 1 is at my place, rank 0 broadcasts the model's weights, as training begins. "
            f"{SAME_PROGRAM}",
        ),
        (
            'AllReduceN "ddl_metrics": rank 1 runs AllReduceN "ddl_metrics", rank 0 runs '
            f'AllReduceAtStep "s/ddl_gradients_0". {SAME_PROGRAM} [Op:AllReduceN]',
            "Rank 1 averages the metrics of an epoch, rank 0 averages gradients: they have "
            "different numbers of batches. Give all ranks the same number of steps in each epoch "
            "(steps_per_epoch=, or dataset.take()).",
        ),
        (
            'AllReduceN "ddl_metrics": rank 1 sent float64[4] as tensor 0, rank 0 float64[2]. '
            "Shape, dtype and kind of device must agree on all ranks. [Op:AllReduceN] name: m",
            "The ranks have different metrics at the end of an epoch: rank 1 has 4, rank 0 has 2. "
            "Give all ranks the same metrics, and validation data to all or to none.",
        ),
        (
            f'AllReduceN "ddl_metrics": {ENDED}',
            "Rank 1 has already ended its script, but rank 0 still averages the metrics of an "
            "epoch. Let all ranks do the same number of steps, and look for an early exit on rank "
            "1.",
        ),
    ],
)
def test_what_keras_waits_for_is_said_in_its_words(message, said):
    error = invalid(message)
    assert str(shortened(error, error.__traceback__)[0]) == said


SAME_SHAPE = "Shape, dtype and kind of device must agree on all ranks."
GIVE_ZEROS = (
    "Give zeros where the loss of a rank does not depend on a variable, as with "
    "tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)."
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            'AllReduceN "ddl_gradients_0": rank 1 sent float32[0,0,3,1] as tensor 2, rank 0 '
            f"float32[0,0,3,0,2]. {SAME_SHAPE} [Op:AllReduceN] name: ddl_gradients_0",
            "The ranks have gradients of different variables: on rank 1 number 1 of the 3 is None, "
            f"on rank 0 numbers 0 and 2 of the 3 are None, counted from 0. {GIVE_ZEROS}",
        ),
        (
            'TeamGradients "dl_comm_gradients_0": rank 2 sent bfloat16[0,0,9,1,2,3,4,5,6,7] as '
            f"tensor 2, rank 0 bfloat16[5,3]. {SAME_SHAPE}",
            "The ranks have gradients of different variables: on rank 2 numbers 1, 2, 3, 4, 5, … "
            f"of the 9 are None, rank 0 has others, counted from 0. {GIVE_ZEROS}",
        ),
        (
            'AllReduceAtStep "DistributedGradients_0": rank 1 sent float32[3] as tensor 0, rank 0 '
            f"float32[0,0,2,1] on a GPU. {SAME_SHAPE}",
            "The ranks have gradients of different variables: rank 1 has others, on rank 0 number "
            f"1 of the 2 is None, counted from 0. {GIVE_ZEROS}",
        ),
        (
            'AllReduceAtStep "s/ddl_gradients_0": rank 1 sent 3 tensors, rank 0 2. All ranks must '
            "pass the same number of tensors.",
            "The ranks have different numbers of gradients. If one is None, it has to be None on "
            f"all ranks. {GIVE_ZEROS} Else they built different models. {BUILD_ALIKE}",
        ),
        (
            'AllReduceN "mine": rank 1 sent 3 tensors, rank 0 2. All ranks must pass the same '
            "number of tensors.",
            'AllReduceN "mine": rank 1 sent 3 tensors, rank 0 2. All ranks must pass the same '
            "number of tensors.",
        ),
    ],
)
def test_gradients_that_are_none_on_some_ranks_are_named(message, said):
    error = invalid(message)
    assert str(shortened(error, error.__traceback__)[0]) == said


def test_early_stopping_is_advised_only_where_training_had_begun():
    def fit_together(message: str) -> BaseException:  # as of ddl_ops.keras_optimizer
        try:
            raise tf.errors.FailedPreconditionError(None, None, message)
        except tf.errors.OpError as error:
            return error

    for title, advised in (
        ('Bcast "ddl_bcast/dense/kernel"', False),
        ('AllReduceAtStep "s/ddl_gradients_0"', True),
    ):
        error = fit_together(f"{title}: {ENDED}")
        said = str(shortened(error, error.__traceback__)[0])
        assert said.startswith("Rank 1 has already ended its script, but rank 0 still ")
        assert "look for an early exit on rank 1" in said.lower()
        assert ("EarlyStopping" in said) == advised
        if advised:
            assert said.index("early exit") < said.index("EarlyStopping")


def test_models_that_differ_without_a_broadcast_are_said_to(monkeypatch):
    said = 'AllReduce "the weights at the start": {}. Shape, dtype and kind of device must agree'

    def refuses(reason: str) -> None:
        def add(name: str, array: object) -> None:
            raise ValueError(said.format(reason))

        monkeypatch.setattr(equal_weights.arrays, "add", add)

    refuses("rank 1 sent int64[50] as tensor 0, rank 0 int64[34]")
    with pytest.raises(ModelsDifferError) as caught:
        equal_weights._add("the weights at the start", np.zeros(34), "rank 0 has 4 variables")
    assert str(caught.value) == (
        f"The ranks built different models: rank 0 has 4 variables. {BUILD_ALIKE}"
    )
    short, trace = shortened(caught.value, caught.value.__traceback__)
    assert short is caught.value and "equal_weights" not in str(traceback.extract_tb(trace))
    refuses('rank 1 is at my place, rank 0 runs AllReduce "the weights at the start"')
    with pytest.raises(ValueError, match="is at my place"):
        equal_weights._add("the weights at the start", np.zeros(34), "")
