"""tensorflow.contrib.framework.python.ops: tf_slim.ops, whose modules are found here, too."""

from tf_slim.ops.arg_scope import *
from tf_slim.ops.framework_ops import *
from tf_slim.ops.variables import *
