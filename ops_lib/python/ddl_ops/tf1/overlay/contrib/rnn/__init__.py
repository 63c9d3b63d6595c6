"""tensorflow.contrib.rnn: its cells and loops that are in tf.nn now."""

from typing import NoReturn

from tensorflow.nn import (
    bidirectional_dynamic_rnn,
    dynamic_rnn,
    raw_rnn,
    static_bidirectional_rnn,
    static_rnn,
    static_state_saving_rnn,
)
from tensorflow.nn.rnn_cell import (
    BasicLSTMCell,
    BasicRNNCell,
    DeviceWrapper,
    DropoutWrapper,
    GRUCell,
    LSTMCell,
    LSTMStateTuple,
    MultiRNNCell,
    ResidualWrapper,
    RNNCell,
)

from ddl_ops.tf1 import gone


def __getattr__(name: str) -> NoReturn:
    raise gone.no_attribute(__name__, name)
