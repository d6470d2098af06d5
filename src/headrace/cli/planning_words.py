"""vLLM's words on the command line of fit, plan, simulate and cost: read as ours, or answered.

Serving has a table of all engines' words (core/foreign/); planning has few flags, whose meanings
are the same, so that they are only renamed. A flag that nobody knows is left to the parser.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from headrace.core.errors import ConfigError

# vLLM's, and what SGLang calls the same.
_OURS = {
    "--tensor-parallel-size": "--tp",
    "--tp-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--pp-size": "--pp",
    "-pp": "--pp",
    "--data-parallel-size": "--replicas",
    "--dp-size": "--replicas",
    "-dp": "--replicas",
    "--max-model-len": "--context",
    "--context-length": "--context",
    "--gpu-memory-utilization": "--gpu-memory",
    "--quantization": "--quant",
    "-q": "--quant",
    "--kv-cache-dtype": "--kv-dtype",
    "--max-num-seqs": "--max-sequences",
    "--max-running-requests": "--max-sequences",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--request-rate": "--rate",
    "--num-prompts": "--requests",
}
_SAME = {"--rate": "--rps"}  # where a command has the other word


class PlanningCommand(TyperCommand):
    """A command that takes vLLM's words for its own flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            flag
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for flag in (*param.opts, *param.secondary_opts)
        }
        return super().parse_args(ctx, [_read(word, own, self.name or "") for word in args])


def _read(word: str, own: set[str], command: str) -> str:
    flag, equals, value = word.partition("=")
    if not flag.startswith("-") or flag in own:
        return word
    ours = _OURS.get(flag)
    if ours is None:
        return _answered(word, flag, command)
    if ours not in own:
        ours = _SAME.get(ours, ours)
    if ours not in own:
        raise ConfigError(
            f"{flag} is our {ours}, which `headrace {command}` does not have.", "Leave it out."
        )
    return f"{ours}{equals}{value}"


def _answered(word: str, flag: str, command: str) -> str:
    """A word of serving that planning has none for."""
    from headrace.core.foreign.answers import find_flag

    if find_flag(flag) is None:
        return word
    raise ConfigError(
        f"{flag} is a flag of serving, which `headrace {command}` does not have.",
        'Leave it out; `headrace fit --from "vllm serve ..."` reads a whole command.',
    )
