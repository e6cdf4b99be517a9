"""What the mHC operations share: argument rules and tile sizes."""

from tk_core.errors import value_error
from tk_core.op import Env

F32 = "float32"
BF16 = "bfloat16"


def check_hidden(op: str, argument: str, env: Env) -> None:
    """H must be a multiple of 128: rows of whole 16-byte vectors for every thread of a warp pair."""
    if env["H"] % 128 or env["H"] == 0:
        raise value_error(op, argument, "H a positive multiple of 128", f"H = {env['H']}")


def columns(P, H: int, threads: int) -> int:
    """Columns of a row that one block takes: 8 a thread on CUDA, the whole row on C."""
    return H if P.cpu else min(threads * 8, -(-H // 1024) * 1024)
