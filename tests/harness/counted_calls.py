"""Names of torch's operations in a block, as `aten::copy_`; each is at least one launch on a GPU."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
