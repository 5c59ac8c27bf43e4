"""`copy_once`, `leave_first`: copies to shared memory of what is read once, and so need not stay in the L2 cache.

A decode step reads all weights and all live pages, in the Llama-3.1-8B shape 300 times what L2 holds, and each of them
once, but for pages that rows share without its being worth a unit of its own. Without a word about it they push out
what the next kernel reads first: its code, its work list, page tables, activations. On an H200, in that shape at 8
rows, every kernel of a layer is .1 to 2 us sooner done with these hints, those too that have none themselves.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from typing import Any, Final

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

# What `createpolicy.fractional.L2::evict_first` gives for all lines: the policy is a number that may be written down.
_EVICT_FIRST: Final = 0x12F0000000000000
_COPY: Final = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp


def leave_first() -> None:
    """While a kernel is emitted: the copy that was emitted last, in the block of code at hand, leaves L2 first.

    Mosaic GPU's `async_copy` takes no hint, so its operation is emitted again, with one.

    Raises:
      RuntimeError: if there is no copy by tensor map, or it has a hint already.
    """
    operations = list(ir.InsertionPoint.current.block.operations)
    copy = next((x for x in reversed(operations) if isinstance(x, _COPY)), None)
    if copy is None or copy.l2CacheHint is not None:
        raise RuntimeError("no copy by a tensor map to shared memory was emitted here; expected one without a hint")
    with ir.InsertionPoint(copy):
        nvvm.cp_async_bulk_tensor_shared_cluster_global(
            copy.dstMem,
            copy.tmaDescriptor,
            list(copy.coordinates),
            copy.mbar,
            list(copy.im2colOffsets),
            multicast_mask=copy.multicastMask,
            l2_cache_hint=arith.constant(ir.IntegerType.get_signless(64), _EVICT_FIRST),
            mode=copy.mode,
            is_cta_only=copy.isCTAOnly,
            group=copy.group,
            predicate=copy.predicate,
        )
    copy.operation.erase()


def copy_once(source: Any, target: Any, barrier: Any) -> None:
    """`plgpu.copy_gmem_to_smem`, of what leaves L2 first."""
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.inline_mgpu(arg_types=())(lambda _: leave_first())()
