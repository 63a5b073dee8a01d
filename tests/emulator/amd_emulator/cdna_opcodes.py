"""The opcodes of gfx90a, gfx942 and gfx950, by table: those of AMD's "Instinct MI200", "Instinct MI300" and "CDNA 4"
instruction set manuals. opcodes.py says how operands are written."""

from __future__ import annotations

OPCODES: dict[tuple[str, str], dict[str, str]] = {
    ("SOP2", "cdna"): {
        "1 1 1": """
            0x00 s_add_u32  0x01 s_sub_u32  0x02 s_add_i32  0x03 s_sub_i32  0x04 s_addc_u32  0x05 s_subb_u32
            0x06 s_min_i32  0x07 s_min_u32  0x08 s_max_i32  0x09 s_max_u32  0x0a s_cselect_b32  0x0c s_and_b32
            0x0e s_or_b32  0x10 s_xor_b32  0x12 s_andn2_b32  0x14 s_orn2_b32  0x16 s_nand_b32  0x18 s_nor_b32
            0x1a s_xnor_b32  0x1c s_lshl_b32  0x1e s_lshr_b32  0x20 s_ashr_i32  0x22 s_bfm_b32  0x24 s_mul_i32
            0x25 s_bfe_u32  0x26 s_bfe_i32  0x2a s_absdiff_i32  0x2c s_mul_hi_u32  0x2d s_mul_hi_i32
            0x2e s_lshl1_add_u32  0x2f s_lshl2_add_u32  0x30 s_lshl3_add_u32  0x31 s_lshl4_add_u32
            0x32 s_pack_ll_b32_b16  0x33 s_pack_lh_b32_b16  0x34 s_pack_hh_b32_b16
        """,
        "2 2 2": """
            0x0b s_cselect_b64  0x0d s_and_b64  0x0f s_or_b64  0x11 s_xor_b64  0x13 s_andn2_b64  0x15 s_orn2_b64
            0x17 s_nand_b64  0x19 s_nor_b64  0x1b s_xnor_b64
        """,
        "2 2 1": """
            0x1d s_lshl_b64  0x1f s_lshr_b64  0x21 s_ashr_i64  0x27 s_bfe_u64  0x28 s_bfe_i64
        """,
        "2 1 1": """
            0x23 s_bfm_b64
        """,
    },
    ("SOPK", "cdna"): {
        "1 k": """
            0x00 s_movk_i32  0x01 s_cmovk_i32  0x02 s_cmpk_eq_i32  0x03 s_cmpk_lg_i32  0x04 s_cmpk_gt_i32
            0x05 s_cmpk_ge_i32  0x06 s_cmpk_lt_i32  0x07 s_cmpk_le_i32  0x08 s_cmpk_eq_u32  0x09 s_cmpk_lg_u32
            0x0a s_cmpk_gt_u32  0x0b s_cmpk_ge_u32  0x0c s_cmpk_lt_u32  0x0d s_cmpk_le_u32  0x0e s_addk_i32
            0x0f s_mulk_i32
        """,
    },
    ("SOPK", "cdna3"): {
        "- k": """
            0x14 s_setreg_imm32_b32
        """,
    },
    ("SOP1", "cdna"): {
        "1 1": """
            0x00 s_mov_b32  0x02 s_cmov_b32  0x04 s_not_b32  0x06 s_wqm_b32  0x08 s_brev_b32
            0x0a s_bcnt0_i32_b32  0x0c s_bcnt1_i32_b32  0x0e s_ff0_i32_b32  0x10 s_ff1_i32_b32
            0x12 s_flbit_i32_b32  0x14 s_flbit_i32  0x16 s_sext_i32_i8  0x17 s_sext_i32_i16
            0x18 s_bitset0_b32  0x1a s_bitset1_b32  0x30 s_abs_i32
        """,
        "2 2": """
            0x01 s_mov_b64  0x03 s_cmov_b64  0x05 s_not_b64  0x07 s_wqm_b64  0x09 s_brev_b64  0x1e s_swappc_b64
            0x20 s_and_saveexec_b64  0x21 s_or_saveexec_b64  0x22 s_xor_saveexec_b64  0x23 s_andn2_saveexec_b64
            0x24 s_orn2_saveexec_b64  0x25 s_nand_saveexec_b64  0x26 s_nor_saveexec_b64
            0x27 s_xnor_saveexec_b64  0x33 s_andn1_saveexec_b64  0x34 s_orn1_saveexec_b64
        """,
        "1 2": """
            0x0b s_bcnt0_i32_b64  0x0d s_bcnt1_i32_b64  0x0f s_ff0_i32_b64  0x11 s_ff1_i32_b64
            0x13 s_flbit_i32_b64  0x15 s_flbit_i32_i64
        """,
        "2 -": """
            0x1c s_getpc_b64
        """,
        "- 2": """
            0x1d s_setpc_b64
        """,
    },
    ("SOPC", "cdna"): {
        "1 1": """
            0x00 s_cmp_eq_i32  0x01 s_cmp_lg_i32  0x02 s_cmp_gt_i32  0x03 s_cmp_ge_i32  0x04 s_cmp_lt_i32
            0x05 s_cmp_le_i32  0x06 s_cmp_eq_u32  0x07 s_cmp_lg_u32  0x08 s_cmp_gt_u32  0x09 s_cmp_ge_u32
            0x0a s_cmp_lt_u32  0x0b s_cmp_le_u32  0x0c s_bitcmp0_b32  0x0d s_bitcmp1_b32
        """,
        "2 1": """
            0x0e s_bitcmp0_b64  0x0f s_bitcmp1_b64
        """,
        "2 2": """
            0x12 s_cmp_eq_u64  0x13 s_cmp_lg_u64
        """,
    },
    ("SOPP", "cdna"): {
        "": """
            0x01 s_endpgm  0x0a s_barrier  0x13 s_icache_inv
        """,
        "k": """
            0x00 s_nop  0x02 s_branch  0x04 s_cbranch_scc0  0x05 s_cbranch_scc1  0x06 s_cbranch_vccz
            0x07 s_cbranch_vccnz
            0x08 s_cbranch_execz  0x09 s_cbranch_execnz  0x0c s_waitcnt  0x0e s_sleep  0x0f s_setprio
        """,
    },
    ("SMEM", "cdna"): {
        "1 2 o": """
            0x00 s_load_dword
        """,
        "2 2 o": """
            0x01 s_load_dwordx2
        """,
        "4 2 o": """
            0x02 s_load_dwordx4
        """,
        "8 2 o": """
            0x03 s_load_dwordx8
        """,
        "16 2 o": """
            0x04 s_load_dwordx16
        """,
        "": """
            0x20 s_dcache_inv  0x21 s_dcache_wb  0x22 s_dcache_inv_vol  0x23 s_dcache_wb_vol
        """,
    },
    ("VOP2", "cdna"): {
        "1 1 1 c": """
            0x00 v_cndmask_b32
        """,
        "1 1 1": """
            0x01 v_add_f32  0x02 v_sub_f32  0x03 v_subrev_f32  0x05 v_mul_f32  0x06 v_mul_i32_i24
            0x08 v_mul_u32_u24  0x0a v_min_f32  0x0b v_max_f32  0x0c v_min_i32  0x0d v_max_i32  0x0e v_min_u32
            0x0f v_max_u32  0x10 v_lshrrev_b32  0x11 v_ashrrev_i32  0x12 v_lshlrev_b32  0x13 v_and_b32
            0x14 v_or_b32  0x15 v_xor_b32  0x1f v_add_f16  0x20 v_sub_f16  0x21 v_subrev_f16  0x22 v_mul_f16
            0x26 v_add_u16  0x27 v_sub_u16  0x28 v_subrev_u16  0x29 v_mul_lo_u16  0x2a v_lshlrev_b16
            0x2b v_lshrrev_b16  0x2c v_ashrrev_i16  0x2d v_max_f16  0x2e v_min_f16  0x2f v_max_u16
            0x30 v_max_i16  0x31 v_min_u16  0x32 v_min_i16  0x33 v_ldexp_f16  0x34 v_add_u32  0x35 v_sub_u32
            0x36 v_subrev_u32  0x3b v_fmac_f32  0x3d v_xnor_b32
        """,
        "2 2 2": """
            0x04 v_fmac_f64
        """,
        "1 m 1 1": """
            0x19 v_add_co_u32  0x1a v_sub_co_u32  0x1b v_subrev_co_u32
        """,
        "1 m 1 1 c": """
            0x1c v_addc_co_u32  0x1d v_subb_co_u32  0x1e v_subbrev_co_u32
        """,
    },
    ("VOP2", "gfx90a"): {
        "1 1 1": """
            0x16 v_mac_f32
        """,
        "1 1 k 1": """
            0x17 v_madmk_f32
        """,
        "1 1 1 k": """
            0x18 v_madak_f32
        """,
    },
    ("VOP2", "cdna3"): {
        "1 1 k 1": """
            0x17 v_fmamk_f32
        """,
        "1 1 1 k": """
            0x18 v_fmaak_f32
        """,
    },
    ("VOP1", "cdna"): {
        "": """
            0x00 v_nop
        """,
        "1 1": """
            0x01 v_mov_b32  0x05 v_cvt_f32_i32  0x06 v_cvt_f32_u32  0x07 v_cvt_u32_f32  0x08 v_cvt_i32_f32
            0x0a v_cvt_f16_f32  0x0b v_cvt_f32_f16  0x11 v_cvt_f32_ubyte0  0x12 v_cvt_f32_ubyte1
            0x13 v_cvt_f32_ubyte2  0x14 v_cvt_f32_ubyte3  0x1b v_fract_f32  0x1c v_trunc_f32  0x1d v_ceil_f32
            0x1e v_rndne_f32  0x1f v_floor_f32  0x20 v_exp_f32  0x21 v_log_f32  0x22 v_rcp_f32
            0x23 v_rcp_iflag_f32  0x24 v_rsq_f32  0x27 v_sqrt_f32  0x29 v_sin_f32  0x2a v_cos_f32
            0x2b v_not_b32  0x2c v_bfrev_b32  0x2d v_ffbh_u32  0x2e v_ffbl_b32  0x33 v_frexp_exp_i32_f32
            0x34 v_frexp_mant_f32  0x39 v_cvt_f16_u16  0x3a v_cvt_f16_i16  0x3b v_cvt_u16_f16
            0x3c v_cvt_i16_f16  0x3d v_rcp_f16  0x3e v_sqrt_f16  0x3f v_rsq_f16  0x40 v_log_f16  0x41 v_exp_f16
            0x42 v_frexp_mant_f16  0x44 v_floor_f16  0x45 v_ceil_f16  0x46 v_trunc_f16  0x47 v_rndne_f16
            0x48 v_fract_f16  0x51 v_swap_b32
        """,
        "S 1": """
            0x02 v_readfirstlane_b32
        """,
        "1 2": """
            0x03 v_cvt_i32_f64  0x0f v_cvt_f32_f64  0x15 v_cvt_u32_f64  0x30 v_frexp_exp_i32_f64
        """,
        "2 1": """
            0x04 v_cvt_f64_i32  0x10 v_cvt_f64_f32  0x16 v_cvt_f64_u32
        """,
        "2 2": """
            0x17 v_trunc_f64  0x18 v_ceil_f64  0x19 v_rndne_f64  0x1a v_floor_f64  0x25 v_rcp_f64
            0x26 v_rsq_f64  0x28 v_sqrt_f64  0x31 v_frexp_mant_f64  0x32 v_fract_f64
        """,
        "a1 a1": """
            0x52 v_accvgpr_mov_b32
        """,
    },
    ("VOP1", "cdna3"): {
        "2 2": """
            0x38 v_mov_b64
        """,
    },
    ("VOP3", "cdna"): {
        "1 1 1 1": """
            0x1c2 v_mad_i32_i24  0x1c3 v_mad_u32_u24  0x1c8 v_bfe_u32  0x1c9 v_bfe_i32  0x1ca v_bfi_b32
            0x1cb v_fma_f32  0x1ce v_alignbit_b32  0x1cf v_alignbyte_b32  0x1d0 v_min3_f32  0x1d1 v_min3_i32
            0x1d2 v_min3_u32  0x1d3 v_max3_f32  0x1d4 v_max3_i32  0x1d5 v_max3_u32  0x1d6 v_med3_f32
            0x1d7 v_med3_i32  0x1d8 v_med3_u32  0x1de v_div_fixup_f32  0x1e2 v_div_fmas_f32  0x1ed v_perm_b32
            0x1f3 v_xad_u32  0x1f4 v_min3_f16  0x1f5 v_min3_i16  0x1f6 v_min3_u16  0x1f7 v_max3_f16
            0x1f8 v_max3_i16  0x1f9 v_max3_u16  0x1fa v_med3_f16  0x1fb v_med3_i16  0x1fc v_med3_u16
            0x1fd v_lshl_add_u32  0x1fe v_add_lshl_u32  0x1ff v_add3_u32  0x200 v_lshl_or_b32
            0x201 v_and_or_b32  0x202 v_or3_b32  0x206 v_fma_f16
        """,
        "2 2 2 2": """
            0x1cc v_fma_f64  0x1df v_div_fixup_f64  0x1e3 v_div_fmas_f64
        """,
        "1 m 1 1 1": """
            0x1e0 v_div_scale_f32
        """,
        "2 m 2 2 2": """
            0x1e1 v_div_scale_f64
        """,
        "2 m 1 1 2": """
            0x1e8 v_mad_u64_u32  0x1e9 v_mad_i64_i32
        """,
        "2 2 2": """
            0x280 v_add_f64  0x281 v_mul_f64  0x282 v_min_f64  0x283 v_max_f64
        """,
        "2 2 1": """
            0x284 v_ldexp_f64
        """,
        "1 1 1": """
            0x285 v_mul_lo_u32  0x286 v_mul_hi_u32  0x287 v_mul_hi_i32  0x288 v_ldexp_f32  0x28a v_writelane_b32
            0x28b v_bcnt_u32_b32  0x28c v_mbcnt_lo_u32_b32  0x28d v_mbcnt_hi_u32_b32  0x293 v_bfm_b32
            0x296 v_cvt_pkrtz_f16_f32  0x29c v_add_i32  0x29d v_sub_i32  0x2a0 v_pack_b32_f16
        """,
        "S 1 1": """
            0x289 v_readlane_b32
        """,
        "2 1 2": """
            0x28f v_lshlrev_b64  0x290 v_lshrrev_b64  0x291 v_ashrrev_i64
        """,
    },
    ("VOP3", "gfx90a"): {
        "1 1 1 1": """
            0x1c1 v_mad_f32
        """,
    },
    ("VOP3", "cdna3"): {
        "2 2 1 2": """
            0x208 v_lshl_add_u64
        """,
        "1 1 1": """
            0x2a2 v_cvt_pk_fp8_f32
        """,
    },
    ("VOP3P", "cdna"): {
        "1 1 1": """
            0x01 v_pk_mul_lo_u16  0x04 v_pk_lshlrev_b16  0x05 v_pk_lshrrev_b16  0x06 v_pk_ashrrev_i16
            0x07 v_pk_max_i16  0x08 v_pk_min_i16  0x0a v_pk_add_u16  0x0b v_pk_sub_u16  0x0c v_pk_max_u16
            0x0d v_pk_min_u16  0x0f v_pk_add_f16  0x10 v_pk_mul_f16  0x11 v_pk_min_f16  0x12 v_pk_max_f16
        """,
        "1 1 1 1": """
            0x09 v_pk_mad_u16  0x0e v_pk_fma_f16  0x20 v_fma_mix_f32  0x21 v_fma_mixlo_f16  0x22 v_fma_mixhi_f16
            0x23 v_dot2_f32_f16
        """,
        "2 2 2 2": """
            0x30 v_pk_fma_f32
        """,
        "2 2 2": """
            0x31 v_pk_mul_f32  0x32 v_pk_add_f32  0x33 v_pk_mov_b32
        """,
        "1 a1": """
            0x58 v_accvgpr_read_b32
        """,
        "a1 1": """
            0x59 v_accvgpr_write_b32
        """,
    },
    ("VOP3P", "gfx90a"): {
        "16 1 1 16": """
            0x44 v_mfma_f32_32x32x2f32  0x54 v_mfma_i32_32x32x8i8
        """,
        "4 1 1 4": """
            0x45 v_mfma_f32_16x16x4f32  0x55 v_mfma_i32_16x16x16i8
        """,
        "16 2 2 16": """
            0x4c v_mfma_f32_32x32x8f16  0x66 v_mfma_f32_32x32x8bf16_1k
        """,
        "4 2 2 4": """
            0x4d v_mfma_f32_16x16x16f16  0x67 v_mfma_f32_16x16x16bf16_1k
        """,
    },
    ("VOP3P", "cdna3"): {
        "4 2 2 4": """
            0x4d v_mfma_f32_16x16x16_f16  0x57 v_mfma_i32_16x16x32_i8
            0x61 v_mfma_f32_16x16x16_bf16
        """,
        "16 2 2 16": """
            0x4c v_mfma_f32_32x32x8_f16  0x56 v_mfma_i32_32x32x16_i8
            0x60 v_mfma_f32_32x32x8_bf16
        """,
        "16 1 1 16": """
            0x44 v_mfma_f32_32x32x2_f32
        """,
        "4 1 1 4": """
            0x45 v_mfma_f32_16x16x4_f32
        """,
    },
    ("DS", "cdna"): {
        "1 1": """
            0x0d ds_write_b32  0x1e ds_write_b8  0x1f ds_write_b16  0x36 ds_read_b32  0x39 ds_read_i8
            0x3a ds_read_u8  0x3b ds_read_i16  0x3c ds_read_u16  0x3d ds_swizzle_b32  0x54 ds_write_b8_d16_hi
            0x55 ds_write_b16_d16_hi  0x56 ds_read_u8_d16  0x57 ds_read_u8_d16_hi  0x58 ds_read_i8_d16
            0x59 ds_read_i8_d16_hi  0x5a ds_read_u16_d16  0x5b ds_read_u16_d16_hi
        """,
        "1 1 1": """
            0x0e ds_write2_b32  0x0f ds_write2st64_b32  0x3e ds_permute_b32  0x3f ds_bpermute_b32
        """,
        "2 1": """
            0x37 ds_read2_b32  0x38 ds_read2st64_b32  0x76 ds_read_b64
        """,
        "1 2": """
            0x4d ds_write_b64
        """,
        "1 2 2": """
            0x4e ds_write2_b64  0x4f ds_write2st64_b64
        """,
        "4 1": """
            0x77 ds_read2_b64  0x78 ds_read2st64_b64  0xff ds_read_b128
        """,
        "1 3": """
            0xde ds_write_b96
        """,
        "1 4": """
            0xdf ds_write_b128
        """,
        "3 1": """
            0xfe ds_read_b96
        """,
    },
    ("MUBUF", "cdna"): {
        "": """
            0x28 buffer_wbl2
        """,
    },
    ("MUBUF", "gfx90a"): {
        "": """
            0x3e buffer_wbinvl1  0x3f buffer_wbinvl1_vol
        """,
    },
    ("MUBUF", "cdna3"): {
        "": """
            0x29 buffer_inv
        """,
    },
    ("VOP1", "gfx942"): {  # of e4m3fnuz; CDNA 4 reads OCP's e4m3 with the same opcodes
        "1 1": """
            0x54 v_cvt_f32_fp8
        """,
        "2 1": """
            0x56 v_cvt_pk_f32_fp8
        """,
    },
    ("VOP3P", "gfx942"): {
        "4 2 2 4": """
            0x3e v_mfma_f32_16x16x8_xf32
        """,
        "16 2 2 16": """
            0x3f v_mfma_f32_32x32x4_xf32
        """,
    },
    ("VOP3", "gfx950"): {
        "1 1 1 1": """
            0x233 v_bitop3_b16  0x234 v_bitop3_b32  0x235 v_cvt_scalef32_pk_fp8_f32  0x2a8 v_minimum3_f32
            0x2a9 v_maximum3_f32
        """,
        "1 1 1": """
            0x248 v_cvt_scalef32_pk_f16_fp8  0x267 v_cvt_pk_f16_f32  0x268 v_cvt_pk_bf16_f32
            0x269 v_cvt_scalef32_pk_bf16_fp8
        """,
    },
    ("VOP3P", "gfx950"): {
        "4 4 4 4": """
            0x35 v_mfma_f32_16x16x32_bf16  0x54 v_mfma_f32_16x16x32_f16
        """,
        "16 4 4 16": """
            0x37 v_mfma_f32_32x32x16_bf16  0x55 v_mfma_f32_32x32x16_f16
        """,
    },
    ("DS", "gfx950"): {
        "2 1": """
            0xe2 ds_read_b64_tr_b8  0xe3 ds_read_b64_tr_b16
        """,
    },
    ("VOP1", "gfx950"): {
        "1 1": """
            0x59 v_permlane16_swap_b32  0x5a v_permlane32_swap_b32
        """,
    },
}
CONDITIONS = {  # of comparisons: the low bits of the opcode
    "f": {1: "lt", 2: "eq", 3: "le", 4: "gt", 5: "lg", 6: "ge", 7: "o", 8: "u"}
    | {9: "nge", 10: "nlg", 11: "ngt", 12: "nle", 13: "neq", 14: "nlt"},
    "i": {1: "lt", 2: "eq", 3: "le", 4: "gt", 5: "ne", 6: "ge"},
}
_COMPARED = {"f16": 0x20, "f32": 0x40, "f64": 0x60, "i16": 0xA0, "u16": 0xA8, "i32": 0xC0, "u32": 0xC8} | {
    "i64": 0xE0,
    "u64": 0xE8,
}


# flat_, global_ and buffer_ instructions share their opcodes
MEMORY = {
    first + i: name
    for first, names in (
        (
            0x10,
            "load_ubyte load_sbyte load_ushort load_sshort load_dword load_dwordx2 load_dwordx3 load_dwordx4",
        ),
        (
            0x18,
            "store_byte store_byte_d16_hi store_short store_short_d16_hi store_dword store_dwordx2 store_dwordx3",
        ),
        (
            0x1F,
            "store_dwordx4 load_ubyte_d16 load_ubyte_d16_hi load_sbyte_d16 load_sbyte_d16_hi load_short_d16",
        ),
        (0x25, "load_short_d16_hi"),
        (
            0x40,
            "atomic_swap atomic_cmpswap atomic_add atomic_sub atomic_smin atomic_umin atomic_smax atomic_umax",
        ),
        (0x48, "atomic_and atomic_or atomic_xor"),
        (0x4D, "atomic_add_f32 atomic_pk_add_f16 atomic_add_f64"),
        (0x60, "atomic_swap_x2 atomic_cmpswap_x2 atomic_add_x2"),
    )
    for i, name in enumerate(names.split())
}


def comparisons() -> dict[int, tuple[str, tuple[str, ...]]]:
    """VOPC: names and operands by opcode."""
    found = {}
    for executes, suffix in ((0, ""), (0x10, "x")):
        for kind, first in _COMPARED.items():
            registers = "2" if kind.endswith("64") else "1"
            for number, condition in CONDITIONS["f" if kind[0] == "f" else "i"].items():
                found[first + executes + number] = (
                    f"v_cmp{suffix}_{condition}_{kind}",
                    ("m", registers, registers),
                )
    for opcode, kind in ((0x10, "f32"), (0x12, "f64"), (0x14, "f16")):
        found[opcode] = (f"v_cmp_class_{kind}", ("m", "2" if kind == "f64" else "1", "1"))
    return found
