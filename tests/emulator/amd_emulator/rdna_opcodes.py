"""The opcodes of RDNA 3, 3.5 and 4 (gfx11, gfx12), by table: those of AMD's instruction set manuals of these
names. Later tables add to earlier ones and rename. opcodes.py says how operands are written."""

from __future__ import annotations

from .cdna_opcodes import CONDITIONS

OPCODES: dict[tuple[str, str], dict[str, str]] = {
    ("SOP2", "rdna"): {
        "1 1 1": """
            0x00 s_add_u32  0x01 s_sub_u32  0x02 s_add_i32  0x03 s_sub_i32  0x04 s_addc_u32  0x05 s_subb_u32
            0x06 s_absdiff_i32  0x08 s_lshl_b32  0x0a s_lshr_b32  0x0c s_ashr_i32  0x0e s_lshl1_add_u32
            0x0f s_lshl2_add_u32  0x10 s_lshl3_add_u32  0x11 s_lshl4_add_u32  0x12 s_min_i32  0x13 s_min_u32
            0x14 s_max_i32  0x15 s_max_u32  0x16 s_and_b32  0x18 s_or_b32  0x1a s_xor_b32  0x1c s_nand_b32
            0x1e s_nor_b32  0x20 s_xnor_b32  0x22 s_and_not1_b32  0x24 s_or_not1_b32  0x26 s_bfe_u32
            0x27 s_bfe_i32  0x2a s_bfm_b32  0x2c s_mul_i32  0x2d s_mul_hi_u32  0x2e s_mul_hi_i32
            0x30 s_cselect_b32  0x32 s_pack_ll_b32_b16  0x33 s_pack_lh_b32_b16  0x34 s_pack_hh_b32_b16
        """,
        "2 2 2": """
            0x17 s_and_b64  0x19 s_or_b64  0x1b s_xor_b64  0x1d s_nand_b64  0x1f s_nor_b64  0x21 s_xnor_b64
            0x23 s_and_not1_b64  0x25 s_or_not1_b64  0x31 s_cselect_b64
        """,
        "2 2 1": """
            0x09 s_lshl_b64  0x0b s_lshr_b64  0x0d s_ashr_i64  0x28 s_bfe_u64  0x29 s_bfe_i64
        """,
        "2 1 1": """
            0x2b s_bfm_b64
        """,
    },
    ("SOP2", "rdna4"): {
        "1 1 1": """
            0x00 s_add_co_u32  0x01 s_sub_co_u32  0x02 s_add_co_i32  0x03 s_sub_co_i32  0x04 s_add_co_ci_u32
            0x05 s_sub_co_ci_u32  0x42 s_min_num_f32  0x43 s_max_num_f32
        """,
        "2 2 2": """
            0x53 s_add_nc_u64  0x54 s_sub_nc_u64  0x55 s_mul_u64
        """,
    },
    ("SOP2", "scalar floats"): {
        "1 1 1": """
            0x40 s_add_f32  0x41 s_sub_f32  0x42 s_min_f32  0x43 s_max_f32  0x44 s_mul_f32  0x47 s_fmac_f32
        """,
        "1 1 1 k": """
            0x45 s_fmaak_f32
        """,
        "1 1 k 1": """
            0x46 s_fmamk_f32
        """,
    },
    ("SOPK", "rdna"): {
        "1 k": """
            0x00 s_movk_i32  0x02 s_cmovk_i32  0x0f s_addk_i32  0x10 s_mulk_i32
        """,
        "- k": """
            0x13 s_setreg_imm32_b32
        """,
    },
    ("SOPK", "rdna3"): {
        "1 k": """
            0x03 s_cmpk_eq_i32  0x04 s_cmpk_lg_i32  0x05 s_cmpk_gt_i32  0x06 s_cmpk_ge_i32  0x07 s_cmpk_lt_i32
            0x08 s_cmpk_le_i32  0x09 s_cmpk_eq_u32  0x0a s_cmpk_lg_u32  0x0b s_cmpk_gt_u32  0x0c s_cmpk_ge_u32
            0x0d s_cmpk_lt_u32  0x0e s_cmpk_le_u32  0x18 s_waitcnt_vscnt
        """,
    },
    ("SOPK", "rdna4"): {
        "1 k": """
            0x0f s_addk_co_i32
        """,
    },
    ("SOP1", "rdna"): {
        "1 1": """
            0x00 s_mov_b32  0x02 s_cmov_b32  0x04 s_brev_b32  0x08 s_ctz_i32_b32  0x0a s_clz_i32_u32
            0x0c s_cls_i32  0x0e s_sext_i32_i8  0x0f s_sext_i32_i16  0x10 s_bitset0_b32  0x12 s_bitset1_b32
            0x15 s_abs_i32  0x16 s_bcnt0_i32_b32  0x18 s_bcnt1_i32_b32  0x1c s_wqm_b32  0x1e s_not_b32
            0x20 s_and_saveexec_b32  0x22 s_or_saveexec_b32  0x24 s_xor_saveexec_b32  0x26 s_nand_saveexec_b32
            0x28 s_nor_saveexec_b32  0x2a s_xnor_saveexec_b32  0x2c s_and_not0_saveexec_b32
            0x2e s_or_not0_saveexec_b32  0x30 s_and_not1_saveexec_b32  0x32 s_or_not1_saveexec_b32
        """,
        "2 2": """
            0x01 s_mov_b64  0x03 s_cmov_b64  0x05 s_brev_b64  0x1d s_wqm_b64  0x1f s_not_b64
            0x49 s_swappc_b64
        """,
        "1 2": """
            0x09 s_ctz_i32_b64  0x0b s_clz_i32_u64  0x0d s_cls_i32_i64  0x17 s_bcnt0_i32_b64
            0x19 s_bcnt1_i32_b64
        """,
        "2 -": """
            0x47 s_getpc_b64
        """,
        "- 2": """
            0x48 s_setpc_b64
        """,
    },
    ("SOP1", "rdna4"): {
        "- b": """
            0x4e s_barrier_signal
        """,
    },
    ("SOP1", "scalar floats"): {
        "1 1": """
            0x60 s_ceil_f32  0x61 s_floor_f32  0x62 s_trunc_f32  0x63 s_rndne_f32  0x64 s_cvt_f32_i32
            0x65 s_cvt_f32_u32  0x66 s_cvt_i32_f32  0x67 s_cvt_u32_f32  0x68 s_cvt_f16_f32  0x69 s_cvt_f32_f16
        """,
    },
    ("SOPC", "rdna"): {
        "1 1": """
            0x00 s_cmp_eq_i32  0x01 s_cmp_lg_i32  0x02 s_cmp_gt_i32  0x03 s_cmp_ge_i32  0x04 s_cmp_lt_i32
            0x05 s_cmp_le_i32  0x06 s_cmp_eq_u32  0x07 s_cmp_lg_u32  0x08 s_cmp_gt_u32  0x09 s_cmp_ge_u32
            0x0a s_cmp_lt_u32  0x0b s_cmp_le_u32  0x0c s_bitcmp0_b32  0x0d s_bitcmp1_b32
        """,
        "2 1": """
            0x0e s_bitcmp0_b64  0x0f s_bitcmp1_b64
        """,
        "2 2": """
            0x10 s_cmp_eq_u64  0x11 s_cmp_lg_u64
        """,
    },
    ("SOPC", "scalar floats"): {
        "1 1": """
            0x41 s_cmp_lt_f32  0x42 s_cmp_eq_f32  0x43 s_cmp_le_f32  0x44 s_cmp_gt_f32  0x45 s_cmp_lg_f32
            0x46 s_cmp_ge_f32  0x47 s_cmp_o_f32  0x48 s_cmp_u_f32  0x49 s_cmp_nge_f32  0x4a s_cmp_nlg_f32
            0x4b s_cmp_ngt_f32  0x4c s_cmp_nle_f32  0x4d s_cmp_neq_f32  0x4e s_cmp_nlt_f32
        """,
    },
    ("SOPP", "rdna"): {
        "": """
            0x0a s_wait_idle  0x1f s_code_end  0x30 s_endpgm  0x3c s_icache_inv
        """,
        "k": """
            0x00 s_nop  0x03 s_sleep  0x05 s_clause  0x07 s_delay_alu  0x08 s_waitcnt_depctr  0x09 s_waitcnt
            0x20 s_branch  0x21 s_cbranch_scc0  0x22 s_cbranch_scc1  0x23 s_cbranch_vccz  0x24 s_cbranch_vccnz
            0x25 s_cbranch_execz  0x26 s_cbranch_execnz  0x35 s_setprio  0x36 s_sendmsg
        """,
    },
    ("SOPP", "rdna3"): {
        "": """
            0x3d s_barrier
        """,
        "k": """
            0x04 s_set_inst_prefetch_distance
        """,
    },
    ("SOPP", "rdna4"): {
        "k": """
            0x08 s_wait_alu  0x14 s_barrier_wait  0x40 s_wait_loadcnt  0x41 s_wait_storecnt
            0x42 s_wait_samplecnt  0x43 s_wait_bvhcnt  0x44 s_wait_expcnt  0x46 s_wait_dscnt
            0x47 s_wait_kmcnt  0x48 s_wait_loadcnt_dscnt  0x49 s_wait_storecnt_dscnt
        """,
    },
    ("SMEM", "rdna"): {
        "1 2 o": """
            0x00 s_load_b32
        """,
        "2 2 o": """
            0x01 s_load_b64
        """,
        "4 2 o": """
            0x02 s_load_b128
        """,
        "8 2 o": """
            0x03 s_load_b256
        """,
        "16 2 o": """
            0x04 s_load_b512
        """,
        "": """
            0x21 s_dcache_inv
        """,
    },
    ("SMEM", "rdna3"): {
        "": """
            0x20 s_gl1_inv
        """,
    },
    ("SMEM", "rdna4"): {
        "1 2 o": """
            0x08 s_load_i8  0x09 s_load_u8  0x0a s_load_i16  0x0b s_load_u16
        """,
        "3 2 o": """
            0x05 s_load_b96
        """,
    },
    ("VOP2", "rdna"): {
        "1 1 1 c": """
            0x01 v_cndmask_b32
        """,
        "1 1 1": """
            0x03 v_add_f32  0x04 v_sub_f32  0x05 v_subrev_f32  0x08 v_mul_f32  0x09 v_mul_i32_i24
            0x0a v_mul_hi_i32_i24  0x0b v_mul_u32_u24  0x0c v_mul_hi_u32_u24  0x11 v_min_i32  0x12 v_max_i32
            0x13 v_min_u32  0x14 v_max_u32  0x18 v_lshlrev_b32  0x19 v_lshrrev_b32  0x1a v_ashrrev_i32
            0x1b v_and_b32  0x1c v_or_b32  0x1d v_xor_b32  0x1e v_xnor_b32  0x25 v_add_nc_u32
            0x26 v_sub_nc_u32  0x27 v_subrev_nc_u32  0x2b v_fmac_f32  0x2f v_cvt_pk_rtz_f16_f32
        """,
        "h h h": """
            0x32 v_add_f16  0x33 v_sub_f16  0x34 v_subrev_f16  0x35 v_mul_f16  0x36 v_fmac_f16
            0x3b v_ldexp_f16
        """,
        "1 m 1 1 c": """
            0x20 v_add_co_ci_u32  0x21 v_sub_co_ci_u32  0x22 v_subrev_co_ci_u32
        """,
        "1 1 k 1": """
            0x2c v_fmamk_f32
        """,
        "1 1 1 k": """
            0x2d v_fmaak_f32
        """,
    },
    ("VOP2", "rdna3"): {
        "1 1 1": """
            0x0f v_min_f32  0x10 v_max_f32
        """,
        "h h h": """
            0x39 v_max_f16  0x3a v_min_f16
        """,
    },
    ("VOP2", "rdna4"): {
        "1 1 1": """
            0x15 v_min_num_f32  0x16 v_max_num_f32
        """,
        "h h h": """
            0x30 v_min_num_f16  0x31 v_max_num_f16
        """,
        "2 2 2": """
            0x02 v_add_f64  0x06 v_mul_f64  0x0d v_min_num_f64  0x0e v_max_num_f64
        """,
        "2 1 2": """
            0x1f v_lshlrev_b64
        """,
    },
    ("VOP1", "rdna"): {
        "": """
            0x00 v_nop
        """,
        "1 1": """
            0x01 v_mov_b32  0x05 v_cvt_f32_i32  0x06 v_cvt_f32_u32  0x07 v_cvt_u32_f32  0x08 v_cvt_i32_f32
            0x11 v_cvt_f32_ubyte0  0x12 v_cvt_f32_ubyte1  0x13 v_cvt_f32_ubyte2  0x14 v_cvt_f32_ubyte3
            0x20 v_fract_f32  0x21 v_trunc_f32  0x22 v_ceil_f32  0x23 v_rndne_f32  0x24 v_floor_f32
            0x25 v_exp_f32  0x27 v_log_f32  0x2a v_rcp_f32  0x2b v_rcp_iflag_f32  0x2e v_rsq_f32
            0x33 v_sqrt_f32  0x35 v_sin_f32  0x36 v_cos_f32  0x37 v_not_b32  0x38 v_bfrev_b32
            0x39 v_clz_i32_u32  0x3a v_ctz_i32_b32  0x3f v_frexp_exp_i32_f32  0x40 v_frexp_mant_f32
            0x65 v_swap_b32
        """,
        "h 1": """
            0x0a v_cvt_f16_f32
        """,
        "1 h": """
            0x0b v_cvt_f32_f16
        """,
        "h h": """
            0x50 v_cvt_f16_u16  0x51 v_cvt_f16_i16  0x52 v_cvt_u16_f16  0x53 v_cvt_i16_f16  0x54 v_rcp_f16
            0x55 v_sqrt_f16  0x56 v_rsq_f16  0x57 v_log_f16  0x58 v_exp_f16  0x59 v_frexp_mant_f16
            0x5b v_floor_f16  0x5c v_ceil_f16  0x5d v_trunc_f16  0x5e v_rndne_f16  0x5f v_fract_f16
        """,
        "S 1": """
            0x02 v_readfirstlane_b32
        """,
        "1 2": """
            0x03 v_cvt_i32_f64  0x0f v_cvt_f32_f64  0x15 v_cvt_u32_f64  0x3c v_frexp_exp_i32_f64
        """,
        "2 1": """
            0x04 v_cvt_f64_i32  0x10 v_cvt_f64_f32  0x16 v_cvt_f64_u32
        """,
        "2 2": """
            0x17 v_trunc_f64  0x18 v_ceil_f64  0x19 v_rndne_f64  0x1a v_floor_f64  0x2f v_rcp_f64
            0x31 v_rsq_f64  0x34 v_sqrt_f64  0x3d v_frexp_mant_f64  0x3e v_fract_f64
        """,
    },
    ("VOP1", "rdna3"): {
        "h h": """
            0x1c v_mov_b16
        """,
    },
    ("VOP3", "rdna"): {
        "1 1 1 1": """
            0x20a v_mad_i32_i24  0x20b v_mad_u32_u24  0x210 v_bfe_u32  0x211 v_bfe_i32  0x212 v_bfi_b32
            0x213 v_fma_f32  0x216 v_alignbit_b32  0x217 v_alignbyte_b32  0x21a v_min3_i32  0x21b v_min3_u32
            0x21d v_max3_i32  0x21e v_max3_u32  0x220 v_med3_i32  0x221 v_med3_u32  0x227 v_div_fixup_f32
            0x237 v_div_fmas_f32  0x240 v_xor3_b32  0x244 v_perm_b32  0x245 v_xad_u32  0x246 v_lshl_add_u32
            0x247 v_add_lshl_u32  0x255 v_add3_u32  0x256 v_lshl_or_b32  0x257 v_and_or_b32  0x258 v_or3_b32
            0x25b v_permlane16_b32  0x25c v_permlanex16_b32  0x262 v_maxmin_u32  0x263 v_minmax_u32
            0x264 v_maxmin_i32  0x265 v_minmax_i32
        """,
        "h h h h": """
            0x248 v_fma_f16  0x24a v_min3_i16  0x24b v_min3_u16  0x24d v_max3_i16  0x24e v_max3_u16
            0x250 v_med3_i16  0x251 v_med3_u16
        """,
        "2 2 2 2": """
            0x214 v_fma_f64  0x228 v_div_fixup_f64  0x238 v_div_fmas_f64
        """,
        "1 m 1 1 1": """
            0x2fc v_div_scale_f32
        """,
        "2 m 2 2 2": """
            0x2fd v_div_scale_f64
        """,
        "2 m 1 1 2": """
            0x2fe v_mad_u64_u32  0x2ff v_mad_i64_i32
        """,
        "1 m 1 1": """
            0x300 v_add_co_u32  0x301 v_sub_co_u32  0x302 v_subrev_co_u32
        """,
        "2 2 1": """
            0x32b v_ldexp_f64
        """,
        "1 1 1": """
            0x31c v_ldexp_f32  0x31d v_bfm_b32  0x31e v_bcnt_u32_b32  0x31f v_mbcnt_lo_u32_b32
            0x320 v_mbcnt_hi_u32_b32  0x325 v_sub_nc_i32  0x326 v_add_nc_i32  0x32c v_mul_lo_u32
            0x32d v_mul_hi_u32  0x32e v_mul_hi_i32  0x361 v_writelane_b32
        """,
        "1 h h": """
            0x311 v_pack_b32_f16
        """,
        "h h h": """
            0x303 v_add_nc_u16  0x304 v_sub_nc_u16  0x305 v_mul_lo_u16  0x309 v_max_u16  0x30a v_max_i16
            0x30b v_min_u16  0x30c v_min_i16  0x338 v_lshlrev_b16  0x339 v_lshrrev_b16  0x33a v_ashrrev_i16
            0x362 v_and_b16  0x363 v_or_b16  0x364 v_xor_b16
        """,
        "S 1 1": """
            0x360 v_readlane_b32
        """,
        "2 1 2": """
            0x33d v_lshrrev_b64  0x33e v_ashrrev_i64
        """,
    },
    ("VOP3", "rdna3"): {
        "1 1 1 1": """
            0x219 v_min3_f32  0x21c v_max3_f32  0x21f v_med3_f32  0x25e v_maxmin_f32  0x25f v_minmax_f32
        """,
        "h h h h": """
            0x249 v_min3_f16  0x24c v_max3_f16  0x24f v_med3_f16
        """,
        "2 2 2": """
            0x327 v_add_f64  0x328 v_mul_f64  0x329 v_min_f64  0x32a v_max_f64
        """,
        "2 1 2": """
            0x33c v_lshlrev_b64
        """,
    },
    ("VOP3", "rdna4"): {
        "1 1 1 1": """
            0x229 v_min3_num_f32  0x22a v_max3_num_f32  0x231 v_med3_num_f32  0x268 v_minmax_num_f32
            0x269 v_maxmin_num_f32
        """,
        "h h h h": """
            0x22b v_min3_num_f16  0x22c v_max3_num_f16  0x232 v_med3_num_f16
        """,
        "2 m 1 1 2": """
            0x2fe v_mad_co_u64_u32  0x2ff v_mad_co_i64_i32
        """,
        "S S": """
            0x280 v_s_exp_f32  0x282 v_s_log_f32  0x284 v_s_rcp_f32  0x286 v_s_rsq_f32  0x288 v_s_sqrt_f32
        """,
    },
    ("VOP3P", "rdna"): {
        "1 1 1": """
            0x01 v_pk_mul_lo_u16  0x04 v_pk_lshlrev_b16  0x05 v_pk_lshrrev_b16  0x06 v_pk_ashrrev_i16
            0x07 v_pk_max_i16  0x08 v_pk_min_i16  0x0a v_pk_add_u16  0x0b v_pk_sub_u16  0x0c v_pk_max_u16
            0x0d v_pk_min_u16  0x0f v_pk_add_f16  0x10 v_pk_mul_f16
        """,
        "1 1 1 1": """
            0x09 v_pk_mad_u16  0x0e v_pk_fma_f16  0x13 v_dot2_f32_f16  0x20 v_fma_mix_f32
            0x21 v_fma_mixlo_f16  0x22 v_fma_mixhi_f16
        """,
    },
    ("VOP3P", "rdna3"): {
        "1 1 1": """
            0x11 v_pk_min_f16  0x12 v_pk_max_f16
        """,
        "8 8 8 8": """
            0x40 v_wmma_f32_16x16x16_f16  0x41 v_wmma_f32_16x16x16_bf16
        """,
    },
    ("VOP3P", "rdna4"): {
        "1 1 1": """
            0x1b v_pk_min_num_f16  0x1c v_pk_max_num_f16
        """,
        "8 4 4 8": """
            0x40 v_wmma_f32_16x16x16_f16  0x41 v_wmma_f32_16x16x16_bf16
        """,
    },
    ("DS", "rdna"): {
        "1 1": """
            0x0d ds_store_b32  0x1e ds_store_b8  0x1f ds_store_b16  0x35 ds_swizzle_b32  0x36 ds_load_b32
            0x39 ds_load_i8  0x3a ds_load_u8  0x3b ds_load_i16  0x3c ds_load_u16  0xa0 ds_store_b8_d16_hi
            0xa1 ds_store_b16_d16_hi  0xa2 ds_load_u8_d16  0xa3 ds_load_u8_d16_hi  0xa4 ds_load_i8_d16
            0xa5 ds_load_i8_d16_hi  0xa6 ds_load_u16_d16  0xa7 ds_load_u16_d16_hi
        """,
        "1 1 1": """
            0x0e ds_store_2addr_b32  0x0f ds_store_2addr_stride64_b32  0xb2 ds_permute_b32
            0xb3 ds_bpermute_b32
        """,
        "2 1": """
            0x37 ds_load_2addr_b32  0x38 ds_load_2addr_stride64_b32  0x76 ds_load_b64
        """,
        "1 2": """
            0x4d ds_store_b64
        """,
        "1 2 2": """
            0x4e ds_store_2addr_b64  0x4f ds_store_2addr_stride64_b64
        """,
        "4 1": """
            0x77 ds_load_2addr_b64  0x78 ds_load_2addr_stride64_b64  0xff ds_load_b128
        """,
        "1 3": """
            0xde ds_store_b96
        """,
        "1 4": """
            0xdf ds_store_b128
        """,
        "3 1": """
            0xfe ds_load_b96
        """,
    },
    ("MUBUF", "rdna3"): {
        "": """
            0x2b buffer_gl0_inv  0x2c buffer_gl1_inv
        """,
    },
    ("GLOBAL", "rdna4"): {
        "": """
            0x2b global_inv  0x2c global_wb
        """,
    },
    ("VOPD", "rdna"): {
        "1 1 1": """
            0x00 v_dual_fmac_f32  0x03 v_dual_mul_f32  0x04 v_dual_add_f32  0x05 v_dual_sub_f32  0x06 v_dual_subrev_f32
            0x10 v_dual_add_nc_u32  0x11 v_dual_lshlrev_b32  0x12 v_dual_and_b32
        """,
        "1 1 1 k": """
            0x01 v_dual_fmaak_f32
        """,
        "1 1 k 1": """
            0x02 v_dual_fmamk_f32
        """,
        "1 1": """
            0x08 v_dual_mov_b32
        """,
        "1 1 1 c": """
            0x09 v_dual_cndmask_b32
        """,
    },
    ("VOPD", "rdna3"): {
        "1 1 1": """
            0x0a v_dual_max_f32  0x0b v_dual_min_f32
        """,
    },
    ("VOPD", "rdna4"): {
        "1 1 1": """
            0x0a v_dual_max_num_f32  0x0b v_dual_min_num_f32
        """,
    },
}
# Of comparisons: the low bits of the opcode are CDNA's
_COMPARED = {"f16": 0x00, "f32": 0x10, "f64": 0x20, "i16": 0x30, "u16": 0x38, "i32": 0x40, "u32": 0x48} | {
    "i64": 0x50,
    "u64": 0x58,
}
_CLASSES = {0x7D: "f16", 0x7E: "f32", 0x7F: "f64"}
# flat_, global_ and buffer_ instructions share their opcodes
_MEMORY = {
    first + i: name
    for first, names in (
        (0x10, "load_u8 load_i8 load_u16 load_i16 load_b32 load_b64 load_b96 load_b128"),
        (0x18, "store_b8 store_b16 store_b32 store_b64 store_b96 store_b128"),
        (0x1E, "load_d16_u8 load_d16_i8 load_d16_b16 load_d16_hi_u8 load_d16_hi_i8 load_d16_hi_b16"),
        (0x24, "store_d16_hi_b8 store_d16_hi_b16"),
        (0x33, "atomic_swap_b32 atomic_cmpswap_b32 atomic_add_u32 atomic_sub_u32"),
        (0x38, "atomic_min_i32 atomic_min_u32 atomic_max_i32 atomic_max_u32"),
        (0x3C, "atomic_and_b32 atomic_or_b32 atomic_xor_b32"),
        (0x41, "atomic_swap_b64 atomic_cmpswap_b64 atomic_add_u64"),
        (0x56, "atomic_add_f32"),
    )
    for i, name in enumerate(names.split())
}


def comparisons() -> dict[int, tuple[str, tuple[str, ...]]]:
    """VOPC: names and operands by opcode. What sets EXEC has no other destination."""
    found = {}
    for executes, suffix, to in ((0, "", "m"), (0x80, "x", "x")):
        for kind, first in _COMPARED.items():
            registers = "2" if kind.endswith("64") else "h" if kind.endswith("16") else "1"
            for number, condition in CONDITIONS["f" if kind[0] == "f" else "i"].items():
                found[executes + first + number] = (
                    f"v_cmp{suffix}_{condition}_{kind}",
                    (to, registers, registers),
                )
        for first, kind in _CLASSES.items():
            tokens = {"f16": ("h", "h"), "f32": ("1", "1"), "f64": ("2", "1")}[kind]
            found[executes + first] = (f"v_cmp{suffix}_class_{kind}", (to, *tokens))
    return found


def memory() -> dict[int, str]:
    return _MEMORY


def _same_operations() -> dict[str, str]:
    """CDNA's names of operations that have others here."""
    same = {
        "s_addc_u32": "s_add_co_ci_u32",
        "s_subb_u32": "s_sub_co_ci_u32",
        "s_addk_i32": "s_addk_co_i32",
        "s_ff1_i32_b32": "s_ctz_i32_b32",
        "s_ff1_i32_b64": "s_ctz_i32_b64",
        "s_flbit_i32_b32": "s_clz_i32_u32",
        "s_flbit_i32_b64": "s_clz_i32_u64",
        "s_flbit_i32": "s_cls_i32",
        "s_flbit_i32_i64": "s_cls_i32_i64",
        "v_ffbh_u32": "v_clz_i32_u32",
        "v_ffbl_b32": "v_ctz_i32_b32",
        "v_cvt_pkrtz_f16_f32": "v_cvt_pk_rtz_f16_f32",
        "v_addc_co_u32": "v_add_co_ci_u32",
        "v_subb_co_u32": "v_sub_co_ci_u32",
        "v_subbrev_co_u32": "v_subrev_co_ci_u32",
        "v_mad_u64_u32": "v_mad_co_u64_u32",
        "v_mad_i64_i32": "v_mad_co_i64_i32",
        **{f"s_{op}": f"s_{op.replace('_', '_co_')}" for op in ("add_u32", "sub_u32", "add_i32", "sub_i32")},
        **{f"v_{op}_{t}": f"v_{op}_nc_{t}" for op in ("add", "sub", "subrev") for t in ("u16", "u32", "i32")},
        **{f"s_{op}n2_b{b}": f"s_{op}_not1_b{b}" for op in ("and", "or") for b in (32, 64)},
        **{
            f"s_{op}n{2 - i}_saveexec_b32": f"s_{op}_not{1 - i}_saveexec_b32"
            for op in ("and", "or")
            for i in (0, 1)
        },
        **{f"s_load_dword{f'x{n}' * (n > 1)}": f"s_load_b{32 * n}" for n in (1, 2, 3, 4, 8, 16)},
    }
    for op in ("min", "max", "min3", "max3", "med3"):
        same |= {f"v_{op}_{kind}": f"v_{op}_num_{kind}" for kind in ("f16", "f32", "f64")}
    same |= {f"v_{op}_f32": f"v_{op}_num_f32" for op in ("minmax", "maxmin")}
    same |= {f"s_{op}_f32": f"s_{op}_num_f32" for op in ("min", "max")}
    same |= {f"v_pk_{op}_f16": f"v_pk_{op}_num_f16" for op in ("min", "max")}
    names = {"u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort", "b8": "byte", "b16": "short"}
    names |= {"b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4"}
    found = {other: cdna for cdna, other in same.items()}
    for name in _MEMORY.values():
        kind, _, rest = name.partition("_")
        if kind == "atomic":
            op, _, of = rest.partition("_")
            if op in ("min", "max"):
                op = ("s" if of[0] == "i" else "u") + op
            cdna = f"atomic_{op}" + ("_f32" if of == "f32" else "_x2" if of.endswith("64") else "")
        else:
            half, _, of = rest.rpartition("_")
            cdna = f"{kind}_{names[of]}" + f"_{half}" * bool(half)
        found |= {f"{family}_{name}": f"{family}_{cdna}" for family in ("flat", "global", "buffer")}
    for forms in (forms for (encoding, _), forms in OPCODES.items() if encoding == "DS"):
        for name in (name for text in forms.values() for name in text.split()[1::2]):
            cdna = name.replace("ds_load", "ds_read").replace("ds_store", "ds_write")
            found[name] = cdna.replace("_2addr", "2").replace("2_stride64", "2st64")
    return found


SAME = _same_operations()
