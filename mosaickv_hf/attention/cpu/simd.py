"""Eight-lane vectors for numba kernels: a numba type for them and the few operations the kernels are built from.

Kernels address memory by integers (bytes), as C does by pointers, so that one compiled kernel serves all dtypes and
shapes. Everything is generic LLVM vector code, which any CPU can run, except an AVX2 instruction (`vpermps`)
that spreads a row's kept elements to their channels and a BMI2 one (`pdep`) that unpacks codes; they are replaced where
numba compiles for a CPU without them.
"""

import inspect

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_F32X8, _I32X8, _I8X8 = ir.VectorType(_F32, 8), ir.VectorType(_I32, 8), ir.VectorType(_I8, 8)


class _VectorType(types.Type):
    def __init__(self):
        super().__init__(name="float32x8")


F32X8 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _F32X8)


def _has(feature: str) -> bool:
    """Whether numba compiles for a CPU with this feature."""
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def _op(result: types.Type, *params: types.Type):
    """Makes a function that emits IR into an operation kernels can call: `build(builder, *args) -> value`."""

    def wrap(build):
        def codegen(context, builder, signature, args):
            value = build(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        def typing(typingctx, *args):
            return result(*params), codegen

        names = ["typingctx", *list(inspect.signature(build).parameters)[1:]]
        typing.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        typing.__name__ = typing.__qualname__ = build.__name__
        typing.__doc__ = build.__doc__
        return intrinsic(typing)

    return wrap


_i64, _f32 = types.int64, types.float32


def _load(b, p, ty):
    return b.load(b.inttoptr(p, ty.as_pointer()), align=1)


def _const(values, ty=_I32):
    return ir.Constant(ir.VectorType(ty, len(values)), list(values))


def _splat(b, x, n=8):
    one = b.insert_element(ir.Constant(ir.VectorType(x.type, n), ir.Undefined), x, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), _const([0] * n))


def _shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, _const(lanes))


def _call(b, name, result, args):
    fnty = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, name), args)


# Memory


@_op(_i64, _i64)
def load_i64(b, p):
    return _load(b, p, _I64)


@_op(_i64, _i64, _i64)
def get(b, table, field):
    """A field of a table of int64."""
    return _load(b, b.add(table, b.shl(field, ir.Constant(_I64, 3))), _I64)


@_op(_i64, _i64)
def load_i32(b, p):
    return b.sext(_load(b, p, _I32), _I64)


@_op(_i64, _i64)
def load_u32(b, p):
    return b.zext(_load(b, p, _I32), _I64)


@_op(_i64, _i64)
def load_u8(b, p):
    return b.zext(_load(b, p, _I8), _I64)


@_op(_f32, _i64)
def load_f32(b, p):
    return _load(b, p, _F32)


@_op(types.void, _i64, _i64)
def store_i32(b, p, x):
    b.store(b.trunc(x, _I32), b.inttoptr(p, _I32.as_pointer()), align=1)


@_op(types.void, _i64, _i64)
def store_u8(b, p, x):
    b.store(b.trunc(x, _I8), b.inttoptr(p, _I8.as_pointer()), align=1)


@_op(types.void, _i64, _i64)
def store_i64(b, p, x):
    b.store(x, b.inttoptr(p, _I64.as_pointer()), align=1)


@_op(types.void, _i64, _f32)
def store_f32(b, p, x):
    b.store(x, b.inttoptr(p, _F32.as_pointer()), align=1)


@_op(types.void, _i64, F32X8)
def store8(b, p, x):
    b.store(x, b.inttoptr(p, _F32X8.as_pointer()), align=1)


@_op(types.void, _i64)
def prefetch(b, p):
    """Asks for the cache line at an address, which may be any."""
    one = ir.Constant(_I32, 1)
    args = [b.inttoptr(p, _I8.as_pointer()), ir.Constant(_I32, 0), ir.Constant(_I32, 3), one]
    _call(b, "llvm.prefetch.p0", ir.VoidType(), args)


@_op(_i64, _i64)
def next_item(b, p):
    """Takes a number from the counter at an address: the work items of threads."""
    return b.atomic_rmw("add", b.inttoptr(p, _I64.as_pointer()), ir.Constant(_I64, 1), "monotonic")


# Loads of eight values as floats; reading past the eight is the caller's to prevent


@_op(F32X8, _i64)
def load8(b, p):
    return _load(b, p, _F32X8)


@_op(F32X8, _i64)
def load8_i8(b, p):
    return b.sitofp(_load(b, p, _I8X8), _F32X8)


@_op(F32X8, _i64)
def load8_bf16(b, p):
    wide = b.zext(_load(b, p, ir.VectorType(_I16, 8)), _I32X8)
    return b.bitcast(b.shl(wide, _const([16] * 8)), _F32X8)


@_op(F32X8, _i64)
def load8_f16(b, p):
    if _has("f16c"):
        return b.fpext(_load(b, p, ir.VectorType(_F16, 8)), _F32X8)
    # Without the instruction LLVM would call a library function that numba does not link. Exponents are moved by a
    # multiplication, which is right for subnormal numbers too; infinity and NaN become large numbers.
    wide = b.zext(_load(b, p, ir.VectorType(_I16, 8)), _I32X8)
    sign = b.shl(b.and_(wide, _const([0x8000] * 8)), _const([16] * 8))
    magnitude = b.bitcast(b.shl(b.and_(wide, _const([0x7FFF] * 8)), _const([13] * 8)), _F32X8)
    magnitude = b.bitcast(b.fmul(magnitude, _const([2.0**112] * 8, _F32)), _I32X8)
    return b.bitcast(b.or_(magnitude, sign), _F32X8)


@_op(F32X8, _i64)
def load8_bool(b, p):
    """0 where a bool is True, -inf where it is False."""
    seen = b.icmp_unsigned("!=", _load(b, p, _I8X8), _const([0] * 8, _I8))
    return b.select(seen, _const([0.0] * 8, _F32), _const([-np.inf] * 8, _F32))


@_op(F32X8, _i64, _i64)
def load8_codes(b, p, mask):
    """Eight codes of w bits, lowest bits first, from a word of eight bytes. `mask`: w ones in each of eight bytes."""
    word = _load(b, p, _I64)
    if _has("bmi2"):
        codes = b.bitcast(_call(b, "llvm.x86.bmi.pdep.64", _I64, [word, mask]), _I8X8)
    else:
        one = b.and_(mask, ir.Constant(_I64, 255))
        shifts = b.mul(_splat(b, b.ctpop(one)), _const(range(8), _I64))
        codes = b.trunc(b.and_(b.lshr(_splat(b, word), shifts), _splat(b, one)), _I8X8)
    return b.uitofp(codes, _F32X8)


# Arithmetic


@_op(F32X8, _f32)
def splat(b, x):
    return _splat(b, x)


@_op(F32X8, _i64)
def load_splat(b, p):
    return _splat(b, _load(b, p, _F32))


@_op(F32X8, F32X8, F32X8, F32X8)
def fma(b, x, y, z):
    """`x * y + z`, fused where the CPU can."""
    return _call(b, "llvm.fmuladd.v8f32", _F32X8, [x, y, z])


@_op(F32X8, F32X8, F32X8)
def add(b, x, y):
    return b.fadd(x, y)


@_op(F32X8, F32X8, F32X8)
def sub(b, x, y):
    return b.fsub(x, y)


@_op(F32X8, F32X8, F32X8)
def mul(b, x, y):
    return b.fmul(x, y)


def _larger(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@_op(F32X8, F32X8, F32X8)
def larger(b, x, y):
    return _larger(b, x, y)


@_op(F32X8, F32X8, _i64)
def keep_lanes(b, x, n):
    """The first n lanes; -inf in the others."""
    inside = b.icmp_signed("<", _const(range(8)), _splat(b, b.trunc(n, _I32)))
    return b.select(inside, x, _const([-np.inf] * 8, _F32))


@_op(F32X8, F32X8)
def exp(b, x):
    """`exp` to 2e-7, for x up to 88."""
    low = _const([-87.0] * 8, _F32)
    tiny = b.fcmp_ordered("<", x, low)
    x = b.select(tiny, low, x)

    def fma_const(y, z, c):
        return _call(b, "llvm.fmuladd.v8f32", _F32X8, [y, z, _const([c] * 8, _F32)])

    # Adding 1.5 * 2**23 rounds to an integer, which is then in the low bits.
    magic = _const([12582912.0] * 8, _F32)
    shifted = fma_const(x, _const([1.4426950408889634] * 8, _F32), 12582912.0)
    n = b.fsub(shifted, magic)
    x = _call(b, "llvm.fmuladd.v8f32", _F32X8, [n, _const([-0.693359375] * 8, _F32), x])
    x = _call(b, "llvm.fmuladd.v8f32", _F32X8, [n, _const([2.12194440e-4] * 8, _F32), x])
    y = _const([1.9875691500e-4] * 8, _F32)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma_const(y, x, c)
    y = _call(b, "llvm.fmuladd.v8f32", _F32X8, [b.fmul(x, x), y, b.fadd(x, _const([1.0] * 8, _F32))])
    exponent = b.shl(b.bitcast(shifted, _I32X8), _const([23] * 8))
    y = b.bitcast(b.add(b.bitcast(y, _I32X8), exponent), _F32X8)
    return b.select(tiny, _const([0.0] * 8, _F32), y)


def _tree(b, v, combine):
    """Lane i of the result combines all lanes of v[i]."""
    for low, high in (
        ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
        ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
        ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    ):
        v = [combine(b, _shuffle(b, x, y, low), _shuffle(b, x, y, high)) for x, y in zip(v[::2], v[1::2])]
    return v[0]


@_op(F32X8, *[F32X8] * 8)
def sums(b, v0, v1, v2, v3, v4, v5, v6, v7):
    """Lane i: the sum of vector i."""
    return _tree(b, [v0, v1, v2, v3, v4, v5, v6, v7], lambda b, x, y: b.fadd(x, y))


@_op(F32X8, *[F32X8] * 8)
def maxima(b, v0, v1, v2, v3, v4, v5, v6, v7):
    """Lane i: the maximum of vector i."""
    return _tree(b, [v0, v1, v2, v3, v4, v5, v6, v7], _larger)


def _fold(b, x, combine):
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        x = combine(b, x, _shuffle(b, x, x, lanes))
    return b.extract_element(x, ir.Constant(_I32, 0))


@_op(_f32, F32X8)
def total(b, x):
    return _fold(b, x, lambda b, x, y: b.fadd(x, y))


@_op(_f32, F32X8)
def maximum(b, x):
    return _fold(b, x, _larger)


@_op(types.void, _i64, _i64, _i64)
def transpose(b, source, target, stride):
    """Eight vectors side by side at `source` become columns: lane i of each goes to the row `target + i * stride`."""
    step = ir.Constant(_I64, 32)
    rows = []
    for _ in range(8):
        rows.append(_load(b, source, _F32X8))
        source = b.add(source, step)
    pairs = []
    for x, y in zip(rows[::2], rows[1::2]):
        pairs.append((_shuffle(b, x, y, [0, 8, 1, 9, 4, 12, 5, 13]), _shuffle(b, x, y, [2, 10, 3, 11, 6, 14, 7, 15])))
    quads = []
    for (x0, x1), (y0, y1) in zip(pairs[::2], pairs[1::2]):
        low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        quads.append([_shuffle(b, *xy, lanes) for xy in ((x0, y0), (x1, y1)) for lanes in (low, high)])
    columns = [_shuffle(b, x, y, [0, 1, 2, 3, 8, 9, 10, 11]) for x, y in zip(*quads)]
    columns += [_shuffle(b, x, y, [4, 5, 6, 7, 12, 13, 14, 15]) for x, y in zip(*quads)]
    for column in columns:
        b.store(column, b.inttoptr(target, _F32X8.as_pointer()), align=1)
        target = b.add(target, stride)


# Kept elements to their channels


def _ranks() -> np.ndarray:
    """`[256, 8]` int32: per bitmap byte and channel, how many channels before it are kept; negative if it is not."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return np.where(bits == 1, bits.cumsum(1) - bits, -(2**31)).astype(np.int32)


RANKS = _ranks()


@_op(_i64, _i64)
def popcount(b, x):
    return b.ctpop(x)


def _permute(b, x, lanes):
    """`x[lanes[i] & 7]` in lane i."""
    if _has("avx2"):
        return _call(b, "llvm.x86.avx2.permps", _F32X8, [x, lanes])
    lanes = b.and_(lanes, _const([7] * 8))
    memory = cgutils.alloca_once(b, _F32X8)
    b.store(x, memory)
    memory = b.bitcast(memory, _F32.as_pointer())
    result = ir.Constant(_F32X8, ir.Undefined)
    for i in range(8):
        lane = ir.Constant(_I32, i)
        result = b.insert_element(result, b.load(b.gep(memory, [b.extract_element(lanes, lane)])), lane)
    return result


@_op(_i64, _i64, _i64)
def at_least(b, p, threshold):
    """Which of the eight int32 at an address are at least `threshold`, as bits."""
    inside = b.icmp_signed(">=", _load(b, p, _I32X8), _splat(b, b.trunc(threshold, _I32)))
    return b.zext(b.bitcast(inside, _I8), _I64)


@_op(_i64, _i64, _i64, _i64)
def same_prefix(b, p, shift, prefix):
    """Which of the eight int32 at an address are `prefix` without their lowest `shift` bits, as bits."""
    shifted = b.ashr(_load(b, p, _I32X8), _splat(b, b.trunc(shift, _I32)))
    same = b.icmp_signed("==", shifted, _splat(b, b.trunc(prefix, _I32)))
    return b.zext(b.bitcast(same, _I8), _I64)


@_op(types.void, _i64)
def order(b, p):
    """Turns the eight fp32 at an address into int32 that sort as they do."""
    bits = _load(b, p, _I32X8)
    magnitude = b.and_(b.ashr(bits, _const([31] * 8)), _const([0x7FFFFFFF] * 8))
    b.store(b.xor(bits, magnitude), b.inttoptr(p, _I32X8.as_pointer()), align=1)


def _ranks_at(b, p):
    return _load(b, p, _I32X8)


def _only_kept(b, ranks, x):
    return b.select(b.icmp_signed("<", ranks, _const([0] * 8)), _const([0.0] * 8, _F32), x)


@_op(F32X8, F32X8, _i64)
def spread(b, x, ranks):
    """Element r of x to the channel of rank r, 0 to channels not kept. `ranks`: address of a row of `RANKS`."""
    ranks = _ranks_at(b, ranks)
    return _only_kept(b, ranks, _permute(b, x, ranks))


def _spread_codes(b, codes, ranks, bits):
    shift = b.mul(b.and_(ranks, _const([7] * 8)), _const([bits] * 8))
    return b.lshr(_splat(b, b.trunc(codes, _I32)), shift)


@_op(F32X8, _i64, _i64, F32X8)
def spread4(b, codes, ranks, magnitudes):
    """`spread` of eight 4-bit codes in the low bits of `codes`: three bits choose a magnitude, the fourth a sign."""
    ranks = _ranks_at(b, ranks)
    code = _spread_codes(b, codes, ranks, 4)
    magnitude = b.bitcast(_permute(b, magnitudes, code), _I32X8)
    sign = b.and_(b.shl(code, _const([28] * 8)), _const([-(2**31)] * 8))
    return _only_kept(b, ranks, b.bitcast(b.xor(magnitude, sign), _F32X8))


@_op(F32X8, _i64, _i64, F32X8)
def spread3(b, codes, ranks, values):
    """`spread` of eight 3-bit codes in the low bits of `codes`, which choose one of `values`."""
    ranks = _ranks_at(b, ranks)
    return _only_kept(b, ranks, _permute(b, values, _spread_codes(b, codes, ranks, 3)))


@_op(F32X8, _i64, _i64, F32X8)
def spread2(b, codes, ranks, values):
    """`spread` of eight 2-bit codes in the low bits of `codes`, which choose one of the first four `values`."""
    ranks = _ranks_at(b, ranks)
    code = b.and_(_spread_codes(b, codes, ranks, 2), _const([3] * 8))
    return _only_kept(b, ranks, _permute(b, values, code))
