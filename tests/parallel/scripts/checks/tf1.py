"""Graphs and sessions of TensorFlow 1: order, starts, optimizers, sparse gradients."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ddl
import keras
import numpy as np
import tensorflow as tf
from ddl_ops import arrays, collectives
from ddl_ops.loader import operations
from speech import RANK, SIZE
from tf1_ensemble import train_in_threads

from checks import (
    EARLY,
    EARLY_GRAPH,
    EARLY_LOCAL,
    EarlyOptimizer,
    assert_same_everywhere,
    check,
    digest,
    mismatch,
    on_all_ranks,
    v1,
    values,
)


class Delays:
    """Makes tensors of a TF1 graph ready after times that differ by rank, tensor and run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(1000 * seed + RANK)

    def __call__(self, value: tf.Tensor, longest_s: float = 0.003) -> tf.Tensor:
        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(self.random.random() * longest_s)
            return x

        late = v1.py_func(wait, [value], value.dtype)
        late.set_shape(value.shape)
        return late


@check
def tf1_fetches_of_a_train_op_and_the_mean_loss_agree_on_their_order() -> None:
    os.environ["DDL_GROUP_SIZE"] = "8"
    try:
        with tf.Graph().as_default():
            v1.set_random_seed(3)
            inputs, targets = v1.placeholder(tf.float32, [None, 4]), v1.placeholder(tf.float32)
            w, b = v1.get_variable("w", [4, 3]), v1.get_variable("b", [3])
            loss = tf.reduce_mean(tf.square(tf.matmul(inputs, w) + b - targets))
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            mean_loss = collectives.allreduce(loss, name="mean_loss")
            # A second model beside it, as in adversarial training.
            other = v1.get_variable("other", [3], initializer=v1.zeros_initializer())
            distance = tf.reduce_sum(tf.square(other - tf.reduce_mean(targets)))
            train_other = v1.train.AdamOptimizer(0.01).minimize(distance, var_list=[other])
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                own, means = [], []
                for step in range(40):
                    generator = np.random.RandomState(step * SIZE + RANK)
                    feed = {inputs: generator.randn(6, 4), targets: generator.randn(6, 3)}
                    fetches = [train, train_other, mean_loss, loss]
                    _, _, mean, mine = session.run(fetches, feed)
                    own.append(mine)
                    means.append(mean)
                weights = session.run([w, b, other])
    finally:
        del os.environ["DDL_GROUP_SIZE"]
    assert_same_everywhere(weights)
    np.testing.assert_array_equal(means, ddl.allreduce(np.array(own)))
    assert means[-1] < means[0]


@check
def tf1_loss_scaling_skips_on_all_ranks_together() -> None:
    scaling = v1.mixed_precision
    for dynamic in (True, False):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [])
            weight = v1.get_variable("weight", initializer=1.0)
            global_step = v1.train.get_or_create_global_step()
            inner = v1.train.MomentumOptimizer(0.1, 0.5)
            scale = (
                scaling.DynamicLossScale(initial_loss_scale=2.0**15, increment_period=3)
                if dynamic
                else scaling.FixedLossScale(8.0)
            )
            optimizer = scaling.MixedPrecisionLossScaleOptimizer(inner, scale)
            train = optimizer.minimize(weight * x, global_step)
            session.run(v1.global_variables_initializer())
            seen = []
            for step in range(5):
                overflows = dynamic and step == 1 and RANK == SIZE - 1
                session.run(train, {x: np.inf if overflows else RANK + step})
                seen.append(session.run([weight, scale(), global_step]))
        velocity, want = 0.0, 1.0
        for step in range(5):
            if not (dynamic and step == 1):
                velocity = 0.5 * velocity + (SIZE - 1) / 2 + step
                want -= 0.1 * velocity
            np.testing.assert_allclose(seen[step][0], want, rtol=1e-5)
        assert [scale for _, scale, _ in seen] == (
            [2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**15] if dynamic else [8.0] * 5
        )
        assert seen[-1][2] == (4 if dynamic else 5)


@check
def tf1_sessions_of_different_lengths_are_errors_on_all_ranks() -> None:
    hook = ddl.EpochHook()
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=1.0)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(weight * (RANK + 1.0))
        scaled = weight * tf.cast(collectives.size_op(), tf.float32)

        def run(steps: int) -> None:
            with v1.train.SingularMonitoredSession(hooks=[hook]) as session:
                for step in range(steps):
                    session.run([{"train": train}, weight, train.name])
                    if step == RANK:
                        session.run(scaled)  # this rank alone

        run(3)
        run(2)
        if SIZE > 1:
            message = mismatch(lambda: run(4 if RANK == 0 else 3))
            assert "the end of epoch 3 after 3 steps" in message, message
            assert "step 4 of epoch 3" in message, message
            assert "Give all ranks the same number of steps" in message, message
    assert_same_everywhere([np.ones(2)])


@check(least=2)
def tf1_sessions_that_one_rank_alone_restores_are_errors_on_all_ranks() -> None:
    folder = os.path.join(os.path.dirname(os.environ["DDL_PROGRESS"]), f"{SIZE} restored")
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weight = v1.get_variable("weight", initializer=1.0)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(weight * (RANK + 1.0), step)

        def run(fetches: object, place: str | None) -> object:
            creator = v1.train.ChiefSessionCreator(checkpoint_dir=place)
            with v1.train.MonitoredSession(creator) as session:
                return session.run(fetches)

        mine = folder if RANK == 0 else None
        with v1.train.MonitoredTrainingSession(checkpoint_dir=mine) as session:
            session.run(train)
        ddl.barrier("rank 0 has saved")
        if RANK == 0:
            trained = run(weight, folder)  # waits for nobody
        assert_same_everywhere([run([weight, train], folder)[0]])
        message = mismatch(lambda: run(train, mine))
        assert "a session that goes on from a checkpoint" in message, message
        assert "a session that begins anew" in message, message
        assert "Give all ranks the same `checkpoint_dir`" in message, message
        assert RANK or trained < 1.0


@check
def tf1_rank_without_data_joins() -> None:
    counts = [2 + (rank + 1) % SIZE for rank in range(SIZE)]
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=1.0)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(weight * (RANK + 1.0))
        newest = collectives.bcast(weight, root=counts.index(max(counts)))
        session.run(v1.global_variables_initializer())
        for _ in range(counts[RANK]):
            session.run(train)
        assert ddl.join() == counts.index(max(counts))
        want = 1.0
        for step in range(max(counts)):
            present = [rank + 1.0 for rank in range(SIZE) if counts[rank] > step]
            want -= 0.1 * sum(present) / len(present)
        np.testing.assert_allclose(session.run(newest), want, rtol=1e-5)


@check
def tf1_free_standing_collectives_are_known_by_name() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2])
        delay = Delays(1)
        # Small ones travel with the agreement, large ones after it.
        inputs = [delay(tf.tile(x, [1 if i % 3 else 4000, 1]) + float(i)) for i in range(20)]
        makers = [lambda t: ddl.allreduce(t, average=False), ddl.allgather, ddl.bcast]
        outputs = [makers[i % 3](t) for i, t in enumerate(inputs)]
        for run in range(6):
            parts = [values((3, 2), "float32", rank, run) for rank in range(SIZE)]
            got = session.run(outputs, {x: parts[RANK]})
            for i, output in enumerate(got):
                mine = [np.tile(part, [1 if i % 3 else 4000, 1]) + i for part in parts]
                want = [sum(mine), np.concatenate(mine), mine[0]][i % 3]
                np.testing.assert_array_equal(output, want)


@check
def tf1_inputs_ready_in_opposite_order_on_the_ranks() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        delay = Delays(2)
        inputs: dict[int, tf.Tensor] = {}
        for i in range(6) if RANK % 2 == 0 else reversed(range(6)):
            with tf.control_dependencies(list(inputs.values())):
                inputs[i] = delay(x * (i + 1.0))
        # Raw, as in scripts that load the library themselves; several tensors each.
        sums = [
            operations().all_reduce_n([inputs[i], -inputs[i]], op="sum", name=f"crossed_{i}")
            for i in range(6)
        ]
        for run in range(4):
            got = session.run(sums, {x: RANK + run})
            want = sum(range(SIZE)) + SIZE * run
            assert got == [[want * (i + 1), -want * (i + 1)] for i in range(6)], got


@check
def tf1_iterations_of_a_loop_are_told_apart() -> None:
    def outputs() -> tf.Tensor:
        delay = Delays(4)

        def body(i: tf.Tensor, found: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            mine = delay(tf.cast(10 * i + RANK, tf.float32))
            both = ddl.allreduce(mine, average=False), ddl.allgather([delay(mine)])
            return i + 1, found.write(i, tf.concat([both[0][tf.newaxis], both[1]], 0))

        found = tf.TensorArray(tf.float32, 8, element_shape=[None])
        return tf.while_loop(lambda i, _: i < 8, body, (0, found), parallel_iterations=4)[1].stack()

    want = [
        [10 * i * SIZE + sum(range(SIZE)), *(10 * i + rank for rank in range(SIZE))]
        for i in range(8)
    ]
    for version in (1, 2):
        (v1.disable_control_flow_v2 if version == 1 else v1.enable_control_flow_v2)()
        try:
            with tf.Graph().as_default(), v1.Session() as session:
                got = outputs()
                for _ in range(3):
                    np.testing.assert_array_equal(session.run(got), want)
        finally:
            v1.enable_control_flow_v2()


@check
def tf1_threads_of_a_session_take_turns_with_a_collective() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        delay = Delays(5)
        total_op = ddl.allreduce(delay(tf.constant([1.0, RANK])), average=False)
        other_op = ddl.allgather(delay(tf.constant([RANK])))
        want = [[SIZE, sum(range(SIZE))], list(range(SIZE))]
        turn = threading.Lock()

        def run() -> list[list[float]]:
            with turn:
                return [part.tolist() for part in session.run([total_op, other_op])]

        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run) for _ in range(12)]
        assert [one.result() for one in runs] == [want] * 12


@check(least=2)
def tf1_threads_of_a_session_do_not_run_a_collective_at_once() -> None:
    """They would be paired by chance, as the summaries of a Supervisor."""
    with tf.Graph().as_default(), v1.Session() as session:
        total_op = ddl.allreduce(tf.constant([1.0, RANK]), average=False)
        both = threading.Barrier(2)
        met = v1.py_func(lambda: np.float32(both.wait(60)), [], tf.float32)
        with ThreadPoolExecutor(2) as pool:
            meets = pool.submit(session.run, [met, total_op])
            while not both.n_waiting and not meets.done():
                time.sleep(0.01)
            try:
                session.run(total_op)
            except tf.errors.InvalidArgumentError as error:
                assert f"Two threads of rank {RANK} run AllReduce" in str(error), error
            else:
                raise AssertionError("no error")
            both.wait(60)
            assert meets.result()[1].tolist() == [SIZE, sum(range(SIZE))]


@check
def tf1_graphs_in_threads_are_told_apart_by_variable_scopes() -> None:
    for built_by_threads in (True, False):
        assert train_in_threads(built_by_threads, scoped=True) == [[], []]


@check
def tf1_graphs_of_one_thread_take_turns_and_rank_0_may_have_one_more() -> None:
    def build() -> tuple[v1.Session, tf.Variable, tf.Operation, tf.Operation]:
        with tf.Graph().as_default() as graph:
            w = v1.get_variable("w", initializer=float(RANK))
            train = v1.train.GradientDescentOptimizer(1.0).minimize(w * (RANK + 1.0))
            session = v1.Session(graph=graph)
            init = v1.global_variables_initializer()
        return session, w, train, init

    step = (SIZE + 1) / 2
    models = []
    for _ in range(2):
        if RANK == 0:
            build()[0].close()  # to look at it, say
        models.append(build())
        session, w, train, init = models[-1]
        session.run(init)
        session.run(train)
    for turn in range(3):
        for session, w, train, _ in models:
            session.run(train)
            np.testing.assert_allclose(session.run(w), -step * (turn + 2))
    for session, *_ in models:
        session.close()


def train_tf1(variables: list[tf.Variable], loss: tf.Tensor, x: tf.Tensor) -> list[np.ndarray]:
    step = v1.train.get_or_create_global_step()
    train = v1.train.AdamOptimizer(0.05).minimize(loss, step)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        starts = session.run(variables)
        assert_same_everywhere(starts)
        for i in range(8):
            session.run(train, {x: np.random.RandomState(50 * i + RANK).randn(6, 5)})
        ends = session.run(variables)
        assert session.run(step) == 8
    assert digest(starts) != digest(ends)
    assert_same_everywhere(ends)
    return ends


@check
def tf1_ranks_end_with_equal_weights() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 77)
        x = v1.placeholder(tf.float32, [None, 5])
        w = v1.get_variable("w", [5, 3], use_resource=True)
        b = v1.get_variable("b", [3], initializer=v1.random_normal_initializer())
        unused = v1.get_variable("unused", [2], initializer=v1.random_normal_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - 1.0))
        train_tf1([w, b, unused], loss, x)


class LateOptimizer(EarlyOptimizer):
    """Another of the kind."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        def update(pair):
            return pair[1].assign_sub(pair[0], use_locking=False)

        return tf.group(*map(update, grads_and_vars), name=name)


class Applies:
    """What applies gradients by itself in any optimizer."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return tf.group(*(w.assign(w - g) for g, w in grads_and_vars), name=name)


class MixedIn(Applies, v1.train.AdamOptimizer):
    """It comes with another class."""


class Doubling(EarlyOptimizer):
    """Hands on what it has changed to another's, which averages."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        return super().apply_gradients([(2 * g, w) for g, w in grads_and_vars], *args, **kwargs)


@check
def tf1_optimizers_that_apply_gradients_themselves_average_them() -> None:
    kinds_of = ((EarlyOptimizer, 1), (LateOptimizer, 1), (MixedIn, 1), (Doubling, 2))
    for make, factor, before in [(*one, before) for one in kinds_of for before in (False, True)]:
        optimizer = make()
        with tf.Graph().as_default() as graph:
            w = v1.get_variable("w", [2], initializer=v1.zeros_initializer())
            idle = v1.get_variable("idle", [2], initializer=v1.zeros_initializer())
            pairs = optimizer.compute_gradients(tf.reduce_sum(w) * RANK)
            assert pairs.pop()[1] is idle
            if before:  # and not once more
                pairs = ddl.grads_reduce(pairs)
            train = optimizer.apply_gradients(grads_and_vars=pairs, name="train")
            kinds = [op.type for op in graph.get_operations()]
            assert kinds.count("AllReduceN") == (2 if before and make is Doubling else 1), kinds
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(train)
                np.testing.assert_allclose(session.run(w), [-factor * (SIZE - 1) / 2] * 2)


@check
def tf1_optimizers_in_eager_code_start_equal() -> None:
    arrays._joins.clear()  # of other checks
    scaling = v1.mixed_precision
    makers = (
        lambda: v1.train.GradientDescentOptimizer(0.5),
        EarlyOptimizer,
        lambda: scaling.MixedPrecisionLossScaleOptimizer(
            v1.train.GradientDescentOptimizer(0.5), scaling.FixedLossScale(8.0)
        ),
    )
    for make in makers:
        for wrap in (lambda step: step, tf.function):
            w, optimizer = tf.Variable([RANK + 1.0, 2.0 * RANK]), make()

            @wrap
            def step(w=w, optimizer=optimizer):
                optimizer.minimize(lambda: tf.reduce_sum(w) * RANK, var_list=[w])

            step()
            assert_same_everywhere([w.numpy()])


@check
def tf1_variables_made_before_import_start_equal() -> None:
    with EARLY_GRAPH.as_default():
        x = v1.placeholder(tf.float32, [None, 5])
        late = v1.get_variable("late", [3], initializer=v1.random_normal_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(x, EARLY) + late - 1.0))
        train_tf1([EARLY, late], loss, x)
        with v1.Session() as session:  # a local variable is each rank's own
            session.run(v1.local_variables_initializer())
            assert session.run(EARLY_LOCAL) == float(RANK)


@check
def tf1_late_initialiser_leaves_trained_variables_alone() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 7)
        w = v1.get_variable("w", [4], initializer=v1.random_normal_initializer())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.assign_add(w, tf.ones([4])))
            trained = session.run(w)
            late = v1.get_variable("late", [2], initializer=v1.random_normal_initializer())
            session.run(v1.variables_initializer([late]))
            assert_same_everywhere([session.run(late)])
            np.testing.assert_array_equal(session.run(w), trained)


@check
def tf1_single_initialisers_start_equal() -> None:
    def random_variable(name: str, **options: object) -> tf.Variable:
        return v1.get_variable(name, [3], initializer=v1.random_normal_initializer(), **options)

    for kind in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(RANK + 9)
            first, second, third = (random_variable(n, use_resource=kind) for n in "abc")
            session.run(first.initializer)
            # From rank to rank in another order, which a run of several does not have.
            rest = [second.initializer, third.initializer]
            session.run(rest if RANK % 2 == 0 else rest[::-1])
            starts = session.run([first, second, third])
            assert_same_everywhere(starts)
            assert first.initializer is first.initializer
            local = random_variable("d", collections=[v1.GraphKeys.LOCAL_VARIABLES])
            session.run(local.initializer)
            if SIZE > 1:
                assert len(set(on_all_ranks(digest([session.run(local)])[:60]))) == SIZE
            # Data of each rank, as TensorFlow's documents preload them.
            given = v1.placeholder(tf.float32, [2])
            for kind in (True, False):
                data = v1.Variable(given, trainable=False, collections=[], use_resource=kind)
                session.run(data.initializer, {given: [RANK, RANK]})
                np.testing.assert_array_equal(session.run(data), [RANK, RANK])
            # One rank alone: a variable's load() is no start.
            if RANK == 0:
                first.load([7.0, 8.0, 9.0], session)
            want = [7, 8, 9] if RANK == 0 else starts[0]
            np.testing.assert_array_equal(session.run(first), want)


@check
def tf1_exported_graphs_are_made_after_the_graph_is_finalised() -> None:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        w = v1.get_variable("w", [2])
        session.run(v1.global_variables_initializer())
        late = v1.get_variable("late", [2])
        graph.finalize()
        saved = v1.train.export_meta_graph()
        names = {node.name for node in saved.graph_def.node}
        assert {w.initializer.name, late.initializer.name} <= names


@check
def tf1_monitored_session_starts_equal() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 5)
        w = v1.get_variable("w", [4], initializer=v1.random_normal_initializer())
        v1.train.get_or_create_global_step()
        with v1.train.MonitoredTrainingSession() as session:
            assert_same_everywhere([session.run(w)])


@check
def tf1_groups_sparse_and_missing_gradients() -> None:
    os.environ["DDL_GROUP_SIZE"] = "10"
    try:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(RANK)
            table = v1.get_variable("table", [6, 2])
            rest = [v1.get_variable(f"w{i}", [2 + i], dtype=tf.float32) for i in range(4)]
            half = v1.get_variable("half", [3], dtype=tf.float16)
            rows = tf.gather(table, [RANK % 6, 2])  # other rows on each rank
            loss = tf.reduce_sum(rows) + tf.reduce_sum(tf.cast(half, tf.float32))
            loss += tf.add_n([tf.reduce_sum(w) * (i + 1.0) for i, w in enumerate(rest)])
            idle = v1.get_variable("idle", [2])
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            pairs = optimizer.compute_gradients(loss, [table, *rest, half, idle])
            assert pairs[-1][0] is None
            train = optimizer.apply_gradients(pairs)
            nodes = [op.name for op in graph.get_operations() if op.type == "AllReduceN"]
            # From the end: 5 and 4 elements; 3 and 2; the table's 12 alone; half's 3, by dtype.
            assert len(nodes) == 4, nodes
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                before = session.run([table, *rest, half, idle])
                session.run(train)
                after = session.run([table, *rest, half, idle])
        moved = before[0] - after[0]
        want = np.zeros((6, 2))
        for rank in range(SIZE):
            want[rank % 6] += 1 / SIZE
            want[2] += 1 / SIZE
        np.testing.assert_allclose(moved, want, atol=1e-6)
        for i in range(4):
            np.testing.assert_allclose(before[1 + i] - after[1 + i], i + 1.0, rtol=1e-5)
        np.testing.assert_array_equal(before[-1], after[-1])
        assert_same_everywhere(after)
    finally:
        del os.environ["DDL_GROUP_SIZE"]


@check
def tf1_groups_need_only_their_own_gradients() -> None:
    def ancestors(op: tf.Operation) -> set[str]:
        seen: set[str] = set()
        ops = [op]
        while ops:
            for before in {t.op for t in ops[-1].inputs} | set(ops.pop().control_inputs):
                if before.name not in seen:
                    seen.add(before.name)
                    ops.append(before)
        return seen

    os.environ["DDL_GROUP_SIZE"] = "9"
    try:
        with tf.Graph().as_default() as graph:
            layer = tf.ones([2, 3])
            for i in range(3):
                layer = tf.tanh(tf.matmul(layer, v1.get_variable(f"w{i}", [3, 3])))
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            pairs = optimizer.compute_gradients(tf.reduce_sum(layer))
            optimizer.apply_gradients(pairs)
            groups = [op for op in graph.get_operations() if op.type == "AllReduceN"]
    finally:
        del os.environ["DDL_GROUP_SIZE"]
    assert len(groups) == 3
    # The last layer's first: while it is reduced, the other gradients are still being computed.
    for number, group in enumerate(groups):
        needed = [gradient.op.name in ancestors(group) for gradient, _ in pairs]
        assert needed == [i >= 2 - number for i in range(3)], needed


@check
def tf1_sparse_gradients_may_stay_sparse() -> None:
    def train(**options: bool) -> tuple[list[np.ndarray], list[str], list[bool]]:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(5)
            table = v1.get_variable("table", [7, 2])
            second = v1.get_variable("second", [5, 1])
            bias = v1.get_variable("bias", [2])
            loss = tf.reduce_sum(tf.square(tf.gather(table, [2] * (RANK + 1) + [RANK % 7]) + bias))
            loss += tf.reduce_sum(tf.square(tf.gather(second, [RANK % 5, 3])))
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            pairs = optimizer.compute_gradients(loss, [table, second, bias])
            reduced = ddl.grads_reduce(pairs, **options)
            updates = [v.assign_sub(0.1 * tf.convert_to_tensor(g)) for g, v in reduced]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(updates)
                ends = session.run([table, second, bias])
            ops = [op.type for op in graph.get_operations()]
            return ends, ops, [isinstance(g, tf.IndexedSlices) for g, _ in reduced]

    dense, ops, stayed = train()
    assert "AllGather" not in ops and not any(stayed)
    sparse, ops, stayed = train(sparse_as_dense=False)
    assert ops.count("AllGather") == 4 and ops.count("AllReduceN") == 1
    assert stayed == [True, True, False]
    os.environ["DDL_SPARSE_AS_DENSE"] = "0"
    try:
        by_setting, ops, _ = train()
        assert ops.count("AllGather") == 4
        _, ops, _ = train(sparse_as_dense=True)
        assert "AllGather" not in ops
    finally:
        del os.environ["DDL_SPARSE_AS_DENSE"]
    for a, b, c in zip(dense, sparse, by_setting, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        np.testing.assert_array_equal(b, c)
    assert_same_everywhere(sparse)


@check
def tf1_optimizers_and_keras_take_sparse_gradients() -> None:
    def tf1_adam() -> list[np.ndarray]:
        with tf.Graph().as_default():
            v1.set_random_seed(11)
            table = v1.get_variable("table", [6, 2])
            loss = tf.reduce_sum(tf.square(tf.gather(table, [RANK % 6, 2]) - 1.0))
            train = v1.train.AdamOptimizer(0.05).minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train)
                return [session.run(table)]

    def keras_embedding() -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(6, 3), keras.layers.Flatten()]
        )
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        for _ in range(3):
            model.train_on_batch(np.array([[RANK % 6, 2]]), np.ones((1, 6)))
        return model.get_weights()

    for train in (tf1_adam, keras_embedding):
        dense = train()
        os.environ["DDL_SPARSE_AS_DENSE"] = "0"
        try:
            sparse = train()
        finally:
            del os.environ["DDL_SPARSE_AS_DENSE"]
        assert_same_everywhere(sparse)
        np.testing.assert_allclose(sparse[0], dense[0], rtol=1e-4, atol=1e-6)
