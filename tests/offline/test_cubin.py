"""Reading SASS and PTX: widths by instruction, and through which parameter a store goes."""

from __future__ import annotations

from fp8graph.offline import kernels

# As Triton writes it: addresses are sums in several steps; the loop moves the pointer of parameter 1.
PTX = """
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	ld.param.b64 	%rd3, [kernel_param_2];
	ld.param.b32 	%r1, [kernel_param_3];
	cvt.s64.s32 	%rd4, %r1;
	mad.wide.s32 	%rd5, %r1, 4, %rd3;
	mov.b64 	%rd6, %rd2;
$L__BB0_1:
	add.s64 	%rd7, %rd6, %rd4;
	@%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 0 ];
	@%p1 st.global.v2.b32 [ %rd7 + 0 ], { %r2, %r3 };
	@%p1 st.global.L1::evict_last.b8 [ %rd7 + 16 ], { %rs1 };
	st.global.v4.b32 	[%rd5+64], {%r2, %r3, %r4, %r5};
	add.s64 	%rd6, %rd6, 64;
	@%p2 bra 	$L__BB0_1;
"""


def test_stores_through_a_parameter() -> None:
    assert kernels._stores_to(PTX, [False, True, False, False]) == [8, 1]
    assert kernels._stores_to(PTX, [False, False, True, False]) == [16]
    assert kernels._stores_to(PTX, [True, False, False, False]) == []


def test_stores_through_one_of_several_parameters() -> None:
    """Two kernels in one launch that store by the same instruction, as triton 3.9 compiles them."""
    ptx = """
	mov.b32 	%r19, kernel_param_0;
	mov.b32 	%r20, kernel_param_2;
	selp.b32 	%r21, %r19, %r20, %p3;
	ld.param.b64 	%rd6, [%r21];
	mad.wide.s32 	%rd4, %r5, 2, %rd6;
	st.global.v2.b32 [ %rd4 + 0 ], { %r13, %r14 };
"""
    assert kernels._stores_to(ptx, [True, False, True]) == [8]
    assert kernels._stores_to(ptx, [False, True, False]) == []


def test_widths_of_instructions() -> None:
    code = ["STG.E", "STG.E.U8", "STG.E.EF.64", "STG.E.ENL2.256", "STS.128", "LDG.E.LTC128B.128.CONSTANT", "LDG.E.S16"]
    assert kernels._widths(code, ["STG"]) == {1: 1, 4: 1, 8: 1, 32: 1}
    assert kernels._widths(code, ["LDG", "LDGSTS"]) == {2: 1, 16: 1}


def test_instructions_of_a_listing() -> None:
    listing = """
        /*0010*/                   S2R R13, SR_TID.X ;            /* 0x00000000000d7919 */
                                                                  /* 0x000e6e0000002100 */
        /*0140*/              @!P2 LDG.E.128 R8, desc[UR6][R4.64] ;  /* 0x000000060408a981 */
        /*10150*/             @UP0 UIADD3 UR4, UR4, 0x1, URZ ;    /* 0x000000060408a981 */
        /*10160*/                  NOP;                           /* 0x0000000000007918 */
    """
    assert kernels._INSTRUCTION.findall(listing) == ["S2R", "LDG.E.128", "UIADD3", "NOP"]
