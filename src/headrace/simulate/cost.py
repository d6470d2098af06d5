"""What a step costs, in seconds, as a function of its plan. Knows plans; no clock, no machine."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.step import StepPlan

Cost = Callable[[StepPlan], float]


def linear_cost(
    base_s: float = 0.002, per_token_s: float = 0.0001, per_context_token_s: float = 0.0
) -> Cost:
    """A step's fixed part, a part for each token computed, and one for each token attended to."""

    def cost(plan: StepPlan) -> float:
        tokens = plan.batch_tokens
        context = sum(plan.starts) + tokens
        return base_s + per_token_s * tokens + per_context_token_s * context

    return cost
