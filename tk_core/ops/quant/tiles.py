"""Who makes what in the kernels that go through a matrix once, element by element."""

from math import gcd

from tk_core.ops.mhc.common import thread

# Of kernels whose accesses all lie within their tensors: TileLang need not guard those that it cannot prove.
IN_BOUNDS = {"tl.disable_safe_memory_legalize": True}


class Tiles:
    """A thread takes one vector of columns, 16 bytes of the output, in some neighbouring rows.

    So the stores of a warp are contiguous whatever the width of the input. Blocks of narrow matrices hold several bands of rows.
    On the C target the only thread of a block takes one row, a vector at a time.
    """

    def __init__(self, P, H: int, itemsize: int, rows: int, block_k: int, limit: int = 512):
        self.vector = gcd(64, H, block_k if block_k > 1 else H) if P.cpu else 16 // itemsize
        self.units = H // self.vector
        self.serial, self.rows = (self.units, 1) if P.cpu else (1, rows)
        self.parts = 1 if P.cpu else -(-self.units // limit)
        across = -(-self.units // self.parts)
        self.bands = 1 if P.cpu else max(1, 128 // self.units)
        self.threads = -(-(across * self.bands) // 32) * 32

    def grid(self, P, M):
        """Blocks; those that share rows are neighbours."""
        return P.ceildiv(M, self.rows * self.bands) * self.parts

    def place(self, P, b, k):
        """First row, and vector of columns, of step k of a thread."""
        if self.bands == 1:
            return b // self.parts * self.rows, b % self.parts * self.threads + k + thread(P)
        # threads behind the last band get a vector beyond the matrix
        band, beyond = thread(P) // self.units, thread(P) // (self.units * self.bands)
        return (b * self.bands + band) * self.rows, thread(P) % self.units + beyond * self.units
