"""How `benchmarks.fp8` adds up what a GPU did."""

import pytest


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("void cutlass::Kernel2<cutlass_scaled_mm_sm90_fp8>", "matrix products"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided", "casts to FP8"),
        ("_topk_log_softmax_kernel", "sampling and log-probabilities"),
        ("triton_red_fused_cutlass_scaled_mm_rms_norm_0", "fused by the compiler"),
        ("void vllm::act_and_mul_kernel", "norms, activations, rotations"),
        ("Memcpy DtoH", "rest"),
    ],
)
def test_kernels_have_their_kind(kernel: str, kind: str) -> None:
    from benchmarks.runs.profiled_worker import kind_of, sums  # vLLM takes seconds to import

    assert kind_of(kernel) == kind
    assert sums([(kernel, 5, 1_000_000_005), (kernel, 0, 1_000_000_000)]) == {kind: 2.0}


def test_the_share_at_work_counts_kernels_that_overlap_once() -> None:
    from benchmarks.runs.profiled_worker import share_at_work

    assert share_at_work([(30, 40), (10, 20), (15, 25), (16, 17), (40, 50)]) == pytest.approx(35 / 40)
    assert share_at_work([]) == 0
