"""A target that is too large for one device: its layers cut over several ranks, one process each.

Started by torchrun, each rank loads its part of every layer (transformers' tensor parallel plan)
and its own heads' K/V. Rank 0 is the replica: it speaks MQTT, schedules, and tells the others each
batch before it computes it; they run the same forward and answer nothing but their partial sums.

Where partial sums meet, each rank fetches all of them and adds them in the order of the ranks. A
ring reduction would be less to send, but it adds in an order that hangs on where a number lies in
the message, and so on how many rows there are: a session's rows would hang on its company.

A part of a target is none: whatever fails on one rank ends all of them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from broker.errors import ConfigError, ModelError
from cloud_verifier.engine.prepare import resolve_target
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import TorchTarget

START = "torchrun --nproc-per-node N -m cloud_verifier.cli serve --tensor-parallel"
#: Seconds for all ranks to meet, and to load: the slowest disk sets the pace.
_LOAD_S = 3600.0
#: Seconds that one exchange within a forward may take; a rank that stands still ends the replica.
_FORWARD_S = 60.0
#: Ranks wait for work as long as no session comes, so this must never pass.
_IDLE = timedelta(days=3650)

_GATHERED = ("colwise_gather_output", "colwise_rep")
_STYLES = ("colwise", "rowwise", *_GATHERED)


class Ranks:
    """This process among those of one torchrun. ``first``: the one that serves.

    Raises ConfigError outside torchrun, for one process alone, or for a device that is not here.
    """

    def __init__(self, device: str, environment: Mapping[str, str] = os.environ) -> None:
        try:
            self.rank, self.count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", "0"))
        except (KeyError, ValueError):
            raise ConfigError(f"--tensor-parallel needs several processes: {START} ...") from None
        if self.count < 2:
            raise ConfigError(
                f"--tensor-parallel with {self.count} process cuts nothing: {START} ... "
                "with N of 2 or more"
            )
        kind = torch.device(device).type
        here = "cuda" if torch.cuda.is_available() else "cpu"
        if kind != here:
            # transformers cuts the model for the accelerator that it finds.
            raise ConfigError(
                f"--device {device} cannot be cut over ranks on this machine: give --device {here}"
            )
        if kind == "cuda":
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {self.rank} finds no GPU of its own, {torch.cuda.device_count()} are "
                    "here: give torchrun as many processes as GPUs"
                )
            torch.cuda.set_device(local)
        backend = "nccl" if kind == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=_LOAD_S))
            self.sums = dist.new_group(backend=backend, timeout=timedelta(seconds=_FORWARD_S))
            self._orders = dist.new_group(backend="gloo", timeout=_IDLE)
        except (RuntimeError, ValueError) as exc:
            cause = " ".join(str(exc).split())[:160]
            raise ConfigError(f"the ranks do not find each other ({cause}): see torchrun") from exc
        self._lock = threading.Lock()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def tell(self, order: tuple[str, Any] | None) -> None:
        """From rank 0 to all others. Raises RuntimeError when one of them has gone."""
        with self._lock:
            dist.broadcast_object_list([order], src=0, group=self._orders)

    def hear(self) -> tuple[str, Any] | None:
        """What rank 0 tells next. Raises RuntimeError when it has gone."""
        box: list[tuple[str, Any] | None] = [None]
        dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]

    def meet(self, device: torch.device) -> None:
        """Wait for all ranks, ``_FORWARD_S`` at most. Raises RuntimeError when one is missing."""
        mine = torch.zeros(1, device=device)
        dist.all_gather([torch.empty_like(mine) for _ in range(self.count)], mine, group=self.sums)

    def leave(self) -> None:
        """Let go of the others; twice is once."""
        if dist.is_initialized():
            dist.destroy_process_group()


class ShardedLinear(nn.Module):
    """One rank's part of a linear layer; ``inner`` holds the weights and may be packed.

    ``style``: as in transformers' plan. ``bias`` is added once, after the parts are summed.
    ``out_features``: of the whole layer.
    """

    def __init__(
        self, inner: nn.Linear, style: str, ranks: Ranks, bias: Tensor | None, out_features: int
    ) -> None:
        super().__init__()
        self.inner = inner
        self.out_features = out_features
        self._style = style
        self._ranks = ranks
        self._bias = bias
        self._width = -(-out_features // ranks.count)  # of all parts but perhaps the last

    def forward(self, rows: Tensor) -> Tensor:
        part: Tensor = self.inner(rows)
        if self._style == "colwise":
            return part
        if self._style in _GATHERED:
            # Parts must be alike in size to be exchanged; the last may be narrower.
            padded = nn.functional.pad(part, (0, self._width - part.shape[-1]))
            return torch.cat(self._all(padded), dim=-1)[..., : self.out_features]
        parts = self._all(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        total = total.to(part.dtype)
        return total if self._bias is None else total + self._bias

    def _all(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks.count)]
        dist.all_gather(parts, part, group=self._ranks.sums)
        return parts


def shard_linears(model: nn.Module, plan: Mapping[str, str], ranks: Ranks) -> bool:
    """Replace transformers' cut linear layers by ``ShardedLinear``; whether all of them could be.

    ``plan``: style by module name, layer numbers as ``*``.
    """
    from torch.distributed.tensor import DTensor

    whole = True
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
            continue
        style = plan.get(re.sub(r"\d+", "*", name))
        if style not in _STYLES:
            whole = False
            continue
        weight, bias = _local(module.weight), _local(module.bias)
        assert weight is not None
        inner = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        inner.weight = nn.Parameter(weight, requires_grad=False)
        if style != "rowwise" and bias is not None:
            inner.bias = nn.Parameter(bias, requires_grad=False)
            bias = None
        cut = ShardedLinear(inner, style, ranks, bias, module.out_features)
        model.set_submodule(name, cut)
    return whole


def _local(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a layer's parameter, which may be whole on each rank."""
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    return None if parameter is None else parameter.detach()


class ParallelTarget(TorchTarget):
    """One rank of a ``TorchTarget``. Rank 0's is the ``Target``; those of the others ``follow``.

    After a failure ``lost`` says why, the thread that asked is ended by SystemExit, and nothing is
    computed any more.
    """

    def __init__(self, model: Any, *, ranks: Ranks, **settings: Any) -> None:
        self.lost: str | None = None
        self._ranks = ranks
        # While the model is tried at first, each rank does so by itself.
        self._leads = False
        super().__init__(model, **settings)
        self._leads = ranks.first

    @classmethod
    def join(cls, path: str, ranks: Ranks, **settings: Any) -> ParallelTarget:
        """As ``TorchTarget.load``, on all ranks at once; each reads its own part only."""
        from transformers import AutoConfig
        from transformers.distributed.configuration_utils import DistributedConfig

        directory = resolve_target(path)
        try:
            config = AutoConfig.from_pretrained(directory).get_text_config()
        except (OSError, ValueError) as exc:
            raise ModelError(f"{path} has no configuration that transformers reads: {exc}") from exc
        _check_heads(config, ranks.count)
        cut = DistributedConfig(tp_plan="auto", tp_size=ranks.count)
        return cls.load(path, reading={"distributed_config": cut}, ranks=ranks, **settings)

    def logits(self, batch: Sequence[Work]) -> Tensor:
        """As ``TorchTarget.logits``, on all ranks. Raises SystemExit when one of them fails."""
        try:
            if self.lost is not None:
                raise RuntimeError(self.lost)
            self._tell(("logits", tuple(batch)))
            # Layers that stay transformers' own exchange with the patience of loading.
            self._ranks.meet(self._device)
            return super().logits(batch)
        except Exception as exc:
            if not self._leads:
                raise
            # The others may have failed at another place, or wait for what will not come.
            cause = " ".join(str(exc).split())[:160]
            self.lost = self.lost or f"a rank failed ({type(exc).__name__} {cause})"
            raise SystemExit(1) from exc

    def free(self, slot: int) -> None:
        """As ``TorchTarget.free``, on all ranks."""
        try:
            if self.lost is None:
                self._tell(("free", slot))
        except RuntimeError:
            self.lost = "a rank had gone"  # which the next forward says
        super().free(slot)

    def close(self) -> None:
        """As ``TorchTarget.close``, and the other ranks end. Raises ModelError for those that had
        gone already."""
        leads, self._leads = self._leads, False
        try:
            if leads and self.lost is None:
                self._ranks.tell(None)
        except RuntimeError as exc:
            self.lost = "a rank had gone"
            raise ModelError(
                f"{self.name}: {self.lost}: see its own line, start all again"
            ) from exc
        finally:
            super().close()
            self._ranks.leave()

    def follow(self) -> None:
        """Do what rank 0 tells until it ends. Raises ModelError when it or this rank fails.

        Called in the main thread. SIGTERM and SIGINT go to all ranks at once, and rank 0 needs the
        others until it has handed its sessions back: here they are only noted.
        """
        told: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: told.append(number))
        try:
            while (order := self._ranks.hear()) is not None:
                name, argument = order
                if name == "logits":
                    self.logits(argument)
                elif name == "free":
                    self.free(argument)
        except Exception as exc:
            if told:  # rank 0 ended before it had anything to serve
                return
            cause = " ".join(str(exc).split())[:160]
            raise ModelError(
                f"rank {self._ranks.rank} of {self.name} ends ({type(exc).__name__} {cause}): "
                "a part of a target is none, start all again"
            ) from exc
        finally:
            self.close()

    def _tell(self, order: tuple[str, Any]) -> None:
        if self._leads:
            self._ranks.tell(order)

    def _agree(self, blocks: int) -> int:
        """The fewest that fit on any rank: rank 0 names blocks for all of them."""
        mine = torch.tensor([blocks], device=self._device)
        parts = [torch.empty_like(mine) for _ in range(self._ranks.count)]
        dist.all_gather(parts, mine)
        return min(int(part) for part in parts)

    def _reference(self) -> tuple[list[int], Tensor]:
        found = super()._reference()  # what transformers itself computes over the ranks
        self._whole = shard_linears(self._model, self._model.tp_plan, self._ranks)
        return found

    def _pack(self) -> None:
        if self._whole:
            super()._pack()


def _check_heads(config: Any, count: int) -> None:
    """Raises ConfigError where the heads cannot be dealt out evenly."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % count or kv_heads % count:
        fits = [n for n in range(2, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
        mend = f"start {' or '.join(map(str, fits))} processes" if fits else "serve it in one"
        raise ConfigError(
            f"{heads} heads and {kv_heads} K/V heads cannot be dealt out to {count} ranks: {mend}"
        )
