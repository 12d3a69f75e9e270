"""A mixture of experts as config.json describes it: how many, how wide, how many a token takes, in which layers."""

from __future__ import annotations

from dataclasses import dataclass

from .config_reader import ConfigReader, short


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRules:
    """How an architecture says and stores its experts.

    width_key: config.json's name for an expert's columns.
    selective: decoder_sparse_step and mlp_only_layers say which layers have experts, norm_topk_prob whether a token's
        weights are divided by their sum. Otherwise every layer has them and they are.
    block, gate, up, down: what a checkpoint that keeps experts apart calls a layer's experts and an expert's matrices.
    """

    width_key: str
    selective: bool
    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """Units: width is one expert's columns, of the whole model. normalize: a token's weights are divided by their sum.
    layers: of every layer, whether it has experts in place of an MLP.
    """

    num_experts: int
    experts_per_token: int
    width: int
    normalize: bool
    layers: tuple[bool, ...]
    rules: ExpertRules


def read_expert_config(reader: ConfigReader, rules: ExpertRules, num_layers: int) -> ExpertConfig:
    """Raises: ValueError naming the key for a value that is missing or cannot be."""
    num_experts = _num_experts(reader)
    experts_per_token = reader.size("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ValueError(
            f"{reader.where}: num_experts_per_tok must be at most the {num_experts} experts, got {experts_per_token}"
        )
    return ExpertConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        width=reader.size(rules.width_key),
        normalize=reader.flag("norm_topk_prob") if rules.selective else True,
        layers=_layers(reader, num_layers) if rules.selective else (True,) * num_layers,
        rules=rules,
    )


def _num_experts(reader: ConfigReader) -> int:
    """Older folders say num_experts, newer ones num_local_experts; the Mixtrals always the latter."""
    keys = [key for key in ("num_local_experts", "num_experts") if key in reader.values]
    counts = {reader.size(key) for key in keys or ["num_local_experts"]}
    if len(counts) > 1:
        raise ValueError(
            f"{reader.where}: num_local_experts and num_experts must be the same, got "
            f"{short(reader.values['num_local_experts'])} and {short(reader.values['num_experts'])}"
        )
    return counts.pop()


def _layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    every = reader.size("decoder_sparse_step", 1)
    dense = reader.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in dense
    ):
        raise ValueError(
            f"{reader.where}: mlp_only_layers must be a list of layer numbers, got {short(dense)}"
        )
    return tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
