"""Runtime settings of the core, under the torch front end's name."""

from tk_core.config import *  # noqa: F403
from tk_core.config import __all__ as __all__
