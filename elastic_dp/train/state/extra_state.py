"""The extra state of modules as bytes: what `torch.nn.Module.get_extra_state` returns.

Bytes can be compared, sent and stored without knowing their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from elastic_dp.checkpoint.codec import from_bytes, to_bytes
from elastic_dp.errors import ModelError, StateError

_KEY = "_extra_state"  # the name that torch uses in a state_dict


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module. `name` is its key in the model's state_dict."""

    name: str
    module: nn.Module

    def read(self) -> bytes:
        """Returns the present extra state. Raises ModelError if it cannot be stored."""
        try:
            return to_bytes({"value": self.module.get_extra_state()})
        except StateError as error:
            at = "" if error.path == "value" else f" at {error.path.removeprefix('value.')}"
            raise ModelError(
                f"get_extra_state of model.{self.name.removesuffix(_KEY).rstrip('.')} "
                f"returns{at} {error.reason}, which cannot be sent to a worker that joins. "
                "Return tensors, numbers and containers of them"
            ) from None

    def write(self, content: bytes) -> None:
        """Sets the extra state, unless the module already has it."""
        if content != self.read():
            self.module.set_extra_state(from_bytes(content)["value"])


def extra_states(model: nn.Module) -> list[ExtraState]:
    """Returns the modules of the model that have extra state, in the model's order."""
    return [
        ExtraState(f"{prefix}.{_KEY}" if prefix else _KEY, module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
