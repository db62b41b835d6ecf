"""The kernels of chatd: compiled operations on torch tensors, and a slow reference beside each.

    from chatd_kernels.kv_cache import KVCache, KVCacheLayout, allocate_kv_cache
    from chatd_kernels.rms_norm import rms_norm                        rows; adds to a residual first, if given
    from chatd_kernels.rope_kv_write import rope_kv_write              rotary Q and K, K and V into their slots
    from chatd_kernels.paged_attention import build_metadata, paged_attention
    from chatd_kernels.silu_mul import gelu_tanh_mul, silu_mul         gated activations
    from chatd_kernels.linear import pack_linear, linear               products with packed weights
    from chatd_kernels.copy_blocks import copy_blocks                  whole blocks of the cache
    from chatd_kernels.swap_blocks import load_blocks, store_blocks    whole blocks to and from the host
    from chatd_kernels.runtime import set_num_threads, warm_up
    from chatd_kernels.cpus import available_cpus                      within the affinity and the cgroup's quota
    from chatd_kernels.dispatch import use_backend                     GPU kernels on a CPU, interpreted

Each operation is a folder: `reference.py` says what it computes, `cpu.py` is the numba kernel and its launcher,
`gpu.py` the Triton kernel and its launcher, and `dispatch.py` finds the launcher for a device. Activations are float32,
on GPUs also float16 and bfloat16. Outputs are the caller's tensors, written whole.

On CPUs every operation gives each row the same bits whatever other rows are in the call and however many threads run.
On GPUs so it is where weights were packed, and attention's metadata built, as deterministic.
"""
