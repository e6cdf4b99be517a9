"""Golden vectors of the quantization casts (section 6 of the specification), as data.

Inputs are fp32 bit patterns where they are strings of eight hexadecimal digits, else decimal values rounded to fp32. Results are integers.
"""

P = 2.0

# 6.1-6.3: (input, code)
E4M3 = [
    ("00000000", 0x00),
    ("80000000", 0x80),
    (P**-9, 0x01),
    (P**-10, 0x00),
    ("3A800001", 0x01),
    (3 * P**-10, 0x02),
    (5 * P**-10, 0x02),
    (-(P**-11), 0x80),
    (0.0146484375, 0x08),
    (P**-6, 0x08),
    (1.0, 0x38),
    (1.0625, 0x38),
    (1.125, 0x39),
    (1.1875, 0x3A),
    (17, 0x58),
    (19, 0x5A),
    (240, 0x77),
    (248, 0x78),
    (264, 0x78),
    (432, 0x7E),
    (448, 0x7E),
    (464, 0x7E),
    (1e4, 0x7E),
    (-448, 0xFE),
    (-1e4, 0xFE),
]
E2M1 = [
    (0.25, 0x0),
    ("3E800001", 0x1),
    ("3F3FFFFF", 0x1),
    (0.75, 0x2),
    (1.25, 0x2),
    ("3FA00001", 0x3),
    (1.75, 0x4),
    (2.5, 0x4),
    ("40200001", 0x5),
    (3.5, 0x6),
    (5, 0x6),
    ("40A00001", 0x7),
    (7, 0x7),
    (1e9, 0x7),
    (-0.2, 0x8),
    (-0.25, 0x8),
    (-0.75, 0xA),
    (-6, 0xF),
]
E5M6 = [
    (1, 0x3C0),
    (1.0078125, 0x3C0),
    ("3F810008", 0x3C1),
    (1.015625, 0x3C1),
    (1.0234375, 0x3C2),
    (1.984375, 0x3FF),
    (1.9921875, 0x400),
    (3, 0x420),
    (100, 0x564),
    (-1.5, 0xBE0),
    (65024, 0x7BF),
    ("477EFFFD", 0x7BF),
    (P**-14, 0x040),
    (P**-14 * 63 / 64, 0x03F),
    (P**-20, 0x001),
    (P**-21, 0x000),
    (0.75 * P**-20, 0x001),
    (1.5 * P**-20, 0x002),
    (2.5 * P**-20, 0x002),
    (3.5 * P**-20, 0x004),
    (63.4 * P**-20, 0x03F),
]
CODES = {"e4m3": E4M3, "e2m1": E2M1, "e5m6": E5M6}

E2M1_ROW = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]
E2M1_BYTES = [32, 66, 100, 118, -88, -54, -20, -2]

E5M6_PACKED = [0x123, 0x456, 0x789, 0xABC, 0xDEF, 0x012, 0x345, 0x678]
E5M6_WORDS = [0x12345678, 0x9ABCDEF0, 0x12345678]
E5M6_BYTES = bytes.fromhex("78563412F0DEBC9A78563412")
E5M6_ROW = [1, -2, 0.5, 65024, P**-14, P**-20, -0.0, 1.0078125]
E5M6_ROW_CODES = [0x3C0, 0xC00, 0x380, 0x7BF, 0x040, 0x001, 0x800, 0x3C0]
E5M6_ROW_WORDS = [0x3C0C0038, 0x07BF0400, 0x018003C0]

# 6.4: (amax as a multiple of one and of the maximum, or a word) -> {format: (plain sf, inv, rounded E)}
SCALES = {
    0.0: {
        "e4m3": (0x346FACAD, 0x4A88B800, 0x69),
        "e2m1": (0x00800000, 0x7E800000, 0x01),
        "e5m6": (0x30D35DD3, 0x4E1B0780, 0x62),
    },
    1.0: {
        "e4m3": (0x3B124925, 0x43E00000, 0x77),
        "e2m1": (0x3E2AAAAB, 0x40C00000, 0x7D),
        "e5m6": (0x37810204, 0x477E0000, 0x70),
    },
    3.0: {
        "e4m3": (0x3BDB6DB7, 0x43155555, 0x78),
        "e2m1": (0x3F000000, 0x40000000, 0x7E),
        "e5m6": (0x38418306, 0x46A95555, 0x71),
    },
    "FLT_MAX": {
        "e4m3": (0x7B124924, 0x03E00001, 0xF7),
        "e2m1": (0x7E2AAAAA, 0x00C00001, 0xFD),
        "e5m6": (0x77810204, 0x077E0001, 0xF0),
    },
}
# the same for every format
SCALES_OF_MAX = {
    "MAX": (0x3F800000, 0x3F800000, 0x7F),
    "below": (0x3F7FFFFF, 0x3F800001, 0x7F),
    "above": (0x3F800001, 0x3F7FFFFF, 0x80),
    "double": (0x40000000, 0x3F000000, 0x80),
}
# (format, amax, scale byte, inv or None, code of amax or None)
E4M3_SCALES = [
    ("e2m1", 0.0, 0x01, 0x44000000, None),
    ("e2m1", 1.0, 0x23, 0x40BA2E8C, None),
    ("e2m1", 3.0, 0x30, None, None),
    ("e2m1", 2688.0, 0x7E, None, None),
    ("e2m1", 3000.0, 0x7E, None, 0x7),
    ("e4m3", 1.0, 0x01, None, 0x7E),
    ("e4m3", 3.0, 0x03, 0x432AAAAB, None),
]
CLAMPS = {("e4m3", False): 0x38D1B717, ("e2m1", False): 0x01C00000, ("e4m3", True): 0x3F600000, ("e2m1", True): 0x3C400000}
ZERO_BLOCKS = {"e4m3": (0x346FACAD, -22), "e2m1": (0x00800000, -126), "e5m6": (0x30D35DD3, -29)}

# 6.5: one block of 16, (format, flags) -> (scale bits, bytes in storage order)
BLOCK = [1, -2, 3, 0.5, -0.25, 0.125, 0, -0.0, 0.75, 1.25, -1.75, 2.5, -2.75, 0.1, 0.01, 0.001]
_E2M1_BLOCK = "E4270980436E0F00"
BLOCK_RESULTS = [
    ("e4m3", {}, 0x3BDB6DB7, bytes.fromhex("71F97E69E15900806E74F87CFD573C22")),
    ("e4m3", {"round_sf": True}, 0x3C000000, bytes.fromhex("70F87C68E05800806C72F67AFB553A20")),
    ("e2m1", {}, 0x3F000000, bytes.fromhex(_E2M1_BLOCK)),
    ("e2m1", {"round_sf": True}, 0x3F000000, bytes.fromhex(_E2M1_BLOCK)),
    ("e2m1", {"use_e4m3_sf": True}, 0x30, bytes.fromhex(_E2M1_BLOCK)),
]
E5M6_BLOCK_RESULTS = [
    (False, 0x38418306, [0x755F957B, 0xF715ED56, 0x95000800, 0x73F76AF8, 0xA7AAFB46, 0x845AC4D7]),
    (True, 0x38800000, [0x740F807A, 0x0700EC06, 0x80000800, 0x720750F7, 0x0790F986, 0x665924C2]),
]

# 6.6: exponents 0x77 + j + 8i of a 5 by 5 array
PACKED_WORDS = [
    [0x7A797877, 0x0000007B],
    [0x8281807F, 0x00000083],
    [0x8A898887, 0x0000008B],
    [0x9291908F, 0x00000093],
    [0x9A999897, 0x0000009B],
]
COL_MAJOR_STORAGE = [
    [0x7A797877, 0x8281807F, 0x8A898887, 0x9291908F, 0x9A999897, 0, 0, 0],
    [0x7B, 0x83, 0x8B, 0x93, 0x9B, 0, 0, 0],
]

# 6.7: codes of an input block and their E4M3 codes by the input exponent, E_out = 114
LOSSLESS_CODES = [0x1, 0x7, 0x9, 0xF, 0x2, 0x0, 0x8, 0x5]
LOSSLESS_E_OUT = 114
LOSSLESS = {
    120: bytes.fromhex("607CE0FC68008074"),
    115: bytes.fromhex("3854B8D44000804C"),
    109: bytes.fromhex("082488A41000801C"),
    106: bytes.fromhex("010C818C02008006"),
    105: bytes.fromhex("0006808601008003"),
}

# 6.8
MULTIPLIER = {"amax": "3FB26ADF", "x": "3ED8A658", "inv": 0x43A0B3A6, "inverse": 0x43A0B3A7, "code": 0x70, "precomputed_code": 0x71}
REQUANTIZE = {"codes": [0x78, 0x74], "sf": "3C1A441B", "inv": 0x4339DC5A, "per_token": 0x7B, "per_channel": 0x7A}
DEQUANTIZE = {"value": 1.375, "sf": "3F99D174", "fp32": 0x3FD38000, "bf16": 1.65625}

# 6.9: (format, amax, OCP exponent, exponent here)
OCP = [
    ("e4m3", 1.75, 0x77, 0x77),
    ("e4m3", 1.76, 0x77, 0x78),
    ("e4m3", 449, 0x7F, 0x80),
    ("e2m1", 1.5, 0x7D, 0x7D),
    ("e2m1", 1.6, 0x7D, 0x7E),
    ("e2m1", 6.5, 0x7F, 0x80),
]

# 6.10
STOCHASTIC_INPUT = [0.3, 0.3, 0.3, 0.3, 1.1, 1.1, 4.7, -2.2]
STOCHASTIC_BITS = {
    0: [0xF1D7, 0x93C8, 0x059B, 0x0D02, 0x3B6D, 0xD96C, 0xAF5B, 0xEEC4],
    1: [0x629F, 0xD018, 0x83AB, 0xF52C, 0x778D, 0xB78E, 0xB0C9, 0xAAB9],
}
STOCHASTIC_CODES = {
    "e2m1": [1, 1, 0, 0, 2, 3, 7, 0xD],
    "e4m3": [0x2A, 0x2A, 0x29, 0x29, 0x39, 0x39, 0x4A, 0xC1],
}
STOCHASTIC_BF16 = ([1.001, 1.001, -3.14159, 1e-3], [0x3F80, 0x3F80, 0xC049, 0x3A83])
