"""Runtime settings of the core, under the JAX front end's name."""

from tk_core.config import (
    get_debug,
    get_device_num_sms,
    get_num_sms,
    get_token_alignment,
    reset_runtime_config,
    set_debug,
    set_num_sms,
    set_token_alignment,
)

__all__ = [
    "get_debug",
    "get_device_num_sms",
    "get_num_sms",
    "get_token_alignment",
    "reset_runtime_config",
    "set_debug",
    "set_num_sms",
    "set_token_alignment",
]
