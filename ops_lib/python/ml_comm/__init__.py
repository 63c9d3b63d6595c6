"""dl_comm under the name that it had until 2018."""

from dl_comm import *  # noqa: F403
from dl_comm import __all__ as __all__
