"""What can go wrong in a build. Every message names the file, table, row, kernel or architecture it is about."""


class BuildError(Exception):
    """A build stops here; the message is for the person who started it."""


class ProfileError(BuildError):
    """An architecture profile doesn't hold together."""


class DeclarationError(BuildError):
    """A kernel's declaration doesn't hold together."""


class CompileError(BuildError):
    """A kernel did not compile."""


class AuditError(BuildError):
    """A binary is not what the plan and the profile promise."""
