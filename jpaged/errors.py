"""Every error that jpaged raises on purpose.

    JpagedError
    ├── ConfigError (ValueError)       a setting is out of range, or two settings contradict each other
    ├── RequestError (ValueError)      a request is refused at the door; other requests go on
    │   ├── PromptTooLongError         it can never fit into the context window or the page pool
    │   └── ChatTemplateError          the chat template refused the messages or failed
    ├── ModelLoadError (ValueError)    a checkpoint, its config or its tokenizer cannot be read
    ├── FetchError (OSError)           a model could not be downloaded or found
    ├── OutOfPagesError (RuntimeError) the pool has fewer free pages than were asked for
    ├── PageStateError (RuntimeError)  a page was freed twice or is not the allocator's: a bug of the caller
    ├── RecompileError (RuntimeError)  a step of an unannounced shape, with recompiles set to "error"
    └── EngineFailedError (RuntimeError) the engine that a request was sent to failed, restarts or is closed

Messages say what was got, what was expected and what to do. `pallas_kernels` stands below this module and raises
plain `ValueError` (wrong arguments) and `NotImplementedError` (unsupported, with the reason).
"""


class JpagedError(Exception):
    """Base of all errors that jpaged raises on purpose."""


class ConfigError(JpagedError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class RequestError(JpagedError, ValueError):
    """A request is refused at the door; other requests are not affected."""


class PromptTooLongError(RequestError):
    """A request can never fit into the context window or into the page pool."""


class ChatTemplateError(RequestError):
    """The chat template refused the messages, or failed while it was rendered."""


class ModelLoadError(JpagedError, ValueError):
    """A checkpoint, its config or its tokenizer cannot be read."""


class FetchError(JpagedError, OSError):
    """A model could not be downloaded or found."""


class OutOfPagesError(JpagedError, RuntimeError):
    """The pool has fewer free pages than were asked for."""


class PageStateError(JpagedError, RuntimeError):
    """A page was freed twice, or was never given out: a bug of the caller."""


class RecompileError(JpagedError, RuntimeError):
    """A step of an unannounced shape arrived while recompiles were forbidden."""


class EngineFailedError(JpagedError, RuntimeError):
    """The engine failed, restarts, is dead or was closed: it does not serve, or did not finish, a request."""
