"""Which implementation runs an op: by the devices of the mesh in use, with the reasons against the others."""

import jax

from . import tpu_tuning, tuning
from .compat import current_gpu, current_tpu, jax_version
from .pages import IMPLEMENTATIONS, PageSpec

# What each platform would rather run, best first.
_CANDIDATES = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "xla"),
    "tpu": ("mosaic_tpu", "xla"),
}
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def current_platform() -> str:
    """The platform of the mesh in use, else of the default device: "cpu", "gpu" or "tpu".

    Example:
      >>> current_platform() in ("cpu", "gpu", "tpu")
      True
    """
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    default_device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if mesh_device is not None and mesh_device.platform is not None:
        platform = mesh_device.platform
    elif default_device is not None:
        platform = getattr(default_device, "platform", str(default_device))
    else:
        platform = jax.default_backend()
    return _ALIASES.get(platform, platform)


def _mosaic_gpu_objection(platform: str, spec: PageSpec | None, q: jax.ShapeDtypeStruct | None) -> str | None:
    if jax_version() < (0, 11):
        return f"the Mosaic GPU kernel needs jax 0.11 or newer; this is {jax.__version__}"
    if platform != "gpu":
        return f"the Mosaic GPU kernel needs a Hopper GPU (sm_90); the devices in use are {platform}"
    gpu = current_gpu()
    if gpu is None or not gpu.is_hopper:
        have = "none is known" if gpu is None else f"this is {gpu.kind} (compute capability {gpu.capability or '?'})"
        return f"the Mosaic GPU kernel needs a Hopper GPU (sm_90); {have}"
    if spec is None:
        return "the Mosaic GPU kernel does not run all pages; ask with their PageSpec"
    queries: tuple = () if q is None else (q.shape[1], q.dtype.name, q.shape[0])
    objection = tuning.shape_objection(spec, *queries)
    return None if objection is None else f"the Mosaic GPU kernel: {objection}"


def _mosaic_tpu_objection(platform: str, spec: PageSpec | None, q: jax.ShapeDtypeStruct | None) -> str | None:
    chip = current_tpu() if platform == "tpu" else None
    if platform != "tpu" or (chip is not None and chip.generation < 4):
        have = f"the devices in use are {platform}" if chip is None else f"this is a {chip.kind}"
        return f"the Mosaic TPU kernel needs a TPU of generation 4 or newer; {have}"
    if spec is None:
        return "the Mosaic TPU kernel does not run all pages; ask with their PageSpec"
    heads, dtype = (None, None) if q is None else (q.shape[1], q.dtype.name)
    objection = tpu_tuning.shape_objection(spec, heads, dtype)
    if objection is not None:
        return f"the Mosaic TPU kernel: {objection}"
    if chip is None or q is None:
        return None
    from .fit_tpu import memory_objection  # Pallas for TPUs takes half a second to import

    return memory_objection(spec, q.shape[1], q.dtype, chip)


_OBJECTIONS = {"mosaic_gpu": _mosaic_gpu_objection, "mosaic_tpu": _mosaic_tpu_objection}


def _reads(implementation: str, spec: PageSpec) -> bool:
    """Whether `implementation` reads pages that are stored so: its own, and a kernel for GPUs also XLA's."""
    return spec.implementation == implementation or (implementation, spec.implementation) == ("mosaic_gpu", "xla")


def _objection(
    name: str, platform: str, spec: PageSpec | None, q: jax.ShapeDtypeStruct | None = None, *, stored: bool = True
) -> str | None:
    """Why `name` cannot run here, or `None` if it can."""
    objection = _OBJECTIONS[name](platform, spec, q) if name in _OBJECTIONS else None
    if objection is None and stored and spec is not None and not _reads(name, spec):
        return f"the pages are stored for {spec.implementation!r}; make them with PageSpec(implementation={name!r})"
    return objection


def _check_name(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; expected None (chosen by the devices in use) or one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )


def resolve_implementation(
    implementation: str | None = None,
    *,
    platform: str | None = None,
    spec: PageSpec | None = None,
    q: jax.ShapeDtypeStruct | None = None,
    stored: bool = True,
) -> tuple[str, str]:
    """Picks the implementation of the attention ops and says why, for the log.

    Args:
      implementation: a name, or `None` for the first candidate of the platform that can run.
      platform: "cpu", "gpu" or "tpu"; `None` for the devices of the mesh in use.
      spec: the pages it is to run on, or `None` before there are any; a kernel that does not run all is then passed
        over.
      stored: whether the pages are there already, in the shape that `spec` says; else they are still to be made, in
        that of the implementation that is picked.
      q: shape [T, Hq, D] and dtype of the queries that it is to run on, or `None` if they are not known.

    Returns:
      the name and a reason in words, with what was passed over.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: the one that was asked for cannot run here.
      ExceptionGroup: `None` was asked for and no candidate can run; it holds one NotImplementedError for each.

    Example:
      >>> resolve_implementation(platform="cpu")
      ('xla', "'xla' is the first choice on cpu")
      >>> resolve_implementation("xla", platform="tpu")
      ('xla', "'xla' was asked for")
    """
    platform = current_platform() if platform is None else _ALIASES.get(platform, platform)
    if implementation is not None:
        _check_name(implementation)
        objection = _objection(implementation, platform, spec, q, stored=stored)
        if objection is not None:
            raise NotImplementedError(f"implementation {implementation!r} cannot run on {platform}: {objection}")
        return implementation, f"{implementation!r} was asked for"
    objections: dict[str, str] = {}
    for name in _CANDIDATES.get(platform, ("xla",)):
        objection = _objection(name, platform, spec, q, stored=stored)
        if objection is None:
            if not objections:
                return name, f"{name!r} is the first choice on {platform}"
            passed_over = "; ".join(f"{other!r}: {reason}" for other, reason in objections.items())
            return name, f"{name!r} on {platform}, as others cannot run ({passed_over})"
        objections[name] = objection
    raise ExceptionGroup(
        f"no implementation of paged attention can run on {platform}",
        [NotImplementedError(f"{name!r}: {reason}") for name, reason in objections.items()],
    )


def default_implementation(platform: str | None = None) -> str:
    """The name that `implementation=None` stands for on `platform`, by default that of the mesh in use."""
    return resolve_implementation(platform=platform)[0]


def supported_implementations(platform: str | None = None, spec: PageSpec | None = None) -> tuple[str, ...]:
    """The names that can run on `platform` (by default that of the mesh in use), the preferred one first.

    Example:
      >>> supported_implementations("gpu")
      ('xla',)
    """
    platform = current_platform() if platform is None else _ALIASES.get(platform, platform)
    return tuple(n for n in _CANDIDATES.get(platform, ("xla",)) if _objection(n, platform, spec) is None)
