"""The ops of gradients and losses in the kernels' terms; kernels/ops has their formulas.

The elements of most are two numbers, which the load's function gives: of softmax (dy, y), of a norm (dy * gamma, xhat),
of cross_entropy (x, q) with the target probability q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.lower.row import RowOp
from cupynorm.lower.tracing import traced

if TYPE_CHECKING:
    from cupynorm.lower.expressions import Expression

SOFTMAX_BACKWARD = RowOp("softmax_backward", "ops/backward.cuh", "SoftmaxBackward", fields=2, of_sums=True)
LOG_SOFTMAX_BACKWARD = RowOp(
    "log_softmax_backward",
    "ops/backward.cuh",
    "LogSoftmaxBackward",
    fields=2,
    late_exponential=True,
    of_sums=True,
)
LAYER_NORM_BACKWARD = RowOp(
    "layer_norm_backward", "ops/backward.cuh", "LayerNormBackward", fields=2, of_sums=True
)
RMS_NORM_BACKWARD = RowOp("rms_norm_backward", "ops/backward.cuh", "RmsNormBackward", fields=2, of_sums=True)

FIELD_SUMS = RowOp("field_sums", "ops/backward.cuh", "FieldSums", stats=("first", "second"), fields=2)

# stats: where the loss and log(sum(exp(x))) go; in eps' place: z, the factor of log(sum(exp(x)))^2
CROSS_ENTROPY = RowOp(
    "cross_entropy", "ops/losses.cuh", "CrossEntropy", stats=("loss", "lse"), has_eps=True, fields=2
)
# the same where a row's target is its label and nothing else: the elements are x
LABEL_CROSS_ENTROPY = RowOp(
    "cross_entropy",
    "ops/losses.cuh",
    "LabelCrossEntropy",
    stats=("loss", "lse"),
    has_eps=True,
    early_exponential=True,
)
# the same where a part of the target is spread evenly over all columns, for float32: 1 - smoothing is the label's
SMOOTH_CROSS_ENTROPY = RowOp(
    "cross_entropy",
    "ops/losses.cuh",
    "SmoothCrossEntropy",
    stats=("loss", "lse"),
    has_eps=True,
    early_exponential=True,
    numbers=("smoothing", "spread"),
    registers=4,
)
LOGSUMEXP = RowOp("logsumexp", "ops/losses.cuh", "LogSumExp", stats=("lse",), row_numbers=4)
OMITTING_LOGSUMEXP = RowOp(
    "logsumexp", "ops/omitting.cuh", "OmittingLogSumExp", stats=("lse",), row_numbers=4
)
# (x, b) is an element; its one option: whether nan is left out
SIGNED_LOGSUMEXP = RowOp(
    "logsumexp", "ops/signed_logsumexp.cuh", "SignedLogSumExp", stats=("lse", "sign"), fields=2
)

# (dy, y) of the loaded value and its one operand, as they are
PAIR: Expression = traced(lambda dy, y: (dy, y), 2)
