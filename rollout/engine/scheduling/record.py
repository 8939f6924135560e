"""What was sampled for a sequence, until it ends."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.door.vllm_scheduler import EngineCoreOutput, Request
from rollout.engine.experts.returned_routes import RowsKept

OTHERS = "rl_others"
SAME = ("client_index", "arrival_time", "mm_features", "lora_request", "cache_salt")
"""Fields copied from the first request."""


@dataclass(eq=False, slots=True)
class Record:
    """What was sampled for one request: [tokens] float32 and [tokens] int32, and its routes."""

    request: Request
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    rows: RowsKept = field(default_factory=RowsKept)
    stops: frozenset[int] = frozenset()
    most: int = 0
    """Sampled tokens at which it ends in any case; 0: it is always vLLM's."""

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> "Record":
        given: Any = request.sampling_params
        stops = frozenset((*(given.stop_token_ids or ()), given.eos_token_id))
        odd = given.repetition_detection is not None or request.structured_output_request or request.resumable
        most = 0 if odd else min(request.max_tokens, max_model_len - request.num_prompt_tokens)
        return cls(request, stops=stops, most=most)

    def finish(self, output: EngineCoreOutput) -> None:
        """Put the whole sequence into the last output, by vLLM's field for KV transfers."""
        output.new_token_ids = list(self.request.output_token_ids)
        if len(output.new_token_ids) != len(self.logprobs):
            counts = f"{len(output.new_token_ids)} tokens and {len(self.logprobs)} log-probabilities"
            raise RuntimeError(f"vLLM sampled {counts} for request {output.request_id}")
        arrays = {"logprobs": self.logprobs.tobytes(), "versions": self.versions.tobytes()}
        output.kv_transfer_params, output.routed_experts = arrays, self.rows.joined()


def alike(first: Request) -> list[Request]:
    """Expand a request to all that it names. The prompt is hashed once, because this happens between steps."""
    given, made = first.sampling_params, [first]
    for name in ((given and given.extra_args) or {}).get(OTHERS, ()):
        same = {key: getattr(first, key) for key in SAME}
        made.append(other := Request(name, first.prompt_token_ids, given, None, **same))
        other.block_hashes, other._block_hasher = first.block_hashes.copy(), first._block_hasher
    return made


def unpack(output: EngineCoreOutput) -> "tuple[array[float], array[int]]":
    arrays: Any = output.kv_transfer_params
    return array("f", arrays["logprobs"]), array("i", arrays["versions"])
