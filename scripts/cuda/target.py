"""A described H200: programs compiled for it on a machine that has none.

    prepare()  # before anything imports jax
    compiled = jax.jit(f).lower(*placed(arguments, described_gpu())).compile()

The compiler is that of jax's CUDA plugin, with ptxas (`PACKAGES`). Nothing of what it makes can run here, and nothing
is tuned by trying: XLA takes for each product what its rules say, where on the device it would measure.
"""

import importlib.metadata
import os
import sys
from typing import Any, Final

from .ptxas import DUMPS

# What XLA asks of a GPU. The figures are those of its own list of GPUs, xla/backends/gpu/target_config/specs/h200.txtpb
# in github.com/openxla/xla; the versions are those of CUDA 13, which the plugin of jax 0.11 is built for.
H200: Final = """
gpu_device_info {
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""

# The plugin, and what it needs of CUDA to compile: ptxas, and the library of device functions.
PACKAGES: Final = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")


def can_compile() -> bool:
    """Whether all of `PACKAGES` are installed."""
    return all(any(importlib.metadata.distributions(name=name)) for name in PACKAGES)


def prepare() -> None:
    """Sets what jax, XLA and Mosaic GPU read once, at their start; processes begun later have it too.

    Raises:
      RuntimeError: jax is there already, and has read it.
    """
    if "jax" in sys.modules:
        raise RuntimeError("jax is imported already; expected `prepare` before anything that imports it")
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin would look for a GPU
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"  # it takes a GPU to tune
    os.environ.update(DUMPS)


def described_gpu() -> Any:
    """A sharding that places an array on the GPU that is not there."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc("H200", "cuda", topology="1x1x1", target_config=H200)
    return SingleDeviceSharding(topology.devices[0])


def placed(tree: Any, gpu: Any) -> Any:
    """The shapes of a tree's arrays, on the described GPU."""
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=gpu), tree)
