"""AdamW with master weights and moments in host memory (`learner.cpu_offload: optimizer`). A step updates portion after
portion on the GPU by torch's own fused AdamW, so its numbers are those of a step without offloading."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from learner.model.master_weights import KINDS, SLOTS, HeldSpan, MasterWeights, rows_of


class OffloadedAdamW(AdamW):
    """Has the state of torch's AdamW: a checkpoint fits with and without offloading."""

    def __init__(self, masters: MasterWeights, **options: Any) -> None:
        super().__init__(masters.parameters, fused=True, **options)
        self._masters, self._parameters = masters, masters.parameters
        self.held = [masters.values, masters.memory(), masters.memory()]
        """Weights and both moments."""
        moments = (masters.as_sharded(memory) for memory in self.held[1:])
        for parameter, first, second in zip(self._parameters, *moments, strict=True):
            self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Waits for `found_inf`, as GradScaler calls it: the portions pass through host memory, and leave it unchanged
        if it is set. Gradients are divided by `grad_scale`."""
        assert closure is None
        if getattr(self, "found_inf", None):
            return
        gradients = [None if p.grad is None else rows_of(p.grad).view(-1) for p in self._parameters]
        lanes = _Lanes(self._masters)
        for index, spans in enumerate(self._masters.spans):
            hosts = [memory[index * lanes.portion : (index + 1) * lanes.portion] for memory in self.held]
            portion = lanes.fetch(index % SLOTS, hosts)
            self._update([span for span in spans if gradients[span.parameter] is not None], portion, gradients)
            lanes.store(index % SLOTS, hosts)
        lanes.finish()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            self.state[parameter]["step"] += float(gradient is not None)

    def _update(self, spans: list[HeldSpan], portion: Tensor, gradients: list[Tensor | None]) -> None:
        if not spans:
            return
        weights, first, second = ([kind[p.offset : p.offset + p.size] for p in spans] for kind in portion)
        given = [g[p.start : p.start + p.size] for p in spans if (g := gradients[p.parameter]) is not None]
        taken = torch.stack([self.state[self._parameters[p.parameter]]["step"] for p in spans])
        steps, group = list(taken.to(portion.device).unbind()), self.param_groups[0]
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
        options["grad_scale"] = getattr(self, "grad_scale", None)
        adamw(weights, given, first, second, [], steps, fused=True, beta1=beta1, beta2=beta2, **options)
        rows = [rows_of(self._parameters[p.parameter]).view(-1)[p.start : p.start + p.size] for p in spans]
        torch._foreach_copy_(rows, weights)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies into the same host memory; torch would copy to the GPU, in the parameters' dtype."""
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        for key, parameter in zip(keys, self._parameters, strict=True):
            for name, value in state_dict["state"][key].items():
                own = self.state[parameter][name]
                if name == "step":
                    own.fill_(float(value))
                else:
                    rows_of(own).copy_(rows_of(value))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


class _Lanes:
    """Streams that bring portions to the GPU and back."""

    def __init__(self, masters: MasterWeights) -> None:
        self.portion = min(masters.portion, len(masters.values))
        self._memory = torch.empty(SLOTS, KINDS, self.portion, device=masters.device)
        self._there: torch.cuda.Stream | None = None
        self._back: torch.cuda.Stream | None = None
        if masters.device.type == "cuda":
            self._there, self._back = (torch.cuda.Stream(masters.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._stored: dict[int, torch.cuda.Event] = {}
        if self._there:
            self._there.wait_stream(torch.cuda.current_stream())  # what the memory was used for before

    def fetch(self, slot: int, hosts: list[Tensor]) -> Tensor:
        found = self._memory[slot, :, : len(hosts[0])]
        with torch.cuda.stream(self._there) if self._there else nullcontext():
            if self._there and slot in self._stored:
                self._there.wait_event(self._stored[slot])
            for into, host in zip(found, hosts, strict=True):
                into.copy_(host, non_blocking=True)
        if self._there:
            torch.cuda.current_stream().wait_stream(self._there)
        return found

    def store(self, slot: int, hosts: list[Tensor]) -> None:
        if self._back:
            self._back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._back) if self._back else nullcontext():
            for host, out_of in zip(hosts, self._memory[slot], strict=True):
                host.copy_(out_of[: len(host)], non_blocking=True)
            if self._back:
                self._stored[slot] = self._back.record_event()

    def finish(self) -> None:
        if self._back:
            self._back.synchronize()
