"""tensorflow.contrib.mpi_collectives: the package mpi_collectives, beside ddl_ops."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import ddl_ops

# Not `import mpi_collectives`: a script, or what lies beside it, may have that name.
_spec = PathFinder.find_spec("mpi_collectives", [str(Path(ddl_ops.__file__).parents[1])])
sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
