"""`launch_settings`: environment variables that a server sets before jax is imported, each with its reason. No jax.

None overrides what the user has set. No flag of XLA's or libtpu's compilers is among them: for one device, none was
found to make a step smaller or faster (docs/LOG.md), and a flag that nobody measured is a risk without a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jpaged.accelerators import Platform

GPU_MEMORY_FRACTION: Final = "0.95"
_GPU_FRACTION: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # two names of one setting
_ONE_CHIP: Final = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
      name, value: as they will be in the environment.
      reason: why.
      is_users: the user had set it, so it stays as it is.
    """

    name: str
    value: str
    reason: str
    is_users: bool = False


def launch_settings(platform: Platform, environ: Mapping[str, str], *, chip: int | None = None) -> list[Setting]:
    """What to set for a server on this platform; nothing on a CPU.

    Args:
      platform: where the model will run.
      environ: the environment as the user made it.
      chip: of the host's TPU chips, the one to use; `None`: there is only one.

    Example:
      >>> [(one.name, one.value, one.is_users) for one in launch_settings("gpu", {"JAX_PLATFORMS": "cuda"})][:2]
      [('JAX_PLATFORMS', 'cuda', True), ('XLA_CLIENT_MEM_FRACTION', '0.95', False)]
    """
    if platform == "cpu":
        return []
    name = "cuda" if platform == "gpu" else "tpu"
    wanted = {
        "JAX_PLATFORMS": (f"{name},cpu", f"without the {platform.upper()} jax fails; else it would serve from the CPU")
    }
    if platform == "gpu":
        theirs = next((name for name in _GPU_FRACTION if name in environ), _GPU_FRACTION[0])
        wanted[theirs] = (GPU_MEMORY_FRACTION, "jax takes 75 % of a GPU's memory else; the rest would hold no pages")
    wanted["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = (
        "0",
        "quick programs too come from disk at the next start, not only those that took a second",
    )
    if platform == "tpu" and chip is not None:
        reason = "this version runs on one device; the host's other chips stay free for other servers"
        # Half of theirs and half of these would contradict each other.
        if any(one in environ for one in _ONE_CHIP):
            wanted |= {one: (environ[one], reason) for one in _ONE_CHIP if one in environ}
        else:
            wanted |= dict(zip(_ONE_CHIP, ((f"{chip}", reason), ("1,1,1", reason), ("1,1,1", reason)), strict=True))
    return [Setting(one, environ.get(one, value), reason, one in environ) for one, (value, reason) in wanted.items()]
