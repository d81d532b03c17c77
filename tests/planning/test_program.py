"""Reading compiled programs: loops times their trips, slices for what they take, each collective once."""

import jax
import jax.numpy as jnp
import pytest

from mod_jax.planning import program

MESH = {"data": 1, "fsdp": 4, "tensor": 1}

# Two nested loops, of 3 and 5 trips, in the spelling of a TPU program: 15 runs of the inner body, 3 of the outer one.
NESTED = """HloModule jit_step, is_scheduled=true

%inner_condition (p: (s32[], f32[8,8])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}

%inner_body (p.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.1 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,8]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %g = f32[8,8]{1,0:T(8,128)} all-gather(%x), channel_id=7, replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
  %dot.1 = f32[8,8]{1,0:T(8,128)S(1)} dot(%g, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %j = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %t = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) tuple(%j, %dot.1)
}

%outer_compare (a: s32[]) -> pred[] {
  %a = s32[]{:T(128)} parameter(0)
  %three = s32[]{:T(128)} constant(3)
  ROOT %lt.2 = pred[]{:T(512)} compare(%a, %three), direction=LT
}

%outer_condition (q: (s32[], f32[8,8])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %f = pred[]{:T(512)} fusion(%k), kind=kLoop, calls=%outer_compare
}

%outer_body (q.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %q.1 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %while.1 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) while(%q.1), condition=%inner_condition, body=%inner_body
  %y = f32[8,8]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
  %r = f32[8,8]{1,0:T(8,128)} all-reduce(%y), channel_id=8, replica_groups={{0,1,2,3}}, to_apply=%add
  %s = f32[8,8]{1,0:T(8,128)S(1)} sort(%y), dimensions={1}, to_apply=%less
  ROOT %t.1 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) tuple(%r, %s)
}

ENTRY %main (arg: f32[8,8]) -> f32[8,8] {
  %arg = f32[8,8]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) tuple(%zero, %arg)
  %while.2 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %out = f32[8,8]{1,0:T(8,128)} get-tuple-element(%while.2), index=1
}
"""


def test_loops_are_multiplied_by_their_trips():
    step = program.read_step(NESTED, MESH)
    assert step.trip_counts == (3, 5)
    assert step.unknown_loops == 0
    assert step.flops == 15 * 2 * 8 * 8 * 8
    assert [(c.kind, times) for c, times in step.moved] == [("all-reduce", 3), ("all-gather", 15)]
    assert step.sorts == 3
    assert step.kernels == 0
    # dot.1 reads two arrays of 256 bytes and writes on-chip memory, S(1); the sort reads one.
    assert step.hbm_bytes == 15 * 512 + 3 * 256


def test_a_loop_without_a_constant_trip_count_is_counted_once_and_told():
    step = program.read_step(NESTED.replace("%three = s32[]{:T(128)} constant(3)", "%three = s32[] add(%a, %a)"), MESH)
    assert step.unknown_loops == 1
    assert step.flops == 5 * 2 * 8 * 8 * 8


def test_a_loop_that_counts_by_twos_makes_half_the_trips():
    """So does the compiler count where it multiplies the parts of a weight, two a trip, as they come in."""
    by_twos = NESTED.replace(
        "%j = s32[]{:T(128)} get-tuple-element(%p.1), index=0",
        "%j0 = s32[] get-tuple-element(%p.1), index=0\n  %two = s32[] constant(2)\n  %j = s32[] add(%j0, %two)",
    )
    assert program.read_step(by_twos, MESH).trip_counts == (3, 3)  # 0, 2, 4 are below 5
    assert program.read_step(by_twos, MESH).flops == 9 * 1024
    theirs = by_twos.replace("inner_body", "windowed_dot_general_body")
    assert program.read_step(theirs, MESH).trip_counts == (3,)
    assert program.read_step(theirs, MESH).flops == 9 * 1024


def test_splash_kernels():
    """2 heads of 64 over 1,024 positions in blocks of 512: 3 of 4 blocks, 2 products forward, 4 for keys and values."""
    shapes = [("s8", "1,2,2"), ("s8", "1,2,2"), *[("bf16", "2,1024,64")] * 3]
    operands = [f"%p{i} = {dtype}[{shape}]{{2,1,0}} parameter({i})" for i, (dtype, shape) in enumerate(shapes)]
    call = 'custom-call(%p0, %p1, %p2, %p3, %p4), custom_call_target="tpu_custom_call"'
    one = 2 * 2 * 1024 * 64 * 1024 * 0.75
    for name, products in (("splash_mha_fwd_residuals.1", 2), ("splash_mha_dq_x", 3), ("splash_mha_dkv_x.2", 4)):
        step = program.read_step(entry(*operands, f"ROOT %{name} = bf16[2,1024,64]{{2,1,0}} {call}"), MESH)
        assert (step.flops, step.kernels) == (products * one, 0)
        assert step.hbm_bytes == 4 * (2 * 2 * 1024 * 64) + 2 * 4  # three operands, one result, two tables
    step = program.read_step(entry(*operands, f"ROOT %mine = bf16[2,1024,64]{{2,1,0}} {call}"), MESH)
    assert (step.flops, step.kernels) == (0, 1)


def test_attributes_may_be_lines_of_their_own():
    """A kernel's metadata: a line that begins with a brace and is not the end of the computation."""
    kernel = (
        '%k = f32[8,8]{1,0} custom-call(%y), custom_call_target="tpu_custom_call", frontend_attributes={kernel='
        '{\n"xprof_metadata":"{}"\n}}, metadata={op_name="jit(step)/kernel"}\n  %s = f32'
    )
    step = program.read_step(NESTED.replace("%s = f32", kernel), MESH)
    assert (step.kernels, step.sorts) == (3, 3)


def test_one_trip_of_the_loop_in_place_of_the_program():
    """The outer loop without a constant count: one all-reduce, one sort, and five trips of the loop inside."""
    text = NESTED.replace("%three = s32[]{:T(128)} constant(3)", "%three = s32[] add(%a, %a)")
    step = program.read_step(text, MESH, of_loop=True)
    assert [(c.kind, times) for c, times in step.moved] == [("all-reduce", 1), ("all-gather", 5)]
    assert step.trip_counts == (5,)
    with pytest.raises(ValueError, match="has 0 loops without a constant trip count"):
        program.read_step(NESTED, MESH, of_loop=True)


# A condition inside a loop without a constant trip count: 512 FLOPs where it is true, 1,024 where it is false.
CHOICE = """HloModule jit_decode, is_scheduled=true

%more (p: (pred[], f32[8,8])) -> pred[] {
  %p = (pred[], f32[8,8]{1,0}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%p), index=0
}

%no (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%yes (q.1: f32[8,8]) -> f32[8,8] {
  %q.1 = f32[8,8]{1,0} parameter(0)
  %s = f32[8,4]{1,0} slice(%q.1), slice={[0:8], [0:4]}
  %t = f32[4,8]{1,0} slice(%q.1), slice={[0:4], [0:8]}
  ROOT %d.1 = f32[8,8]{1,0} dot(%s, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p.1: (pred[], f32[8,8])) -> (pred[], f32[8,8]) {
  %p.1 = (pred[], f32[8,8]{1,0}) parameter(0)
  %b = pred[] get-tuple-element(%p.1), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p.1), index=1
  %y = f32[8,8]{1,0} conditional(%b, %x, %x), BRANCHES, metadata={op_name="jit(decode)/while/body/cond"}
  ROOT %t.1 = (pred[], f32[8,8]{1,0}) tuple(%b, %y)
}

ENTRY %main (c: pred[], a: f32[8,8]) -> f32[8,8] {
  %c = pred[] parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  %i = (pred[], f32[8,8]{1,0}) tuple(%c, %a)
  %w = (pred[], f32[8,8]{1,0}) while(%i), condition=%more, body=%body, metadata={op_name="jit(decode)/while"}
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    "branches", ["true_computation=%yes, false_computation=%no", "branch_computations={%no, %yes}"]
)
def test_odds_of_loops_and_branches(branches):
    text = CHOICE.replace("BRANCHES", branches)
    assert program.read_step(text, MESH).flops == 1024 + 512  # one trip, both branches
    odds = {"jit(decode)/while": 10.0, "jit(decode)/while/body/cond": 0.25}
    step = program.read_step(text, MESH, odds=odds.get)
    assert step.flops == 10 * (0.75 * 1024 + 0.25 * 512)
    assert step.unknown_loops == 0
    assert program.read_step(text, MESH, of_loop=True, odds=odds.get).flops == step.flops / 10


def test_what_is_not_a_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        program.read_step("module @jit_step {}", MESH)


def entry(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n{before}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def test_an_asynchronous_collective_is_counted_once():
    """A TPU program repeats it, with one channel, in the fusion that starts it and in those that run meanwhile."""
    start, meanwhile = (
        f"""
%{name} (p: bf16[4,8]) -> bf16[16,8] {{
  %p = bf16[4,8]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %g.{name} = bf16[16,8]{{1,0:T(8,128)(2,1)}} all-gather(%p), channel_id=5, replica_groups={{{{0,1,2,3}}}}
}}
"""
        for name in ("start", "meanwhile")
    )
    text = entry(
        "%a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)",
        "%b = bf16[16,8]{1,0:T(8,128)(2,1)} fusion(%a), kind=kCustom, calls=%start",
        "ROOT %c = bf16[16,8]{1,0:T(8,128)(2,1)} fusion(%a), kind=kCustom, calls=%meanwhile",
        before=start + meanwhile,
    )
    assert [(c.kind, c.bytes, c.axes) for c, _ in program.read_step(text, MESH).moved] == [
        ("all-gather", 256, ("fsdp",))
    ]


def test_an_asynchronous_collective_that_goes_on_through_a_loop_is_counted_once():
    """The gather of the inner loop, of 15 runs, was started before the outer one."""
    gather = next(line for line in NESTED.splitlines() if "channel_id=7" in line)
    started = NESTED.replace("  %zero =", f"{gather.replace('%g =', '%g0 =').replace('%x', '%arg')}\n  %zero =")
    assert [(c.kind, times) for c, times in program.read_step(started, MESH).moved] == [
        ("all-gather", 1),
        ("all-reduce", 3),
    ]


def test_a_reduce_scatter_is_sized_by_its_input_in_both_spellings():
    scatter = """
%all-reduce-scatter.3 (p: f32[16,8]) -> f32[4,8] {
  %p = f32[16,8]{1,0:T(8,128)} parameter(0)
  %r = f32[16,8]{1,0:T(8,128)} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %z = s32[] constant(0)
  ROOT %d = f32[4,8]{1,0:T(8,128)} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={4,8}
}
"""
    text = entry(
        "%a = f32[16,8]{1,0:T(8,128)} parameter(0)",
        "%b = f32[4,8]{1,0:T(8,128)} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3",
        "ROOT %c = f32[4,8]{1,0:T(8,128)} reduce-scatter(%a), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}",
        before=scatter,
    )
    assert [(c.kind, c.bytes) for c, _ in program.read_step(text, MESH).moved] == [("reduce-scatter", 512)] * 2


def test_a_slice_is_charged_for_what_it_takes_and_an_update_for_what_it_writes():
    """Row 0 of f32[100, 8] is read by a fusion and written into another f32[100, 8]: 32 bytes each, of 3,200."""
    fused = """
%take_and_put (p: f32[100,8], q: f32[100,8], i: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0:T(8,128)} parameter(0)
  %q = f32[100,8]{1,0:T(8,128)} parameter(1)
  %i = s32[] parameter(2)
  %b = f32[100,8]{1,0:T(8,128)} bitcast(%p)
  %row = f32[1,8]{1,0:T(8,128)} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %put = f32[100,8]{1,0:T(8,128)} dynamic-update-slice(%q, %row, %i, %i)
}
"""
    text = entry(
        "%p = f32[100,8]{1,0:T(8,128)} parameter(0)",
        "%q = f32[100,8]{1,0:T(8,128)} parameter(1)",
        "%i = s32[]{:T(128)S(6)} parameter(2)",
        "ROOT %f = f32[100,8]{1,0:T(8,128)} fusion(%p, %q, %i), kind=kLoop, calls=%take_and_put",
        before=fused,
    )
    assert program.read_step(text, MESH).hbm_bytes == 32 + 32


def test_an_operand_that_is_only_renamed_on_the_way_is_read():
    """A product whose right side, f32[8, 8], goes through a fusion that is nothing but a bitcast: 256 bytes each."""
    fused = """
%rename (r: f32[8,8]) -> f32[8,8] {
  %r = f32[8,8]{1,0:T(8,128)} parameter(0)
  ROOT %b = f32[8,8]{1,0:T(8,128)} bitcast(%r)
}

%product (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0:T(8,128)} parameter(0)
  %q = f32[8,8]{1,0:T(8,128)} parameter(1)
  %f = f32[8,8]{1,0:T(8,128)} fusion(%q), kind=kLoop, calls=%rename
  ROOT %c = f32[8,8]{1,0:T(8,128)} convolution(%p, %f), dim_labels=bf_io->bf
}
"""
    text = entry(
        "%x = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)",
        "%w = f32[8,8]{1,0:T(8,128)} parameter(1)",
        "ROOT %y = f32[8,8]{1,0:T(8,128)S(1)} fusion(%x, %w), kind=kOutput, calls=%product",
        before=fused,
    )
    assert program.read_step(text, MESH).hbm_bytes == 256


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "flops"),
    [
        # [512, 128] times [128, 64], as a convolution without a window.
        ((512, 128), (128, 64), (512, 64), "dim_labels=bf_io->bf", 2 * 512 * 128 * 64),
        # [2 * 256, 128] times [128, 4 * 32]: the four heads are a window of four over an axis of one, padded by three.
        (
            (2, 256, 128, 1),
            (4, 32, 128, 1),
            (2, 256, 4, 32),
            "window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            2 * 512 * 128 * 128,
        ),
        # [128, 32] times [32, 256] for each of 2 x 4: batches are spread out by dilation and met by strides.
        (
            (2, 4, 128, 32),
            (2, 4, 256, 32),
            (2, 4, 128, 256),
            "window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=01bf_01oi->01bf",
            2 * 8 * 128 * 32 * 256,
        ),
        (
            (2, 4, 128, 32),
            (2, 4, 256, 128),
            (2, 4, 32, 256),
            "window={size=2x4 stride=2x4 pad=1_1x3_3 lhs_dilate=1x3 rhs_reversal=1x1}, dim_labels=01fb_01oi->01bf",
            2 * 8 * 32 * 128 * 256,
        ),
    ],
)
def test_matrix_products_that_are_written_as_convolutions(left, right, out, attributes, flops):
    def shape(name, dims, op):
        return f"%{name} = bf16[{','.join(map(str, dims))}]{{1,0:T(8,128)(2,1)}} {op}"

    text = entry(
        shape("l", left, "parameter(0)"),
        shape("r", right, "parameter(1)"),
        f"ROOT {shape('o', out, 'convolution(%l, %r)')}, {attributes}",
    )
    assert program.read_step(text, MESH).flops == flops


def test_a_program_compiled_here():
    """A scan of 6 products of [32, 32]: XLA's own count takes the body once, ours six times."""

    def f(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 32), (6, 32, 32))]
    compiled = jax.jit(f).lower(*shapes).compile()
    step = program.read_step(compiled.as_text(), {"data": 1, "fsdp": 1, "tensor": 1})
    assert step.flops == 6 * 2 * 32**3
    assert compiled.cost_analysis()["flops"] < 2 * 2 * 32**3
    assert step.moved == ()
