"""What a script for Cray's plugin may do with NumPy arrays: runs each check, says how it went.

Inputs differ by rank, index and step. The argument is a folder for the ranks to meet in.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import dl_comm as mc
import numpy as np
from speech import RANK, SIZE, SLOWNESS, say
from threads import in_threads

FOLDER = Path(sys.argv[1])
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def error_of(kind: type[Exception], function: Callable[..., object], *arguments: object) -> str:
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30 * SLOWNESS
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path.name}"
        time.sleep(0.002)


def mean_of_step(step: int) -> float:
    """Of what own_gradient gives on all ranks."""
    return step * SIZE + (SIZE - 1) / 2


def own_gradient(step: int, dtype: str = "float32") -> np.ndarray:
    return np.full([2, 3], step * SIZE + RANK, dtype)


@check
def importing_needs_no_tensorflow_and_has_both_names() -> None:
    import ml_comm

    assert ml_comm.__all__ == mc.__all__
    assert all(getattr(ml_comm, name) is getattr(mc, name) for name in mc.__all__)
    assert "tensorflow" not in sys.modules


@check
def the_rank_is_known_before_anything() -> None:
    assert (mc.get_rank(), mc.get_nranks(), mc.get_local_rank()) == (RANK, SIZE, RANK)
    mc.finalize()  # of nothing


@check
def calls_before_init_say_so() -> None:
    array = np.zeros(3, np.float32)
    for name, *arguments in (
        ("barrier",),
        ("average", array),
        ("broadcast", [array]),
        ("gradients", [array], 0),
        ("check_buffers_match", [array], 1),
        ("config_team", 0, 0, 1, 1, 1, 1),
    ):
        said = error_of(RuntimeError, getattr(mc, name), *arguments)
        assert said == f"dl_comm.{name}() before dl_comm.init(). Call init first.", said


@check
def init_mpi_starts_ranks_and_no_teams() -> None:
    mc.init_mpi()
    mc.init_mpi()
    said = error_of(RuntimeError, mc.config_team, 0, 0, 1, 1, 1, 1)
    assert "before dl_comm.init(), which says how many teams" in said, said
    said = error_of(RuntimeError, mc.gradients, [np.zeros(1, np.float32)], 0)
    assert "ran before dl_comm.init()" in said, said


@check
def init_says_what_is_wrong_with_its_arguments() -> None:
    said = error_of(TypeError, mc.init, 1, 1, object())
    assert "msglen is object, not a number. It is the number of elements" in said, said
    assert "nteams is 0" in error_of(ValueError, mc.init, 1, 0, 10)
    assert "nthread_per_team is 0" in error_of(ValueError, mc.init, 0, 1, 10)
    assert "no framework 'caffe'" in error_of(ValueError, mc.init, 1, 1, 10, "caffe")
    mc.init(2, 1, 6)
    mc.init(nthread_per_team=2, nteams=3, msglen=np.int64(60))
    assert "tensorflow" not in sys.modules


@check
def epochs_of_different_lengths_are_errors_on_all_ranks() -> None:
    def epoch(steps: int) -> None:
        for _ in range(steps):
            mc.average(np.ones(2, np.float32))
        mc.barrier()

    epoch(2)
    said = error_of(ValueError, epoch, 3 if RANK == 0 else 2)
    assert "dl_comm.barrier" in said and "dl_comm.average" in said, said
    assert "Give all ranks the same number of steps in each epoch." in said, said
    epoch(2)


@check
def teams_that_are_not_there_are_refused() -> None:
    assert "there is no team 3" in error_of(ValueError, mc.config_team, 3, 0, 1, 1, 1, 1)
    assert "team is -1" in error_of(ValueError, mc.config_team, -1, 0, 1, 1, 1, 1)
    assert "alg is 2" in error_of(ValueError, mc.config_team, 0, 2, 1, 1, 1, 1)
    assert "max_steps is 0" in error_of(ValueError, mc.config_team, 0, 0, 1, 0, 1, 1)
    said = error_of(RuntimeError, mc.gradients, [own_gradient(1)], 1)
    assert "team 1 is not configured. Call config_team(1, ...)" in said, said


@check
def barrier_waits_for_all() -> None:
    (FOLDER / f"before-{RANK}").touch()
    mc.barrier()
    assert all((FOLDER / f"before-{rank}").exists() for rank in range(SIZE))


@check
def averages_are_in_place() -> None:
    for dtype in ("float32", "float64", "float16"):
        array = own_gradient(1, dtype)
        view = array[:, ::2]  # of memory that is not in one piece
        assert mc.average(view) is None
        expected = own_gradient(1, dtype)
        expected[:, ::2] = mean_of_step(1)
        assert array.dtype == dtype and (array == expected).all(), array
    assert "int32, which cannot hold an average" in error_of(
        TypeError, mc.average, np.zeros(1, "i")
    )
    assert "not on float" in error_of(TypeError, mc.average, 0.5)
    frozen = np.zeros(1, np.float32)
    frozen.flags.writeable = False
    assert "writeable" in error_of(TypeError, mc.average, frozen)


@check
def broadcasts_have_every_bit_of_every_root() -> None:
    def of(rank: int) -> list[np.ndarray]:
        odd = np.array([-0.0, np.nan, np.inf, rank, 5e-324])
        return [
            *(np.arange(7, dtype=dtype) + rank for dtype in ("float32", "int64", "uint8", "int16")),
            *(odd, np.array(rank == 0), np.zeros([0, 3]), np.array([1j * rank])),
            *(np.array([f"rank {rank}", ""]), np.array([rank], "datetime64[s]")),
            np.array([[(rank, 0.5)]], [("step", "i4"), ("loss", "f8")]),
            np.arange(12.0).reshape(3, 4)[:, 1:3] + rank,
        ]

    for root in range(SIZE):
        arrays = of(RANK)
        received = mc.broadcast(arrays, root)
        for array, got, expected in zip(arrays, received, of(root), strict=True):
            assert got is array and array.dtype == expected.dtype
            assert array.tobytes() == expected.tobytes(), (root, array, expected)
    # A record is one of a table, too, and aligned ones without padding are as they are otherwise.
    fields = [("step", "i8"), ("loss", "f8")]
    kinds = [np.dtype(fields), np.dtype((np.record, fields)), np.dtype(fields, align=True)]
    record = np.array([(RANK, 0.5)], kinds[RANK % 3])
    assert mc.broadcast([record], SIZE - 1)[0].tolist() == [(SIZE - 1, 0.5)]
    assert "no rank" in error_of(ValueError, mc.broadcast, [np.zeros(1)], SIZE)
    assert "pass [value]" in error_of(TypeError, mc.broadcast, np.zeros(1), 0)
    assert "in place" in error_of(TypeError, mc.broadcast, [np.float32(1)], 0)
    words = np.array(["one", "another"], object)
    assert "array of Python objects" in error_of(TypeError, mc.broadcast, [words], 0)


@check
def blocking_gradients_are_averages_in_new_arrays() -> None:
    mc.config_team(0, 0, 9, 9, 0, 0)
    arrays = [own_gradient(1), None, own_gradient(2, "float64")[:, 1:], own_gradient(3, "float16")]
    given = [None if array is None else array.copy() for array in arrays]
    received = mc.gradients(arrays, 0)
    assert received[1] is None
    for index, step in ((0, 1), (2, 2), (3, 3)):
        assert received[index].dtype == arrays[index].dtype
        assert received[index].shape == arrays[index].shape
        assert (received[index] == mean_of_step(step)).all(), received
        assert (arrays[index] == given[index]).all()
    assert "cannot add arrays of bool" in error_of(TypeError, mc.gradients, [np.array([True])], 0)
    said = error_of(ValueError, mc.gradients, [np.zeros(61, np.float32)], 0)
    assert "61 elements, but dl_comm.init() was told of 60 at most" in said, said


@check
def gradients_that_are_none_on_another_rank_are_an_error() -> None:
    mc.config_team(0, 0, 9, 9, 0, 0)
    arrays = [own_gradient(1), own_gradient(1), own_gradient(1)]
    arrays[1 if RANK == 0 else 2] = None
    said = error_of(ValueError, mc.gradients, arrays, 0)
    assert "float32[0]" in said and "None there, and must be on every rank" in said, said
    (received,) = mc.gradients([own_gradient(2)], 0)
    assert (received == mean_of_step(2)).all()


@check
def gradients_that_are_all_none_on_one_rank_are_an_error_on_all_ranks() -> None:
    for some in (
        [own_gradient(1), own_gradient(1)],
        [own_gradient(1, "float64"), None],
        [own_gradient(1), own_gradient(1, "float64")],
    ):
        mc.config_team(0, 0, 9, 9, 0, 0)  # whose ranks count steps alike again
        said = error_of(ValueError, mc.gradients, [None, None] if RANK == 1 else some, 0)
        assert "all are None there, and must be on every rank: give zeros" in said, said
    # Where they are on all ranks, nothing is wrong.
    mc.config_team(0, 0, 9, 9, 0, 0)
    for step in range(3):
        (received,) = mc.gradients([own_gradient(step)], 0)
        assert (received == mean_of_step(step)).all()
        assert mc.gradients([None] * step, 0) == [None] * step
    said = error_of(ValueError, mc.gradients, [None] * (1 + RANK), 0)
    assert "2 gradients without values of team 0" in said, said


@check
def arrays_of_other_shapes_or_dtypes_are_errors_on_all_ranks() -> None:
    mc.config_team(0, 0, 9, 9, 0, 0)
    last = SIZE - 1
    turned = own_gradient(1).T if last == RANK else own_gradient(1)
    for name, of in (("gradients", [turned]), ("average", turned), ("broadcast", [turned])):
        said = error_of(ValueError, getattr(mc, name), of)
        assert f"rank {last} sent float32[3,2] as tensor 0, rank 0 float32[2,3]." in said, said
    for dtypes, differ in (
        (("i8", "f8"), f"rank {last} sent float64[2] as tensor 0, rank 0 int64[2]."),
        (("U2", "U3"), f'rank {last} runs Bcast "dl_comm.broadcast 0 of <U3"'),
        (("M8[s]", "i8"), 'rank 0 runs Bcast "dl_comm.broadcast 0 of datetime64[s]"'),
    ):
        said = error_of(ValueError, mc.broadcast, [np.zeros(2, dtypes[last == RANK])], 0)
        assert differ in said, said
    (received,) = mc.gradients([own_gradient(2)], 0)
    assert (received == mean_of_step(2)).all()


@check
def numbers_of_either_byte_order_are_the_same_numbers() -> None:
    mc.config_team(0, 0, 9, 9, 0, 0)
    for order in (">", "<>"[RANK % 2]):
        for dtype in (f"{order}f4", f"{order}f8"):
            array = own_gradient(1, dtype)
            (received,) = mc.gradients([array], 0)
            assert received.dtype == array.dtype
            assert (received == mean_of_step(1)).all(), received
            mc.average(array)
            assert (array == mean_of_step(1)).all(), array
            own = own_gradient(2, dtype)
            mc.broadcast([own], 1)
            assert (own == 2 * SIZE + 1).all(), own


def applied_by(steps: int, *plan: int, **more: int) -> list[float]:
    """What each step of team 1 gives, in steps: 3 is the average of step 3."""
    mc.config_team(1, *plan, **more)
    applied = []
    for step in range(1, steps + 1):
        own = own_gradient(step)
        (received,) = mc.gradients([own], 1)
        own[:] = -1  # the caller may use it for something else
        assert (received == received[0, 0]).all()
        value = float(received[0, 0])
        applied.append(round((value - mean_of_step(0)) / SIZE, 4) if value else 0)
    return applied


@check
def each_phase_applies_the_steps_that_it_should() -> None:
    assert applied_by(6, 0, 4, 4, 0, 0) == [1, 2, 3, 4, 5, 6]
    assert applied_by(6, 0, 2, 6, 0, 0) == [1, 2, 0, 3, 4, 5]
    assert applied_by(5, 0, -3, 5, 0, 0) == [0, 1, 2, 4, 5]
    assert applied_by(4, 0, ksteps=0, max_steps=5, verbosity=0, perf_freq=0) == [0, 1, 2, 3]
    mixed = [round(2 + i - i / 11, 4) for i in range(1, 12)]
    assert applied_by(15, 1, 2, 99) == [1, 2, *mixed, 13, 14]
    mixed = [round(1 + i + i / 11, 4) for i in range(1, 12)]
    assert applied_by(15, 1, -2, 99) == [0, 1, *mixed, 14, 15]


@check
def a_pipelined_step_does_not_wait_for_the_others() -> None:
    mc.config_team(1, 0, 0, 9)
    for step in range(1, 4):
        if RANK != 0:  # these come to a step only when rank 0 is through with it
            wait_for(FOLDER / f"ahead-{step}")
        (received,) = mc.gradients([own_gradient(step)], 1)
        assert (received == (mean_of_step(step - 1) if step > 1 else 0)).all()
        if RANK == 0:
            (FOLDER / f"ahead-{step}").touch()


@check
def teams_count_their_own_steps() -> None:
    mc.config_team(1, 0, 1, 9)
    mc.config_team(2, 0, 2, 9)
    mc.gradients([own_gradient(1)], 1)
    (received,) = mc.gradients([own_gradient(1)], 2)
    assert (received == mean_of_step(1)).all()
    assert (mc.gradients([own_gradient(2)], 1)[0] == 0).all()
    assert (mc.gradients([own_gradient(2)], 2)[0] == mean_of_step(2)).all()
    said = error_of(ValueError, mc.gradients, [np.zeros(5, np.float32)], 1)
    assert "other shapes than those of the step before" in said, said


@check
def teams_in_threads_are_told_apart_and_threads_without_names_refused() -> None:
    mc.config_team(1, 0, 9, 9)
    mc.config_team(2, 0, 9, 9)

    def steps(team: int, base: int) -> list[float]:
        return [
            float(mc.gradients([own_gradient(base + step)], team)[0][0, 0]) for step in range(5)
        ]

    for team in (2, 1):  # two teams, and one for both
        low, high = in_threads(
            lambda: steps(1, 0), lambda team=team: steps(team, 100), names=["one", "two"]
        )
        assert low == [mean_of_step(step) for step in range(5)], low
        assert high == [mean_of_step(100 + step) for step in range(5)], high
    (refused,) = in_threads(lambda: steps(1, 0))
    assert isinstance(refused, RuntimeError) and "Name the thread" in str(refused), refused


@check
def rank_0_reports() -> None:
    mc.config_team(1, 0, 2, 4, 2, 2)
    for step in range(1, 5):
        mc.gradients([own_gradient(step)], 1)


@check
def buffers_are_compared_bit_by_bit() -> None:
    same = [np.arange(5.0), np.float32(1), np.array([np.nan])]
    assert mc.check_buffers_match(same, 1) == 0
    for last, index in ((SIZE - 1, 0), (SIZE - 1, 2)):
        changed = [array.copy() for array in same]
        if last == RANK:
            changed[index] = -changed[index]
        assert mc.check_buffers_match(changed, 1) == 1
    assert mc.check_buffers_match([np.zeros(3 + RANK)], 0) == 1
    assert "session.run" in error_of(TypeError, mc.check_buffers_match, [1.5], 1)


@check
def a_comparison_that_not_all_ask_for_ends_and_the_ranks_go_on() -> None:
    for callers in range(1, SIZE):
        if callers > RANK:
            assert mc.check_buffers_match([np.zeros(3)], 1) == -1
        values = own_gradient(callers)
        mc.average(values)
        assert (values == mean_of_step(callers)).all()
    assert mc.check_buffers_match([np.zeros(3)], 1) == 0


@check
def last_finalize_may_come_more_than_once() -> None:
    mc.config_team(1, 0, 0, 9)
    mc.gradients([own_gradient(1)], 1)  # whose average nobody will ask for
    mc.finalize()
    mc.finalize()
    assert "none after the shutdown" in error_of(RuntimeError, mc.barrier)
    assert "cannot start again" not in error_of(RuntimeError, mc.gradients, [own_gradient(1)], 0)
    assert mc.get_rank() == RANK


if __name__ == "__main__":
    for function in CHECKS:
        try:
            function()
        except Exception:
            say(f"{function.__name__}: failed")
            traceback.print_exc()
            sys.exit(1)
        say(f"{function.__name__}: ok")
