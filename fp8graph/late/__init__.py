"""Functions of upper rooms that lower ones call: ``fp8graph/__init__.py``, which stands above all, hands them down."""

from collections.abc import Callable
from typing import Any, Final


class Late:
    """A function whose room is imported at its first call: ``import fp8graph`` alone imports no torch."""

    load: Callable[[], Callable[..., Any]]

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)


# (source: object, recipes: Mapping[str, RecipeLike]) -> Policy
policy_of_checkpoint: Final = Late()
