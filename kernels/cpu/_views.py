"""Compiled-code helpers that look at an array's memory as packed rows, whatever strides Numba knows of.

A cache view [num_blocks, num_kv_heads, block_size, head_dim] is strided in its first dimension and packed in the
others; Numba's types can only say "strided everywhere", and loops over such an array do not vectorise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.np.arrayobj import make_array, populate_array

intrinsic: Any = extending.intrinsic  # what it returns is called without the typing context


@intrinsic
def view_at(typing_context, array, offset, length):
    """`length` items that start `offset` items behind the array's first, as a packed 1-D array.

    Unchecked, and the caller keeps the array alive. It costs one addition, and a loop `for x in range(n)` over such
    views vectorises: with `array[offset + x]` Numba would first ask at each x whether the sum is negative.
    """
    if not (
        isinstance(array, types.Array)
        and isinstance(offset, types.Integer)
        and isinstance(length, types.Integer)
    ):
        return None
    flat_type = types.Array(array.dtype, 1, "C")

    def codegen(context, builder, signature, args):
        source = make_array(array)(context, builder, args[0])
        start = context.cast(builder, args[1], offset, types.intp)
        size = context.cast(builder, args[2], length, types.intp)
        flat = make_array(flat_type)(context, builder)
        itemsize = context.get_constant(
            types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype))
        )
        populate_array(
            flat,
            data=builder.gep(source.data, [start]),
            shape=cgutils.pack_array(builder, [size]),
            strides=cgutils.pack_array(builder, [itemsize]),
            itemsize=itemsize,
            meminfo=None,
        )
        return flat._getvalue()

    return flat_type(array, offset, length), codegen


@intrinsic
def prefetch(typing_context, array, offset):
    """Ask for the cache line `offset` items behind the array's first; reads nothing and cannot fault."""
    if not (isinstance(array, types.Array) and isinstance(offset, types.Integer)):
        return None

    def codegen(context, builder, signature, args):
        source = make_array(array)(context, builder, args[0])
        start = context.cast(builder, args[1], offset, types.intp)
        address = builder.bitcast(builder.gep(source.data, [start]), cgutils.voidptr_t)
        int32 = cgutils.int32_t
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        # for reading, keep in all cache levels, data
        builder.call(function, [address, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, offset), codegen
