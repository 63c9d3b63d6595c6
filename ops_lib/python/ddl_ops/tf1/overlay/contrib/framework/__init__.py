"""tensorflow.contrib.framework, as far as tf_slim has it or tf has it by now."""

from typing import NoReturn

from tensorflow import nest
from tensorflow.train import (
    assert_global_step,
    get_global_step,
    get_or_create_global_step,
    list_variables,
    load_checkpoint,
    load_variable,
)
from tf_slim.ops.arg_scope import *
from tf_slim.ops.framework_ops import *
from tf_slim.ops.variables import *

from ddl_ops.tf1 import gone


def __getattr__(name: str) -> NoReturn:
    raise gone.no_attribute(__name__, name)
