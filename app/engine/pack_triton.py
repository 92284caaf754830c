"""The Triton kernel of app/engine/pack_kernel.py, in a module of its own: only GPU hosts have Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def to_bf16(x):
    # Bits of fp32 rounded to bfloat16, half to even, as the upper half of an int32.
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def pack_rows(
    a, b, c, d, a_bits, b_bits, c_bits, d_bits, out, out_f32, out_i16, out_bits, a_row, b_row, c_row, d_row,
    hidden, nbytes, scale_at, values_at,
    CODEC: tl.constexpr, NARROW: tl.constexpr, ITEM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program packs one state of one token: x [BLOCK], H of them real.
    row = tl.program_id(0).to(tl.int64)
    state = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < hidden
    if state == 0:
        x = tl.load(a + row * a_row + at, mask=real, other=0.0).to(tl.float32)
    elif state == 1:
        x = tl.load(b + row * b_row + at, mask=real, other=0.0).to(tl.float32)
    elif state == 2:
        x = tl.load(c + row * c_row + at, mask=real, other=0.0).to(tl.float32)
    else:
        x = tl.load(d + row * d_row + at, mask=real, other=0.0).to(tl.float32)
    start = row * nbytes
    tl.store(out_f32 + start // 4 + state, tl.sqrt(tl.sum(x * x, axis=0)))
    zeros = tl.sum(((x == 0.0) & real).to(tl.float32), axis=0)
    tl.store(out_f32 + start // 4 + 4 + state, zeros)
    if CODEC == "bf16":
        if state == 0:
            bits = tl.load(a_bits + row * a_row + at, mask=real, other=0)
        elif state == 1:
            bits = tl.load(b_bits + row * b_row + at, mask=real, other=0)
        elif state == 2:
            bits = tl.load(c_bits + row * c_row + at, mask=real, other=0)
        else:
            bits = tl.load(d_bits + row * d_row + at, mask=real, other=0)
        tl.store(out_bits + (start + values_at) // ITEM + state * hidden + at, bits, mask=real)
    elif CODEC == "fp8":
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) * (1.0 / 448.0), 1e-30)
        bits = to_bf16(scale)
        tl.store(out_i16 + (start + scale_at) // 2 + state, (bits >> 16).to(tl.int16))
        value = x / bits.to(tl.float32, bitcast=True)
        if NARROW:
            value = to_bf16(value).to(tl.float32, bitcast=True)
        value = value.to(tl.float8e4nv)
        tl.store(out + start + values_at + state * hidden + at, value.to(tl.uint8, bitcast=True), mask=real)
    else:
        groups: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(x, (groups, GROUP))
        scale = tl.maximum(tl.max(tl.abs(grouped), axis=1) * (1.0 / 127.0), 1e-30)  # [groups]
        bits = to_bf16(scale)
        group = tl.arange(0, groups)
        of_state = hidden // GROUP
        where = out_i16 + (start + scale_at) // 2 + state * of_state + group
        tl.store(where, (bits >> 16).to(tl.int16), mask=group < of_state)
        factor = 1.0 / bits.to(tl.float32, bitcast=True)
        # Adding 1.5 * 2^23 leaves no room for a fraction: round half to even.
        value = (tl.reshape(grouped * factor[:, None], (BLOCK,)) + 12582912.0) - 12582912.0
        byte = value.to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(out + start + values_at + state * hidden + at, byte, mask=real)
