"""The tensors of a head's folder, each read and checked when it is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.loading.checkpoint import open_safetensors, weight_files

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
AGAIN = "Download the head again."


class StoredTensors:
    """unpickle: where there is no safetensors file, read a pickled one. Even restricted to tensors, as it is
    then, unpickling is more than reading numbers: only for files whose origin is known.

    Raises ModelError for folders without weights and files that are damaged.
    """

    def __init__(self, folder: Path, *, unpickle: bool = False) -> None:
        self.folder = folder
        self._unpickled: dict[str, Tensor] = {}
        self._places: dict[str, Path] = {}
        pickled = sorted(folder.glob("*.bin"))
        if unpickle and pickled and not any(folder.glob("*.safetensors*")):
            self._unpickled = _unpickle(pickled)
            return
        for path in weight_files(folder):
            with open_safetensors(path) as file:
                self._places |= dict.fromkeys(file.keys(), path)

    @property
    def names(self) -> set[str]:
        return set(self._places) | set(self._unpickled)

    def read(self, name: str) -> Tensor:
        """Any tensor, as it is stored."""
        if name in self._unpickled:
            return self._unpickled[name]
        with open_safetensors(self._places[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight of that shape. Raises ModelError for another one, quantised values, or ones that are not
        finite."""
        tensor = self.read(name)
        where = f"{self.folder}: tensor {name}"
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{where} is stored as {str(tensor.dtype).removeprefix('torch.')}. Supported: float32, "
                "float16, bfloat16. Use an unquantised head."
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{where} has shape {list(tensor.shape)}, but config.json and the target ask for "
                f"{list(shape)}. The head was made for another model, or its config.json is not its own."
            )
        if not tensor.isfinite().all():
            raise ModelError(f"{where} holds values that are not finite. {AGAIN}")
        return tensor

    def weights(
        self, expected: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """The weights of `shapes` by their own names; expected: what each is called in the file.

        Raises ModelError naming those that are missing.
        """
        missing = [expected[name] for name in shapes if expected[name] not in self.names]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {len(missing)} of {len(shapes)} tensors: {listed(missing)}. The head "
                f"is incomplete, or of a kind that is not supported. {AGAIN}"
            )
        return {name: self.weight(expected[name], shape) for name, shape in shapes.items()}


def listed(names: list[str], most: int = 6) -> str:
    """The names in one line, short."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _unpickle(paths: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with warnings.catch_warnings(action="ignore"):
                found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may ask its reader for anything
            raise ModelError(
                f"cannot read {path}: it is damaged, or holds more than tensors ({type(error).__name__}). "
                f"{AGAIN}"
            ) from error
        if not isinstance(found, dict) or not all(_is_named_tensor(each) for each in found.items()):
            raise ModelError(f"{path} does not hold named tensors, and nothing else. {AGAIN}")
        tensors |= {name: tensor.detach() for name, tensor in found.items()}
    return tensors


def _is_named_tensor(item: tuple[object, object]) -> bool:
    """With values: a sparse tensor, or one of the meta device, has no place for each."""
    name, tensor = item
    values = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return isinstance(name, str) and values
