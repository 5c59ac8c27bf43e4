"""The roofline: the least time that a step, and a whole workload, can take on a device. Imports no jax.

A step reads all weights once and the live KV of its rows, and computes its tokens; the longer of the two is its time at
the roof:

    s = max(bytes / read rate, flops / matrix rate)

Weights count as they are stored; of the embedding table only a gather is read, unless it is the output projection too.
Attention is charged for the scores that are not masked. A token's own K and V are written and read once. Norms,
sampling, activations and the host are free, and so are padding and launches.
"""

from dataclasses import dataclass

import numpy as np

from scripts.engine.workloads import Load


@dataclass(frozen=True)
class Roofs:
    """What the device reaches, measured in the same run.

    Attributes:
      read: bytes a second.
      matmul: flops a second, in the dtype of the weights.
    """

    read: float
    matmul: float


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a step of a model reads and computes.

    Attributes:
      weight_bytes: read in every step: layers and output projection.
      token_flops: of a token in the layers' matrices, a multiply-add counted as 2.
      row_flops: of a row that samples, in the output projection.
      kv_token_bytes: K and V of a token, over all layers.
      pair_flops: of a query and a key it sees, over all layers and heads.
    """

    weight_bytes: int
    token_flops: int
    row_flops: int
    kv_token_bytes: float
    pair_flops: int

    def step_s(self, roofs: Roofs, *, tokens: float, rows: float, kv_tokens: float, pairs: float) -> float:
        """Seconds of a step at the roof.

        Args:
          tokens: computed.
          rows: that sample.
          kv_tokens: tokens whose K and V are read; those that are shared count once.
          pairs: of queries and keys that are not masked.
        """
        read = self.weight_bytes + kv_tokens * self.kv_token_bytes
        flops = tokens * self.token_flops + rows * self.row_flops + pairs * self.pair_flops
        return max(read / roofs.read, flops / roofs.matmul)

    def decode_s(self, roofs: Roofs, rows: int, context: float) -> float:
        """Seconds of a decode step of `rows` rows that see `context` tokens each.

        Example:
          >>> cost = ModelCost(weight_bytes=100, token_flops=0, row_flops=0, kv_token_bytes=2.0, pair_flops=0)
          >>> cost.decode_s(Roofs(read=10.0, matmul=1.0), rows=5, context=10)
          20.0
        """
        return self.step_s(roofs, tokens=rows, rows=rows, kv_tokens=rows * context, pairs=rows * context)

    def load_s(
        self, roofs: Roofs, load: Load, *, max_num_seqs: int, budget: int, prefill_budget: int | None = None
    ) -> float:
        """Seconds of a workload at the roof, by the schedule of continuous batching with unbounded memory.

        Each step holds a token of every row that decodes, and prompt tokens up to the budget, in the order of arrival.

        Args:
          load: the requests.
          max_num_seqs: rows of a step at the most.
          budget: tokens of a step at the most.
          prefill_budget: of one in which nobody decodes; `None`: as many.
        """
        if load.in_turn:
            one = [Load(load.name, (p,), (o,)) for p, o in zip(load.prompts, load.outputs, strict=True)]
            budgets = {"budget": budget, "prefill_budget": prefill_budget}
            return sum(self.load_s(roofs, alone, max_num_seqs=1, **budgets) for alone in one)
        prompts, outputs = np.array(load.prompts), np.array(load.outputs)
        done = np.full(len(prompts), load.shared)  # the first one computes what all share
        done[0] = 0
        ends, seconds = prompts + outputs - 1, 0.0  # the last output token is not computed
        while (live := np.nonzero(done < ends)[0][:max_num_seqs]).size:
            have, lacks = done[live], np.maximum(prompts[live] - done[live], 1)
            decodes = lacks == 1
            wants = np.where(decodes, 0, lacks)
            largest = budget if decodes.any() else prefill_budget or budget
            room = largest - decodes.sum() - (np.cumsum(wants) - wants)
            taken = np.where(decodes, 1, np.clip(room, 0, wants))
            after, runs = have + taken, taken > 0
            pairs = (taken * have + taken * (taken + 1) / 2).sum()
            kv_tokens = after[runs].sum() - load.shared * max(int((after[runs] > load.shared).sum()) - 1, 0)
            samples = int((runs & (after >= prompts[live])).sum())
            seconds += self.step_s(roofs, tokens=float(taken.sum()), rows=samples, kv_tokens=kv_tokens, pairs=pairs)
            done[live] = after
        return seconds
