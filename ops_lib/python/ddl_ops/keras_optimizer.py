"""Keras 3 optimizers that average gradients over the ranks."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras  # noqa: TID253
import tensorflow as tf  # noqa: TID253

from ddl_ops import averaging
from ddl_ops.arrays import have_joined, say, times_joined
from ddl_ops.collectives import has_broadcast, without_scope
from ddl_ops.environment import PLACEMENT, child_of_rank
from ddl_ops.equal_settings import require_equal_settings
from ddl_ops.equal_weights import require_equal, start_equal
from ddl_ops.gradients import reduce_gradients, was_reduced, with_each_row_once
from ddl_ops.lifecycle import initialised
from ddl_ops.program_order import stream

# On a distributed optimizer.
_MARK = "_ddl_distributed"
# On one that has reduced, and whose variables the ranks have begun alike with.
_STARTED = "_ddl_started"
# On one with which a fit() has begun that makes the weights equal by itself.
_FITTED = "_ddl_fitted"
# On one whose gradients the loss scaling around it has reduced.
_REDUCED_OUTSIDE = "_ddl_reduced_outside"
# On one that has applied gradients which nobody averaged.
_APPLIED_ALONE = "_ddl_applied_alone"
# On one with which something else has averaged during fit().
_AVERAGES = "_ddl_averages"
# On a callback that gives all ranks the same weights when fit() begins.
BROADCASTS = "_ddl_broadcasts"
# On one of ours: whether the ranks compare their weights when it is told of the training's end;
# fit() does so later, when all callbacks have been. Scripts for Horovod keep some apart.
COMPARES = "_ddl_compares"
# On one with which ranks join at the end of an epoch: what lets this rank join.
JOINS = "_ddl_joins"
# On one that another front-end has distributed: its function of gradients and variables.
_REDUCE = "_ddl_reduce"
# On a distributed one: how often the ranks had joined when it was made.
_JOINED_BEFORE = "_ddl_joined_before"
# On a distributed one: what its gradients are called.
_NAME = "_ddl_name_of_gradients"
# Of those so called so far, by the end of the name.
_numbers: collections.Counter[str] = collections.Counter()
_numbers_lock = threading.Lock()
# `within`: whether the thread is in the apply() of a distributed optimizer.
_applying = threading.local()


# Whose callbacks are known to broadcast, or not to.
_KNOWN = ("keras", "ddl_ops", "horovod")


def distribute(
    optimizer: keras.optimizers.Optimizer, backward_passes_per_step: int = 1
) -> keras.optimizers.Optimizer:
    """Makes `optimizer` average gradients over the ranks before each update, and returns it.

    It stays an object of its own class, so a model that is saved with it loads where ddl is not
    installed (and trains alone there). Works in fit(), in tf.functions and eagerly. A copy
    (copy.deepcopy, or from_config of its get_config) is distributed too; an optimizer that is
    loaded with a model is not. Ranks that make several make them in the same order. Outside mpirun
    it changes nothing else than accumulation.

    Args:
        optimizer: may be a LossScaleOptimizer, or be put into one: ranks skip a step together.
        backward_passes_per_step: updates the weights every so many calls, by the mean of their
            gradients: the optimizer's gradient_accumulation_steps. Gradients are accumulated first
            and reduced once for each update; with loss scaling, whose decision needs those of all
            ranks, in each call.

    Raises ValueError if it is distributed already or cannot accumulate so, TypeError if it is no
    Keras optimizer, RuntimeError under mpirun before ddl.init().
    """
    _distribute(optimizer, backward_passes_per_step)
    setattr(optimizer, _JOINED_BEFORE, times_joined())
    if PLACEMENT.size > 1:
        # Here ranks are in the same order: one without data comes later to its first step.
        with contextlib.suppress(RuntimeError):  # a thread that ranks cannot tell from others
            thread = stream("DistributedOptimizer")
            setattr(optimizer, _NAME, _next_name(f"_made_in_{thread}" if thread else ""))
    return optimizer


def _distribute(optimizer: keras.optimizers.Optimizer, backward_passes_per_step: int = 1) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}. "
            "Optimizers of tf.compat.v1.train need no wrapping: import ddl with DDL_OPTIONS set."
        )
    if is_distributed(optimizer):
        raise ValueError(
            f"The optimizer {optimizer.name!r} is distributed already: wrap it once, or gradients "
            "would be averaged twice."
        )
    if PLACEMENT.launched and not initialised() and not child_of_rank():
        raise RuntimeError("DistributedOptimizer before ddl.init(): call ddl.init() first.")
    if backward_passes_per_step != 1:
        _accumulate(optimizer, backward_passes_per_step)
    _redirect(optimizer)
    _hook_from_config(_owner(type(optimizer), "from_config"))
    _hook_loss_scaling()
    hook_compile()


def mark_distributed(
    optimizer: Any, reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
) -> None:
    """Another front-end has made `optimizer` combine gradients over the ranks in its apply().

    Loss scaling around it asks `reduce` for that; ranks begin as the script says.
    """
    setattr(optimizer, _MARK, True)
    setattr(optimizer, _REDUCE, reduce)
    _distributed_after_all(optimizer)
    if keras.__version__.startswith("3."):  # else, in TensorFlow 1 mode, it is Keras 2
        _hook_loss_scaling()
        hook_compile()


def reduced_outside(optimizer: Any) -> bool:
    """Whether the loss scaling around it has reduced what it is given now."""
    return hasattr(optimizer, _REDUCED_OUTSIDE)


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer`, or the one within its loss scaling, averages over the ranks."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return hasattr(optimizer, _MARK) or hasattr(inner, _MARK)


def waiting_gradients(optimizer: Any) -> list[Any]:
    """The variables in which this rank adds up gradients of its own until they are averaged.

    Within loss scaling, and of several optimizers in one, those of each pass are averaged at once:
    they are not a rank's own.
    """
    if not hasattr(optimizer, _MARK) or not optimizer.gradient_accumulation_steps:
        return []
    found = getattr(optimizer, "_accumulated_gradients", [])
    return [variable for variable in found if variable is not None]


def _accumulate(optimizer: Any, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"backward_passes_per_step is {steps}. Pass 1 or more.")
    several = isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))
    if several or hasattr(optimizer, "inner_optimizer"):
        within = "each optimizer within it" if several else "the optimizer within it"
        raise ValueError(
            f"A {type(optimizer).__name__} does not accumulate gradients. Give {within} "
            f"gradient_accumulation_steps={steps}."
        )
    if optimizer.built or optimizer.gradient_accumulation_steps:
        state = "has variables already" if optimizer.built else "accumulates gradients already"
        raise ValueError(
            f"backward_passes_per_step={steps}, but the optimizer {optimizer.name!r} {state}. Make "
            f"it with gradient_accumulation_steps={steps}."
        )
    optimizer.gradient_accumulation_steps = steps


class _DistributedConfig(dict[str, Any]):
    """get_config() of a distributed optimizer. Saved, it is a dict as any other."""


def _redirect(optimizer: Any) -> None:
    # On the object, not in a subclass: Keras writes an optimizer's class into saved models.
    apply, clip, get_config = optimizer.apply, optimizer._clip_gradients, optimizer.get_config
    accumulated: list[bool] = []  # of each gradient of a call, whether it is one

    @functools.wraps(apply)
    def apply_reduced(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if hasattr(optimizer, _REDUCED_OUTSIDE):
            return apply(grads, trainable_variables)
        trainable_variables = _started_equal(optimizer, trainable_variables)
        if optimizer.gradient_accumulation_steps:
            # clip_reduced() reduces what is accumulated. Some are no gradients but new values
            # (those of float8), which are assigned in each call.
            variables = list(trainable_variables or optimizer._trainable_variables)
            values = [
                grad if optimizer._overwrite_variable_with_gradient(variable) else None
                for grad, variable in zip(grads, variables, strict=True)
            ]
            if any(value is not None for value in values):
                values = _reduced(optimizer, values)
            accumulated[:] = [
                grad is not None and value is None
                for grad, value in zip(grads, values, strict=True)
            ]
            grads = [
                grad if value is None else value for grad, value in zip(grads, values, strict=True)
            ]
        else:
            grads = _reduced(optimizer, grads)
        with within_apply():
            return apply(grads, trainable_variables)

    @functools.wraps(clip)
    def clip_reduced(grads: Sequence[Any]) -> Any:
        # The first that Keras does with accumulated gradients, and only when it applies them.
        if optimizer.gradient_accumulation_steps and not hasattr(optimizer, _REDUCED_OUTSIDE):
            # Keras has left out those that are None, on which the ranks have to agree.
            given = iter(grads)
            with without_scope():
                reduced = _reduced(optimizer, [next(given) if one else None for one in accumulated])
            grads = [grad for grad in reduced if grad is not None]
        return clip(grads)

    def copied(memo: dict[int, Any]) -> Any:
        del memo
        build, arguments = optimizer.__reduce__()
        made = build(*arguments)
        _distribute(made)
        return made

    setattr(optimizer, _MARK, True)
    _distributed_after_all(optimizer)
    optimizer.apply = apply_reduced
    optimizer._clip_gradients = clip_reduced
    optimizer.get_config = lambda: _DistributedConfig(get_config())
    optimizer.__deepcopy__ = copied


def _started_equal(optimizer: Any, trainable_variables: Any) -> Any:
    """The variables, as a list if there are any: all ranks begin alike with them and its states."""
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if not hasattr(optimizer, _STARTED):
        trained = trainable_variables or getattr(optimizer, "_trainable_variables", [])
        # Once ranks have joined since it was made, one that had no data may begin alone.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        joins = getattr(optimizer, _JOINED_BEFORE, getattr(inner, _JOINED_BEFORE, 0))
        since = 0 < joins == times_joined()
        if have_joined() and not since:
            setattr(optimizer, _STARTED, True)
        elif start_equal(trained, begun=not hasattr(optimizer, _FITTED), since_join=since):
            states = _states(optimizer, trained)
            start_equal(
                states,
                since_join=since,
                what="states of the optimizer",
                compare_first=lambda: require_equal_settings([optimizer]),
            )
            setattr(optimizer, _STARTED, True)
    return trainable_variables


def _states(optimizer: Any, trained: Sequence[Any]) -> list[Any]:
    """What it has beside gradients that wait. It is built: rank 0 may have loaded one that is."""
    with tf.init_scope():
        if PLACEMENT.size == 1 or not tf.executing_eagerly():
            return []
        if not optimizer.built and trained:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(trained)
    own = {id(one) for one in waiting_gradients(optimizer)}
    return [one for one in optimizer.variables if id(one) not in own]


def _reduced(optimizer: Any, grads: Sequence[Any]) -> list[Any]:
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
    reduced = reduce_gradients(
        list(grads), name=_name_of_gradients(optimizer), step=step, rate=_rate(optimizer)
    )
    return [with_each_row_once(grad) for grad in reduced]


def _rate(optimizer: Any) -> tf.Tensor | None:
    """The learning rate, float32, scalar: weights that learn at different ones drift apart.

    None where it has none, as one of several optimizers, or that is a function of the script's,
    which need not give the same when it is called once more. A schedule is one of the step alone.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # loss scaling's own is 0
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = optimizer.learning_rate
    elif not isinstance(rate, keras.Variable) or not hasattr(optimizer, "learning_rate"):
        return None
    rate = tf.cast(tf.convert_to_tensor(rate), tf.float32)
    return rate if rate.shape == () else None


def _name_of_gradients(optimizer: Any) -> str:
    """Tells the gradients of one optimizer from those of another of the same shapes.

    A copy, which one rank alone may have made, as to save it, is counted at its first reduction.
    Each thread counts by itself: only in a thread is the order the same on all ranks.
    """
    if PLACEMENT.size == 1:
        return "ddl_gradients"
    if not hasattr(optimizer, _NAME):
        thread = stream("the optimizer's first step")
        setattr(optimizer, _NAME, _next_name(f"_begun_in_{thread or 'main'}"))
    return str(getattr(optimizer, _NAME))


def _next_name(end: str) -> str:
    with _numbers_lock:
        number = _numbers[end]
        _numbers[end] += 1
    if not end and number == 0:
        return "ddl_gradients"
    return f"ddl_gradients_of_optimizer_{number}{re.sub(r'[^A-Za-z0-9_.-]', '_', end)}"


def _owner(kind: type, name: str) -> type:
    """The class that defines what `kind` has under `name`."""
    return next(base for base in kind.__mro__ if name in vars(base))


@functools.cache
def _hook_from_config(owner: Any) -> None:
    from_config: Callable[..., Any] = owner.from_config.__func__

    @functools.wraps(from_config)
    def distributed(cls: type, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        made = from_config(cls, config, *args, **kwargs)
        if isinstance(config, _DistributedConfig) and not is_distributed(made):
            _distribute(made)
        return made

    owner.from_config = classmethod(distributed)


@functools.cache
def _hook_loss_scaling() -> None:
    # It skips an update whose gradients overflow. Ranks must decide that on the average, in which
    # the overflow of one is that of all, or some would wait for the others.
    kind: Any = keras.optimizers.LossScaleOptimizer
    apply = kind.apply

    @functools.wraps(apply)
    def apply_reduced(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        if not hasattr(self.inner_optimizer, _MARK):
            return apply(self, grads, trainable_variables)
        reduce = getattr(self.inner_optimizer, _REDUCE, None)
        if reduce is None:
            trainable_variables = _started_equal(self, trainable_variables)
            reduced = _reduced(self.inner_optimizer, grads)
        else:
            reduced = reduce(
                grads, trainable_variables or self.inner_optimizer._trainable_variables
            )
        with within_apply(), _reduced_outside(self.inner_optimizer):
            return apply(self, reduced, trainable_variables)

    kind.apply = apply_reduced


@contextlib.contextmanager
def _reduced_outside(optimizer: Any) -> Iterator[None]:
    setattr(optimizer, _REDUCED_OUTSIDE, True)
    try:
        yield
    finally:
        delattr(optimizer, _REDUCED_OUTSIDE)


@contextlib.contextmanager
def within_apply() -> Iterator[None]:
    """Inside, what an optimizer applies comes from a distributed one."""
    before = getattr(_applying, "within", False)
    _applying.within = True
    try:
        yield
    finally:
        _applying.within = before


@functools.cache
def notice_training_apart() -> None:
    """Lets Keras note optimizers that do not average: in fit(), with a warning once, on rank 0, and
    in loops of the script's own, which may average by themselves.
    """
    _hook_fit()
    _hook_apply()


def _hook_apply() -> None:
    owner: Any = _owner(keras.optimizers.Optimizer, "apply")
    apply: Callable[..., Any] = owner.apply

    @functools.wraps(apply)
    def apply_noted(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        # What a distributed one does within may be to apply what it has computed from averages.
        alone = not getattr(_applying, "within", False) and not is_distributed(self)
        if alone and any(grad is not None and not was_reduced(grad) for grad in grads):
            _note_applied_alone(self)
        return apply(self, grads, trainable_variables)

    owner.apply = apply_noted


def _note_applied_alone(optimizer: Any) -> None:
    if hasattr(optimizer, _APPLIED_ALONE) or child_of_rank():
        return
    setattr(optimizer, _APPLIED_ALONE, True)
    averaging.applied_alone(+1)
    # One that is fitted with has been warned of; and who averages tensors may know better.
    if PLACEMENT.rank == 0 and averaging.stands_alone():
        _warn_apart(optimizer.name)


def _distributed_after_all(optimizer: Any) -> None:
    """What it applied before made its slots, or trained what all ranks are given now."""
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if hasattr(one, _APPLIED_ALONE):
            delattr(one, _APPLIED_ALONE)
            averaging.applied_alone(-1)


def _hook_fit() -> None:
    owner: Any = _owner(keras.Model, "fit")
    fit: Callable[..., Any] = owner.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        if child_of_rank():
            return fit(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs)
        given.arguments["callbacks"] = _join_first(given.arguments.get("callbacks"))
        _warn_of_shared_files(_listed(given.arguments["callbacks"]))
        if not _trains_apart(self):
            callbacks = _listed(given.arguments["callbacks"])
            begins_alike = any(hasattr(one, BROADCASTS) for one in callbacks)
            own_step = averages_by_itself(self)  # which may mean its ranks to differ for a while
            if not begins_alike and not own_step:
                _look_for_broadcast(getattr(self, "optimizer", None), callbacks)
            starts_equal = _starts_equal(getattr(self, "optimizer", None))
            if starts_equal and not own_step and not begins_alike:
                start_equal(self.trainable_variables, anew=True)
                begins_alike = bool(self.trainable_variables)  # one not built begins with its step
            if starts_equal and begins_alike:
                setattr(self.optimizer, _FITTED, True)
            compare = [one for one in callbacks if getattr(one, COMPARES, False)]
            for one in compare:
                setattr(one, COMPARES, False)
            try:
                history = fit(*given.args, **given.kwargs)
            finally:
                for one in compare:
                    setattr(one, COMPARES, True)
            if compare and not own_step:
                require_equal(self.trainable_variables)  # with what callbacks set at the end
            return history
        if PLACEMENT.rank == 0:
            _warn_apart(self.optimizer.name)
        optimizer, before = self.optimizer, averaging.times_averaged()
        try:
            return fit(*given.args, **given.kwargs)
        finally:
            # An apply() of the script's own, or a callback, may average; a graph is made once.
            if averaging.times_averaged() > before:
                setattr(optimizer, _AVERAGES, True)
            else:
                averaging.fitted_alone()

    owner.fit = fit_together


def _starts_equal(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return is_distributed(optimizer) and not hasattr(inner, _REDUCE)


def _look_for_broadcast(optimizer: Any, callbacks: Sequence[Any]) -> None:
    """Warns of a fit() by another front-end's optimizer that may begin with different weights.

    Whose ranks need not begin together, so they cannot compare. No warning where the script has
    broadcast anything before, or has callbacks of its own, which may.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = any(type(one).__module__.partition(".")[0] not in _KNOWN for one in callbacks)
    if PLACEMENT.rank == 0 and hasattr(inner, _REDUCE) and not own and not has_broadcast():
        _warn_of_no_broadcast()


@functools.cache
def _warn_of_no_broadcast() -> None:
    say(
        "WARNING: fit() begins, and no rank has broadcast its weights: unless all have loaded the "
        "same or set one seed, they train different models. Give fit() "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)."
    )


def _listed(callbacks: Any) -> list[Any]:
    """Those given to fit(); of a CallbackList the list that it calls."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return [one for one in keras.tree.flatten(callbacks) if one is not None]  # as Keras does


def is_own_path(path: str) -> bool:
    """Whether a path has the number of this rank, or that within its host, so is perhaps its own.

    Those of the job's folders are no rank's, such as a date in the name of a run.
    """
    path = os.path.abspath(path)
    places = [os.getcwd(), *map(os.environ.get, ("CHECKPOINT_DIR", "RESULT_DIR"))]
    folders = [os.path.join(os.path.abspath(place), "") for place in places if place]
    start = max((len(one) for one in folders if path.startswith(one)), default=0)
    own = {PLACEMENT.rank, PLACEMENT.local_rank} - {0}
    if PLACEMENT.rank > 1:
        own -= {1}  # as in run1
    inside = re.sub("{[^}]*}", "", path[start:])  # such as {epoch:02d}
    return any(int(number) in own for number in re.findall("[0-9]+", inside))


def _warn_of_shared_files(callbacks: Sequence[Any]) -> None:
    """Of Keras's own callbacks that save, if they do so on the last rank as well.

    Its number is the one that a path has least often for another reason.
    """
    if PLACEMENT.size == 1 or PLACEMENT.rank != PLACEMENT.size - 1:
        return
    kinds = {
        keras.callbacks.ModelCheckpoint: "filepath",
        keras.callbacks.BackupAndRestore: "backup_dir",
    }
    for one in callbacks:
        if type(one) in kinds:
            place = str(getattr(one, kinds[type(one)]))
            if not is_own_path(place):
                _warn_of_shared_file(type(one).__name__, place)


@functools.cache  # once for each file
def _warn_of_shared_file(callback: str, place: str) -> None:
    cure = (
        "ddl.keras.CheckpointCallback in its place, or give it to rank 0 alone"
        if callback == "ModelCheckpoint"
        else "ddl.keras.PreemptionCallback in its place, or give each rank a folder of its own"
    )
    say(
        f"WARNING: {callback} saves {place} on this rank, too. Ranks that write one file at the "
        f"same time damage it. If others save there, take {cure}."
    )


def _join_first(callbacks: Any) -> Any:
    """Lets ranks join at the end of an epoch before any callback looks at their weights.

    A CallbackList is changed. The JoinCallback stays where it is for all else that it does: what
    one rank alone restores when the training begins has to be there before it broadcasts.
    """
    listed = _listed(callbacks)
    joins = [join for one in listed if (join := getattr(one, JOINS, None))]
    if not joins or hasattr(listed[0], JOINS):
        return callbacks
    first = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: joins[0]())
    setattr(first, JOINS, joins[0])
    listed.insert(0, first)
    return callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else listed


def averages_by_itself(model: Any) -> bool:
    """Whether the model has a train_step() of its own, which may average without the optimizer."""
    return type(model).train_step is not keras.Model.train_step


def _trains_apart(model: Any) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return not (
        optimizer is None
        or averages_by_itself(model)
        or is_distributed(optimizer)
        or hasattr(optimizer, _AVERAGES)
    )


@functools.cache
def _warn_apart(optimizer: str) -> None:
    print(
        f"ddl: rank 0: WARNING: the optimizer {optimizer!r} does not average gradients: each of "
        f"the {PLACEMENT.size} ranks trains a model of its own. Wrap it, also one that load_model "
        "has brought: ddl.keras.DistributedOptimizer(optimizer).",
        file=sys.stderr,
        flush=True,
    )


@functools.cache
def hook_compile() -> None:
    """Leaves XLA out of models of a rank: it cannot compile what communicates.

    That may be the optimizer, a train_step(), a layer or a metric, so none is compiled where
    nobody asks for it; and with a distributed optimizer none at all.
    """
    # Where it is defined: Keras takes a compile() that a class overrides for the user's own, and
    # then does not compile models that it loads.
    owner: Any = _owner(keras.Model, "compile")
    compile_original: Callable[..., Any] = owner.compile
    signature = inspect.signature(compile_original)

    @functools.wraps(compile_original)
    def compile_distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        wanted = given.arguments.get("jit_compile", "auto")
        if wanted == "auto" and PLACEMENT.launched:
            given.arguments["jit_compile"] = False  # "auto" is True where there is a GPU
        compiled = compile_original(*given.args, **given.kwargs)
        if is_distributed(getattr(self, "optimizer", None)) and self.jit_compile:
            if wanted is True:
                warnings.warn(
                    "jit_compile=True is turned off: XLA cannot compile the reduction of gradients "
                    "over ranks. Compile the layers instead: tf.function(jit_compile=True).",
                    stacklevel=2,
                )
            self.jit_compile = False
        return compiled

    owner.compile = compile_distributed
