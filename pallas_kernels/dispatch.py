"""Which implementation runs an op: by the devices of the mesh in use, with the reasons against the others."""

import jax

from .pages import IMPLEMENTATIONS, PageSpec

# What each platform would rather run, best first.
_CANDIDATES = {
    "cpu": ("xla",),
    "gpu": ("mosaic_gpu", "xla"),
    "tpu": ("mosaic_tpu", "xla"),
}
_MISSING = {
    "mosaic_gpu": "the Mosaic GPU kernel (Hopper, sm_90) is not part of this version",
    "mosaic_tpu": "the Mosaic TPU kernel is not part of this version",
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


def _objection(name: str, platform: str, spec: PageSpec | None) -> str | None:
    """Why `name` cannot run here, or `None` if it can."""
    if name in _MISSING:
        return _MISSING[name]
    if spec is not None and spec.implementation != name:
        return f"the pages are stored for {spec.implementation!r}; make them with PageSpec(implementation={name!r})"
    return None


def _check_name(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; expected None (chosen by the devices in use) or one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )


def resolve_implementation(
    implementation: str | None = None, *, platform: str | None = None, spec: PageSpec | None = None
) -> tuple[str, str]:
    """Picks the implementation of the attention ops and says why, for the log.

    Args:
      implementation: a name, or `None` for the first candidate of the platform that can run.
      platform: "cpu", "gpu" or "tpu"; `None` for the devices of the mesh in use.
      spec: the pages it is to run on, or `None` before there are any.

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
        objection = _objection(implementation, platform, spec)
        if objection is not None:
            raise NotImplementedError(f"implementation {implementation!r} cannot run on {platform}: {objection}")
        return implementation, f"{implementation!r} was asked for"
    objections: dict[str, str] = {}
    for name in _CANDIDATES.get(platform, ("xla",)):
        objection = _objection(name, platform, spec)
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
    if spec.implementation != implementation:
        raise NotImplementedError(
            f"{op} on pages stored for {spec.implementation!r}: only {implementation!r} has it in this version; "
            f"make the pages with PageSpec(implementation={implementation!r})"
        )
