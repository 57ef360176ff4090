"""The layers of an encoder, written once for the steps of a device and of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm.bert.device_steps import Steps

if TYPE_CHECKING:
    from cupynorm.bert.config import EncoderConfig
    from cupynorm.bert.host_steps import HostSteps
    from cupynorm.bert.weights import Norm, Weights


def run_layers(config: EncoderConfig, weights: Weights, x: Any, steps: HostSteps | Steps) -> Any:
    """Return the last layer's hidden states of packed tokens: [tokens, hidden] in and out."""
    if isinstance(steps, Steps) and steps.takes_few(config.hidden, config.ffn, config.heads):
        return _run_few(config, weights, x, steps)
    total: Any = x
    if weights.first_norm is not None:
        x = steps.layer_norm(x, *weights.first_norm, config.eps)
    for layer in weights.layers:
        context = steps.attention(x, *layer.qkv, config.heads)
        branch = steps.linear(context, layer.attention.weight)
        x, total = _add(config, steps, branch, x, total, layer.attention.bias, layer.after_attention)
        wide = steps.linear(x, layer.wide.weight)
        wide = steps.bias_gelu(wide, layer.wide.bias, approximate=config.approximate)
        branch = steps.linear(wide, layer.ffn.weight)
        x, total = _add(config, steps, branch, x, total, layer.ffn.bias, layer.after_ffn)
    return x


def _add(
    config: EncoderConfig,
    steps: HostSteps | Steps,
    branch: Any,
    x: Any,
    total: Any,
    bias: Any,
    norm: Norm,
) -> tuple[Any, Any]:
    """Return LayerNorm(branch + bias + residual), and that sum with norm="pre", where it is the next residual."""
    pre = config.norm == "pre"
    residual = total if pre else x
    return steps.add_layer_norm(branch, residual, *norm, bias=bias, eps=config.eps, return_sum=pre)


def _run_few(config: EncoderConfig, weights: Weights, total: Any, steps: Steps) -> Any:
    """Compute the same in 5 launches a layer, for few tokens.

    A sum's LayerNorm is computed by the product that takes it as its input. That product stores it, too, where it is a
    residual.
    """
    post, norm = config.norm == "post", weights.first_norm
    for layer in weights.layers:
        keep = post and norm is not None
        qkv, x = steps.product(total, layer.qkv.weight, norm=norm, eps=config.eps, keep=keep)
        context = steps.attend(qkv, layer.qkv.bias, config.heads)
        residual = x if keep else total
        total, _ = steps.product(
            context, layer.attention.weight, bias=layer.attention.bias, residual=residual
        )
        wide, x = steps.product(
            *(total, layer.wide.weight),
            norm=layer.after_attention,
            eps=config.eps,
            keep=post,
            bias=layer.wide.bias,
            gelu=config.approximate,
        )
        residual = x if post else total
        total, _ = steps.product(wide, layer.ffn.weight, bias=layer.ffn.bias, residual=residual)
        norm = layer.after_ffn
    return total if norm is None else steps.layer_norm(total, *norm, config.eps)
