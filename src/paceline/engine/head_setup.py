"""From a loaded head to one that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import Config
from paceline.core.scheduler import Limits
from paceline.drafters.materials import Materials
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.machine import Precision, free_memory, resolve_precision
from paceline.engine.model_setup import bytes_of, fitted, native_or_none, torch_dtype
from paceline.errors import KernelError
from paceline.kernels.cpu.bindings import library
from paceline.loading.heads import LoadedHead
from paceline.models.head import HeadDecoder
from paceline.models.native_head import NativeHead
from paceline.models.torch_head import TorchHead


def head_precision(config: Config, device: str) -> Precision:
    """As asked. Else the target's, but 8 bits instead of 16 where the kernels have them: a head's guesses are
    as good so, and its weights are read in half of the time."""
    asked = config.speculation.draft_dtype
    precision = resolve_precision(config.dtype if asked == "auto" else asked, device)
    if asked != "auto" or precision != "bfloat16" or device != "cpu":
        return precision
    try:
        library()
    except KernelError:
        return precision
    return "int8"


@dataclass(frozen=True, slots=True)
class HeadSetup:
    """A head and where and how it is to run, on one rank. device: `cpu` or `cuda`."""

    head: LoadedHead
    precision: Precision
    device: str
    group: DeviceGroup

    @property
    def context_length(self) -> int:
        return self.head.spec.context_length

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.spec.capture

    @property
    def weight_bytes(self) -> int:
        """Without the embedding, unless it is the output matrix too: of that only rows are read."""
        weights = self.head.weights
        embed = bytes_of(weights.embed, self.precision) if weights.lm_head is not None else 0
        return bytes_of(weights, self.precision) - embed

    @property
    def kv_bytes_per_token(self) -> int:
        spec = self.head.spec
        per_value = 4 if self.precision == "float32" else 2
        return 2 * spec.num_kv_heads * spec.head_dim * per_value

    @property
    def torch_device(self) -> str:
        """The device in torch's words."""
        places = self.group.places
        return places[0].device if places and self.device == "cuda" else self.device

    def affordable(self, limits: Limits) -> Limits:
        """See `model_setup.fitted`."""
        return fitted(limits, self.kv_bytes_per_token, free_memory(self.torch_device), self.head.name)

    def supply(self, materials: Materials) -> Materials:
        """With what a drafter of this head needs. Raises KernelError where it cannot run so."""
        return replace(
            materials,
            context_length=self.context_length,
            head=self._decoder(),
            head_device=self.torch_device,
        )

    def _decoder(self) -> HeadDecoder:
        head, group = self.head, self.group

        def native() -> NativeHead:
            return NativeHead(
                head.spec,
                head.weights,
                dtype=self.precision,
                threads=group.threads,
                cores=group.cores or None,
            )

        if self.device == "cpu" and (fast := native_or_none(native, self.precision, group, "draft_dtype")):
            return fast
        return TorchHead(
            head.spec,
            head.weights,
            dtype=torch_dtype(self.precision, "draft_dtype"),
            device=self.torch_device,
        )
