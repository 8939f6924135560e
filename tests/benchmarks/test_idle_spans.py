"""The benchmark of idle GPUs: what it counts as idle, and whose work the CPU did meanwhile."""

import pytest

from benchmarks.idle import REST, Phases, busy_within, kind_of

SECOND = 10**9


def test_a_gpu_is_idle_between_its_spans_and_at_both_ends_of_the_window() -> None:
    """Also before the first span: there the CPU packs."""
    spans = [(40, 50), (20, 30), (25, 42), (5, 12), (70, 72), (90, 130), (200, 210)]
    busy = busy_within([(begin * SECOND, end * SECOND) for begin, end in spans], (10 * SECOND, 100 * SECOND))
    assert busy == [(begin * SECOND, end * SECOND) for begin, end in ((10, 12), (20, 50), (70, 72), (90, 100))]
    phases = Phases()
    phases.spans = [("packs", (10 * SECOND, 21 * SECOND)), ("publishes", (60 * SECOND, 80 * SECOND))]
    assert phases.idle(busy) == pytest.approx({"packs": 8, "publishes": 18, REST: 20})


def test_a_gpu_without_work_is_idle_for_the_whole_window() -> None:
    window = (10 * SECOND, 100 * SECOND)
    assert Phases().idle(busy_within([(2, 3), (200 * SECOND, 300 * SECOND)], window)) == pytest.approx({REST: 90})


def test_kernels_are_counted_by_what_they_do() -> None:
    names = {
        "products of matrices": "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
        "attention": "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90",
        "exchanges of ranks": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "others, copies": "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>",
    }
    assert {kind: kind_of(name) for kind, name in names.items()} == {kind: kind for kind in names}
