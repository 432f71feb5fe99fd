"""The operators a model may use, stated once for every device.

A model describes each layer as operations on a `Graph`; a `Backend` compiles such a description into a `Segment`, runs
it for every token and owns the buffers that connect segments with the host. Shapes are row-major (outermost first); a
row is one token of the batch. Nothing here knows a device, and a model holds these base types only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from expertserve.experts.batch import Fence, SlotBatch
    from expertserve.gguf.file import TensorInfo
    from expertserve.gguf.spans import ExpertTower

ReadTensor = Callable[[str, memoryview], None]
Mask = NDArray[np.float16]
NO_MASKS: Mapping[str, Mask] = MappingProxyType({})


class Tensor:
    """A value inside a graph; only its shape is public."""

    __slots__ = ("shape",)

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)


class RopeStyle(Enum):
    """Which two elements of a head rotate together: neighbours (NORMAL) or element i and i + dims / 2 (NEOX)."""

    NORMAL = 0
    NEOX = 2


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding as in RoFormer (arXiv:2104.09864), with YaRN's interpolation (arXiv:2309.00071).

    Attributes:
        dims: leading elements of a head that rotate.
        style: pairing of the rotated elements.
        freq_base: base of the geometric frequency series.
        freq_scale: factor on positions (1 / scaling factor).
        original_context: context length of training; YaRN's ramp depends on it.
        ext_factor: YaRN's mix of interpolation and extrapolation, 0 for none.
        attn_factor: magnitude of the rotated vectors, before YaRN's own correction.
        beta_fast, beta_slow: bounds of YaRN's ramp, in rotations over the original context.
        freq_factors: name of a weight [dims / 2] that divides each frequency, or None.
    """

    dims: int
    style: RopeStyle
    freq_base: float
    freq_scale: float = 1.0
    original_context: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: str | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer's part of the KV cache: heads and elements a head of K and of V.

    Attributes:
        values_in_keys: a value is the first `v_dim` elements of its key, and is not kept twice; for one head only.
    """

    layer: int
    num_heads: int
    k_dim: int
    v_dim: int
    values_in_keys: bool = False

    def cell_bytes(self, kv_type: KVType) -> int:
        """Bytes of one token."""
        return kv_type.row_bytes(self.num_heads * (self.k_dim + (0 if self.values_in_keys else self.v_dim)))


@dataclass(frozen=True, slots=True)
class RecurrentLayout(ABC):
    """One recurrent layer's part of a sequence's state: a convolution's last inputs, and a matrix a head or none.

    Attributes:
        conv_width: inputs that the convolution sees, the newest among them.
    """

    layer: int
    conv_width: int

    @property
    @abstractmethod
    def channels(self) -> int:
        """Elements that are convolved, each by itself."""

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape of what is carried on beside the convolution."""
        return 0, 0, 0

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the convolution's state, oldest input first."""
        return self.conv_width - 1, self.channels

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state, in float32."""
        return 4 * (math.prod(self.conv_shape) + math.prod(self.matrix_shape))


@dataclass(frozen=True, slots=True)
class ConvLayout(RecurrentLayout):
    """A layer that convolves and carries nothing else on."""

    width: int

    @property
    def channels(self) -> int:
        return self.width


@dataclass(frozen=True, slots=True)
class DeltaLayout(RecurrentLayout):
    """A gated-DeltaNet layer.

    Attributes:
        grouped: value head h reads key head h // (value_heads / key_heads), else h % key_heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    grouped: bool

    @property
    def channels(self) -> int:
        """Elements of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class ScanLayout(RecurrentLayout):
    """A Mamba-2 layer.

    Attributes:
        groups: of heads that lie side by side and share how their states are written and read.
        state_dim: values that a head keeps of each of its head_dim elements.
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int

    @property
    def channels(self) -> int:
        """Elements of the heads' inputs and of all groups' B and C together."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.heads, self.state_dim, self.head_dim


class KVType(StrEnum):
    """Element type of the KV cache."""

    F16 = "f16"
    F32 = "f32"
    Q8_0 = "q8_0"

    def row_bytes(self, n: int) -> int:
        """Bytes of `n` elements; for Q8_0 `n` must be a multiple of 32."""
        return {KVType.F16: 2 * n, KVType.F32: 4 * n, KVType.Q8_0: n // 32 * 34}[self]


class HostAccess(Enum):
    """What the host does with a persistent buffer: write it before segments run, read it after one, or neither."""

    WRITES = "writes"
    READS = "reads"
    NONE = "none"


class Activation(Enum):
    """Gated activation of a feed-forward block.

    SILU: gate * sigmoid(gate) * up. GELU: the tanh form of arXiv:1606.08415, times up. SWIGLU_OAI, as gpt-oss has it:
    g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up limited to [-7, 7]. RELU: max(gate, 0) * up, which
    is the squared ReLU where up is its own gate.
    """

    SILU = "silu"
    GELU = "gelu"
    SWIGLU_OAI = "swiglu-oai"
    RELU = "relu"


class Graph(ABC):
    """A segment description under construction; methods return new float32 tensors unless they say otherwise."""

    rows: int

    @abstractmethod
    def embed(self, weight: str) -> Tensor:
        """Rows [rows, hidden] of the embedding `weight` for the batch's token ids."""

    @abstractmethod
    def load(self, buffer: str) -> Tensor:
        """The first rows of a persistent buffer that an earlier segment stored."""

    @abstractmethod
    def store(self, buffer: str, x: Tensor) -> None:
        """Keeps x in a persistent buffer for later segments or the host."""

    @abstractmethod
    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """x [.., in] times weight [out, in] transposed, plus bias [out]; a weight [in] is one output."""

    @abstractmethod
    def head_linear(self, x: Tensor, weight: str) -> Tensor:
        """x [rows, heads, in], each head times its own matrix of weight [heads, out, in], transposed."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: str | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467)."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight over the last axis (arXiv:1607.06450)."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, of equal shape."""

    @abstractmethod
    def add_weight(self, x: Tensor, weight: str) -> Tensor:
        """x [.., n] plus the weight [n]."""

    @abstractmethod
    def mul_weight(self, x: Tensor, weight: str) -> Tensor:
        """x [.., n] times the weight [n], or the weight [1]; x [rows, heads, n] also times the weight [heads, n]."""

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b; b may have a last axis of 1."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""

    @abstractmethod
    def clamp(self, x: Tensor, most: float) -> Tensor:
        """x limited to [-most, most]."""

    @abstractmethod
    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""

    @abstractmethod
    def tanh(self, x: Tensor) -> Tensor:
        """The hyperbolic tangent of x."""

    @abstractmethod
    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""

    @abstractmethod
    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """The gated activation of gate and up."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape."""

    @abstractmethod
    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the last axis."""

    @abstractmethod
    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        """a [.., n] and b [.., m] side by side: [.., n + m]; a single head of b [rows, 1, m] goes beside each of a."""

    @abstractmethod
    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        """x [rows, heads, dim] rotated by the batch's positions."""

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        kv: KVLayout,
        scale: float,
        *,
        mask: str = "mask",
        sinks: str | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Writes k and v [rows, kv heads, dim] to the batch's KV cells, then attends through one of the batch's masks.

        q is [rows, heads, k_dim]; query head i reads KV head i // (heads / kv heads). v is None exactly where values
        lie in keys. `mask` names the mask's buffer. `sinks` is a weight [heads]: one more score a head that takes part
        in the softmax and has no value. With a `softcap` c a score s becomes c * tanh(s / c). Returns
        [rows, heads * v_dim].
        """

    @abstractmethod
    def causal_conv(self, x: Tensor, weight: str, state: RecurrentLayout) -> Tensor:
        """Depthwise convolution of x [rows, channels] over the rows of each run, with `weight` [channels, width].

        What a run sees before its first row is its source state; its last inputs become its target state.
        """

    @abstractmethod
    def gated_delta(self, qkv: Tensor, alpha: Tensor, beta: Tensor, a: str, state: DeltaLayout, eps: float) -> Tensor:
        """The gated delta rule (arXiv:2412.06464) over the rows of each run: [rows, value_heads * value_dim].

        qkv is [rows, channels]: queries, keys, values; q and k are divided by max(their length, eps), q by
        sqrt(key_dim) too. alpha and beta are [rows, value_heads], `a` a weight [value_heads]. For each row and head,
        with S the state: S *= exp(a * softplus(alpha)); S += k (sigmoid(beta) * (v - k S)); the output is q S.
        """

    @abstractmethod
    def selective_scan(self, xbc: Tensor, dt: Tensor, a: str, d: str, state: ScanLayout) -> Tensor:
        """Mamba-2's recurrence (arXiv:2405.21060) over the rows of each run: [rows, heads * head_dim].

        xbc is [rows, channels]: an input x of each head, B of each group, C of each group; dt is [rows, heads], `a` and
        `d` are weights [heads, 1]. For each row and head, with S the state and t = softplus(dt): S = exp(a t) S +
        t B x; the output is C S + d x.
        """

    @abstractmethod
    def combine_experts(self, hidden: int, top_k: int, *, weighted: bool = True) -> Tensor:
        """Sum over j of weights[row, j] * expert output[row, j], added in order of j: [rows, hidden].

        Reads what the expert kernel and the router left in the buffers `expert_out` and `expert_weights`; without
        `weighted` every weight is 1.
        """

    @abstractmethod
    def select_outputs(self, x: Tensor) -> Tensor:
        """The rows of x [rows, n] whose logits the batch asks for: [outputs, n]."""


class Segment(ABC):
    """A compiled description; `run` executes it on the current batch."""

    @abstractmethod
    def run(self) -> None:
        """Computes the segment; its stored buffers are valid when this returns."""


class ExpertKernel(ABC):
    """The routed feed-forward of one slot layout: for each (token, expert) pair, down(act(gate x, up x)).

    Where experts have no gate, act gets up x for both.
    """

    @abstractmethod
    def begin(self, rows: int) -> None:
        """Starts a layer: input `ffn_input` [rows, hidden] has changed."""

    @abstractmethod
    def __call__(self, batch: SlotBatch) -> Fence | None:
        """Computes the pairs of `batch` into rows `pair` of buffer `expert_out`.

        Returns None when the kernel has finished, a fence when it was only launched.
        """


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the expert kernel must know beyond the slices.

    Attributes:
        top_k: experts a token takes.
        biases: by role of a slice, the dense weight [experts, outputs] whose row is added to that product.
        limit: with SILU and above 0, silu(gate) is at most it, and up within [-limit, limit].
        weigh_inputs: a pair's weight multiplies the products of gate and up (before their biases), and so the input.
    """

    hidden: int
    ffn: int
    top_k: int
    activation: Activation
    biases: Mapping[str, str] = field(default_factory=dict)
    weigh_inputs: bool = False
    limit: float = 0.0


class Backend(ABC):
    """A device: its weights, KV cache, buffers, compiled segments and kernels.

    Attributes:
        other_widths: rows of batches, narrower than the widest, whose segments are made in another way and may take
            more memory; a forward prepares them too.
    """

    other_widths: Sequence[int] = ()

    @abstractmethod
    def check(self, infos: Iterable[TensorInfo], towers: Iterable[ExpertTower]) -> None:
        """Raises UnsupportedModelError for a tensor type or shape this device cannot compute with."""

    @abstractmethod
    def memory(self) -> tuple[int, int] | None:
        """Free bytes of the device, and how many of them to leave to the backend's own workspace.

        None where the device's memory is the host's, which others know about.
        """

    @abstractmethod
    def load_weights(self, infos: Sequence[TensorInfo], read: ReadTensor, progress: Callable[[int], None]) -> None:
        """Reads the dense weights once; `progress` is called with the bytes of each tensor."""

    @abstractmethod
    def allocate_kv(self, layouts: Sequence[KVLayout], cells: int, kv_type: KVType) -> None:
        """Allocates the KV cache."""

    @abstractmethod
    def allocate_states(self, layouts: Sequence[RecurrentLayout], slots: int) -> None:
        """Allocates the recurrent states of `slots` sequences; runs come in the buffers `runs` and `num_runs`."""

    @abstractmethod
    def allocate_buffer(self, name: str, shape: Sequence[int], dtype: Any, access: HostAccess) -> None:
        """Allocates a zeroed persistent buffer; its first axis is rows."""

    @abstractmethod
    def host(self, name: str) -> NDArray[Any]:
        """A host array over the whole buffer, to read results from, or to write inputs to before `begin_batch`.

        `expert_weights` is written later, before `ExpertKernel.begin`.
        """

    @abstractmethod
    def begin_batch(self, rows: int, mask: Mask, outputs: int, more_masks: Mapping[str, Mask] = NO_MASKS) -> None:
        """Sets the shape of the batch and its attention mask [rows, n_kv]: 0 where visible, -inf where not.

        `more_masks` are of the same shape and go to the buffers they are named by, as `mask` goes to the buffer `mask`.
        """

    @abstractmethod
    def compile(self, name: str, build: Callable[[Graph], None]) -> Segment:
        """The segment `name` for the shape of the current batch, built at most once a shape."""

    @abstractmethod
    def expert_kernel(self, tower: ExpertTower, shape: ExpertShape) -> ExpertKernel:
        """A kernel for experts laid out like those of `tower`."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; idempotent."""
