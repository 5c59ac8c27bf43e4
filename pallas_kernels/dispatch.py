"""Which implementation runs an op: by the devices of the mesh in use, with the reasons against the others."""

import jax

from .compat import current_gpu, jax_version
from .pages import IMPLEMENTATIONS, PageSpec
from .tuning import shape_objection

# What each platform would rather run, best first.
_CANDIDATES = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "xla"),
    "tpu": ("mosaic_tpu", "xla"),
}
_MISSING = {
    "mosaic_tpu": "the Mosaic TPU kernel is not part of this version",
}
_STORED_ALIKE = ("xla", "mosaic_gpu")  # their pages have one shape
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
    heads, dtype = (None, None) if q is None else (q.shape[1], q.dtype.name)
    objection = shape_objection(spec, heads, dtype)
    return None if objection is None else f"the Mosaic GPU kernel: {objection}"


def _reads(implementation: str, spec: PageSpec) -> bool:
    """Whether `implementation` reads pages that are stored so: its own, and a kernel for GPUs also XLA's."""
    return spec.implementation == implementation or (implementation, spec.implementation) == ("mosaic_gpu", "xla")


def _objection(name: str, platform: str, spec: PageSpec | None, q: jax.ShapeDtypeStruct | None = None) -> str | None:
    """Why `name` cannot run here, or `None` if it can."""
    if name in _MISSING:
        return _MISSING[name]
    if spec is not None and not _reads(name, spec):
        return f"the pages are stored for {spec.implementation!r}; make them with PageSpec(implementation={name!r})"
    return _mosaic_gpu_objection(platform, spec, q) if name == "mosaic_gpu" else None


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
) -> tuple[str, str]:
    """Picks the implementation of the attention ops and says why, for the log.

    Args:
      implementation: a name, or `None` for the first candidate of the platform that can run.
      platform: "cpu", "gpu" or "tpu"; `None` for the devices of the mesh in use.
      spec: the pages it is to run on, or `None` before there are any; a kernel that does not run all is then passed
        over.
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
        objection = _objection(implementation, platform, spec, q)
        if objection is not None:
            raise NotImplementedError(f"implementation {implementation!r} cannot run on {platform}: {objection}")
        return implementation, f"{implementation!r} was asked for"
    objections: dict[str, str] = {}
    for name in _CANDIDATES.get(platform, ("xla",)):
        objection = _objection(name, platform, spec, q)
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


def require_stored_by(spec: PageSpec, implementation: str, op: str) -> None:
    """Raises NotImplementedError unless the pages are stored in the shape of `implementation`."""
    if {spec.implementation, implementation} <= set(_STORED_ALIKE):
        return
    if spec.implementation != implementation:
        raise NotImplementedError(
            f"{op} on pages stored for {spec.implementation!r}: only {implementation!r} has it in this version; "
            f"make the pages with PageSpec(implementation={implementation!r})"
        )
