"""Makes an unchanged TF1-style script train on all ranks: optimizers, initialisers, sessions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import tensorflow as tf  # noqa: TID253
from tensorflow.python.client import session as session_module  # noqa: TID253
from tensorflow.python.ops import (  # noqa: TID253
    ref_variable,
    resource_variable_ops,
)
from tensorflow.python.training import optimizer as optimizer_module  # noqa: TID253
from tensorflow.python.training import session_manager  # noqa: TID253
from tensorflow.python.training.experimental import (  # noqa: TID253
    loss_scale_optimizer as loss_scale_module,
)

from ddl_ops import (
    equal_weights,
    lifecycle,
    preemption,
    session_starts,
    tf1_keras,
    weight_notes,
)
from ddl_ops.collectives import barrier, bcast
from ddl_ops.environment import PLACEMENT, checkpoint_folder, sees_all_gpus
from ddl_ops.gradients import averaged_by_both, grads_reduce, note_gradients
from ddl_ops.loader import COLLECTIVES, REDUCTIONS
from ddl_ops.session_runs import Steps

_installed = False
# The attribute in which a variable keeps what `initializer` has made, and from which op.
_START = "_ddl_start"
# ... and which it has while it is described.
_DESCRIBED = "_ddl_described"


def install() -> None:
    """Puts the hooks in place, once. ddl must be initialised."""
    global _installed
    if _installed:
        return
    _installed = True
    _hook_optimizers()
    tf1_keras.hook_optimizers()
    hook_initialisers()
    use_one_gpu()
    _hook_runs()
    _hook_sessions()
    if PLACEMENT.size > 1:
        tf1_keras.hook_fits(session_starts.begin_anew)


@functools.cache
def _hook_sessions() -> None:
    if PLACEMENT.size > 1:
        _hook_restoring()
        session_starts.hook_runs()


def _hook_restoring() -> None:
    """Has ranks agree whether a session begins with what was saved.

    One that restores its variables runs no initialisers, in which the others would wait for it: so
    where rank 0 alone is given the folder, in the next try.
    """
    manager = session_manager.SessionManager
    prepare = manager.prepare_session
    signature = inspect.signature(prepare)
    waiting = Steps(COLLECTIVES)

    def waits(graph: Any, fetches: Any) -> bool:
        # Graphs of other threads are told apart by their names, and the threads need not be.
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            return waiting.is_step(graph, fetches)
        except (KeyError, TypeError, ValueError):  # no fetches, of which the run itself says so
            return False

    def meet(where: str) -> None:
        barrier(
            where,
            "Give all ranks the same `checkpoint_dir` to restore from, and let rank 0 alone save.",
        )

    @functools.wraps(prepare)
    def prepare_alike(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not waits(self._graph, given.get("init_op")):
            return prepare(self, *args, **kwargs)
        if not _restores(given):
            meet("a session that begins anew")
            return prepare(self, *args, **kwargs)
        session = prepare(self, *args, **kwargs)
        run = session.run

        def run_first(fetches: Any, *args: Any, **kwargs: Any) -> Any:
            # Not before: rank 0 may have a session alone, as to evaluate, that waits for nobody.
            if waits(session.graph, fetches):
                vars(session).pop("run", None)
                meet("a session that goes on from a checkpoint")
            return run(fetches, *args, **kwargs)

        session.run = run_first
        return session

    manager.prepare_session = prepare_alike


def _restores(given: Mapping[str, Any]) -> bool:
    """Whether prepare_session(), given these, finds something to restore."""
    if not given.get("saver"):
        return False
    if given.get("checkpoint_filename_with_path"):
        return True
    folder = given.get("checkpoint_dir")
    state = tf.compat.v1.train.get_checkpoint_state(folder) if folder else None
    return bool(state and state.model_checkpoint_path)


def _hook_runs() -> None:
    """Has each run of a session that reduces note the weights, where this process leaves notes."""
    path = weight_notes.place()
    if path is None:
        return
    notes, steps = weight_notes.WeightNotes(path), Steps(REDUCTIONS)
    base = session_module.BaseSession
    run = base.run
    seen: dict[Any, int] = {}  # of each graph, the last step

    def note(session: Any, step: int) -> None:
        variables = session.graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
        if variables:
            names = [variable.op.name for variable in variables]
            notes.note(step, names, (run(session, one) for one in variables))

    def counted(session: Any, counter: Any, otherwise: int) -> int:
        try:
            return otherwise if counter is None else int(run(session, counter))
        except tf.errors.OpError as error:
            notes.give_up(f"the global step cannot be read: {error.message}")
            return otherwise

    @functools.wraps(run)
    def run_noted(self: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            is_step = steps.is_step(self.graph, fetches)
        except (KeyError, TypeError, ValueError):  # no fetches, of which the run itself says so
            is_step = False
        if not is_step:
            return run(self, fetches, *args, **kwargs)
        counter = tf.compat.v1.train.get_global_step(self.graph)
        if self.graph not in seen:
            seen[self.graph] = counted(self, counter, 0)
            note(self, seen[self.graph])
        done = run(self, fetches, *args, **kwargs)
        before = seen[self.graph]
        step = counted(self, counter, before + 1)
        if weight_notes.is_due(step, before):
            note(self, step)
        seen[self.graph] = step
        return done

    base.run = run_noted


def _hook_optimizers() -> None:
    # TensorFlow's own end here; those that wrap another call the inner one.
    base = optimizer_module.Optimizer
    base.apply_gradients = _reducing(base.apply_gradients)
    _hook_subclasses(base)

    def hook(cls: type, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _hook_own(cls)

    base.__init_subclass__ = classmethod(hook)
    _hook_loss_scaling()


def _hook_subclasses(kind: type) -> None:
    below: list[type] = kind.__subclasses__()
    for one in below:
        _hook_own(one)
        _hook_subclasses(one)


def _hook_own(kind: type) -> None:
    """An optimizer of the script's that applies gradients by itself, as BERT's does.

    One that hands them on, changed perhaps, is left: they are averaged where they arrive.
    """
    owner = next(one for one in kind.__mro__ if "apply_gradients" in vars(one))
    if owner is not kind and issubclass(owner, optimizer_module.Optimizer):
        return  # it has been looked at itself
    own = vars(owner)["apply_gradients"]
    code = getattr(inspect.unwrap(own), "__code__", None)
    if code is not None and not _names(code, "apply_gradients"):
        kind.apply_gradients = _reducing(own)  # type: ignore[attr-defined]


def _names(code: CodeType, name: str) -> bool:
    """Whether a function, or one within it, names an attribute."""
    within = (one for one in code.co_consts if isinstance(one, CodeType))
    return name in code.co_names or any(_names(one, name) for one in within)


def _reducing(apply_gradients: Any) -> Callable[..., Any]:
    @functools.wraps(apply_gradients)
    def apply_reduced(self: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if (other := averaged_by_both(g for g, _ in pairs)) and PLACEMENT.rank == 0:
            print(
                f"ddl: rank 0: {type(self).__name__} gets gradients that `import ddl` averages, in "
                f"a graph that calls {other}. If these are its averages, changed since, they are "
                "averaged twice to no effect: remove `import ddl`.",
                file=sys.stderr,
            )
        return apply_gradients(self, _reduced(pairs), *args, **kwargs)

    return apply_reduced


def _reduced(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    equal_weights.start_equal([variable for _, variable in pairs])  # eager: no initialiser runs
    reduced = grads_reduce(pairs)
    session_starts.note_trained(reduced)
    return reduced


def _hook_loss_scaling() -> None:
    # It skips an update whose gradients overflow. Ranks must decide that on the average, in which
    # the overflow of one is that of all, or some would wait for the others.
    kind = loss_scale_module.MixedPrecisionLossScaleOptimizer
    apply_gradients = kind.apply_gradients

    @functools.wraps(apply_gradients)
    def apply_reduced(
        self: Any, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> Any:
        return apply_gradients(self, _reduced(list(grads_and_vars)), global_step, name)

    kind.apply_gradients = apply_reduced


def join() -> None:
    """For front-ends whose scripts hook their optimizers: starts communication and equal starts.

    Each happens once; nothing where no launcher started this process.
    """
    if not PLACEMENT.launched:
        return
    if not lifecycle.initialised():
        lifecycle.init("mpi_collectives", by_import=True)
    note_gradients()
    hook_initialisers()
    _hook_sessions()


@functools.cache
def hook_initialisers() -> None:
    """Lets the initialiser of every variable end with rank 0's value."""
    # Where variables keep it: variables_initializer() and all that is above it ask each variable.
    for kind in (ref_variable.RefVariable, resource_variable_ops.BaseResourceVariable):
        kind.initializer = property(equal_start(kind.initializer.fget))
        kind.to_proto = described_by_itself(kind.to_proto)


def equal_start(own_initializer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A variable's `initializer` whose op also assigns rank 0's value. It is a collective.

    Local variables keep their own. So do those that are neither trained nor in a collection of the
    model's, which may hold a rank's data; and strings, which are no weights.
    """

    @functools.wraps(own_initializer)
    def initializer(variable: Any) -> Any:
        own = own_initializer(variable)
        if own is None or own.graph.finalized or own.graph.building_function:
            return own
        if hasattr(variable, _DESCRIBED):
            return own
        made_from, made = getattr(variable, _START, (None, None))
        if made_from is own:
            return made
        if variable.dtype.base_dtype == tf.string or not session_starts.is_of_model(
            variable, own.graph
        ):
            return own
        # The scope keeps the names alike on all ranks, whoever else has asked for initialisers.
        with (
            own.graph.as_default(),
            tf.control_dependencies(None),
            tf.compat.v1.name_scope(f"ddl_start/{variable.op.name}/"),
        ):
            with tf.control_dependencies([own]):
                value = bcast(variable.read_value())
            # An assignment itself, not a group: Variable.load() feeds its second input, and then
            # neither `own` nor the other ranks are asked.
            made = variable.assign(value, read_value=False)
        setattr(variable, _START, (own, made))
        return made

    return initializer


def described_by_itself(to_proto: Callable[..., Any]) -> Callable[..., Any]:
    """A variable's `to_proto` that names the initialiser which the variable has by itself.

    A graph that is exported describes its variables after its ops: what is made then is not in it.
    """

    @functools.wraps(to_proto)
    def described(variable: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(variable, _DESCRIBED, True)
        try:
            return to_proto(variable, *args, **kwargs)
        finally:
            delattr(variable, _DESCRIBED)

    return described


class EpochHook(tf.compat.v1.train.SessionRunHook):
    """For hooks= of a MonitoredTrainingSession or an Estimator: ranks begin and end steps together.

    One session is one epoch, and each run that holds collectives is a step. Where one rank begins a
    step while another ends its session, both raise InvalidArgumentError, so that steps of different
    epochs are never averaged. Other runs, as those of rank 0 alone, do not count.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._steps = 0
        self._known = Steps(COLLECTIVES)

    def begin(self) -> None:
        """A session begins."""
        self._epoch += 1
        self._steps = 0
        self._known = Steps(COLLECTIVES)

    def before_run(self, run_context: Any) -> None:
        """It is about to run something."""
        if self._known.is_one(run_context):
            self._steps += 1
            self._meet(f"step {self._steps} of epoch {self._epoch}")

    def end(self, session: Any) -> None:
        """It ends, and has raised no error."""
        self._meet(f"the end of epoch {self._epoch} after {self._steps} steps")

    def _meet(self, where: str) -> None:
        # Of its own: the executor of a graph may wait for any collective as long as it likes.
        if PLACEMENT.launched:
            barrier(
                where,
                "Give all ranks the same number of steps in each epoch: dataset.take(), or "
                "StopAtStepHook.",
            )


class PreemptionHook(tf.compat.v1.train.SessionRunHook):
    """For hooks= of a MonitoredTrainingSession or an Estimator: saves where ranks are asked to end.

    After the run at whose end any rank has been asked, rank 0 saves `model.ckpt-<global step>`,
    which tf.train.latest_checkpoint finds, and all ranks end. Each run that holds collectives is a
    step; place it after EpochHook.

    Args:
        folder: to save in; None: CHECKPOINT_DIR.

    Raises ValueError if there is neither.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        place = folder or checkpoint_folder("PreemptionHook")
        self._prefix = os.path.join(os.fspath(place), "model.ckpt")
        self._saver: Any = None
        self._steps = Steps(COLLECTIVES)

    def begin(self) -> None:
        """A session begins, and its graph can still be added to."""
        self._steps = Steps(COLLECTIVES)
        self._saver = tf.compat.v1.train.Saver()
        self._global_step = tf.compat.v1.train.get_or_create_global_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Its variables have their values."""

        def save(step: int, saver: int) -> None:
            if PLACEMENT.rank == saver:
                os.makedirs(os.path.dirname(self._prefix), exist_ok=True)
                self._saver.save(session, self._prefix, step)

        preemption.save_by(save)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """It has run something."""
        if not self._steps.is_one(run_context):
            return
        step = int(run_context.session.run(self._global_step))
        if preemption.wanted(step, "Let the global step be the same on all ranks."):
            preemption.end(step)


def own_gpu() -> int | None:
    """Which GPU of the host is this rank's: that of its local rank. None without GPUs.

    None also with DDL_GPUS=all, as for a script that shares its work among them itself. Several
    ranks share a GPU if there are fewer GPUs than ranks.
    """
    if sees_all_gpus():
        return None
    count = len(tf.config.list_physical_devices("GPU"))
    return PLACEMENT.local_rank % count if count else None


def use_one_gpu() -> None:
    """Gives this rank its GPU, if the host has GPUs, in TF1 sessions and TF2.

    Memory is taken as it is needed, so that ranks can share one. A choice that the script made
    itself stays, also in sessions: the number that they are told counts all GPUs.
    """
    index = own_gpu()
    if index is None:
        return
    every = tf.config.list_physical_devices("GPU")
    if tf.config.get_visible_devices("GPU") != every:
        return
    try:
        tf.config.set_visible_devices(every[index], "GPU")
        # ValueError: the script has divided the GPU, and said how much memory each part has.
        with contextlib.suppress(ValueError):
            tf.config.experimental.set_memory_growth(every[index], True)
    except RuntimeError:
        print(
            f"ddl: rank {PLACEMENT.rank}: TensorFlow has opened all GPUs of this host before "
            "`import ddl`, and the rank trains on the first. Import ddl before anything runs.",
            file=sys.stderr,
        )
        return
    base = session_module.BaseSession
    original = base.__init__

    @functools.wraps(original)
    def init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        original(self, target, graph, session_config(config, index))

    base.__init__ = init


def session_config(config: Any, gpu: int) -> Any:
    """A copy of the ConfigProto `config` (or a new one) that shows only `gpu`.

    A choice that the script made itself stays.
    """
    chosen = tf.compat.v1.ConfigProto()
    if config is not None:
        chosen.CopyFrom(config)
    chosen.gpu_options.allow_growth = True
    if not chosen.gpu_options.visible_device_list:
        chosen.gpu_options.visible_device_list = str(gpu)
    return chosen
