"""Where expert `e` of layer `l` lies: which file, which offset, how many bytes.

Owns towers: the stacks of routed experts as they lie in the file, each under a uid from a counter that never goes back,
so that two models, or a model opened again, share no expert key. Reads no bytes. Invariant: the slices of a tower agree
on the number of experts and on their shapes, and every span lies inside its tensor.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.gguf.file import GGUFFile, TensorInfo

_TOWER_NAME = re.compile(r"blk\.(\d{1,6})\.ffn_(gate_up|gate|up|down)_exps\.weight")
_ONE_TENSOR_AN_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_ROLES = (("gate", "up", "down"), ("gate_up", "down"), ("up", "down"))
_uids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    file_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertTower:
    """One layer's stack of experts as it lies in the file.

    Attributes:
        slices: the tensors [num_experts, rows, columns], in the order of `roles`.
        roles: ("gate", "up", "down"), ("gate_up", "down") or, without a gate, ("up", "down").
    """

    uid: int
    layer: int
    num_experts: int
    slices: tuple[TensorInfo, ...]
    roles: tuple[str, ...]

    def slice_bytes(self, i: int) -> int:
        """Bytes of one expert in slice `i`."""
        return self.slices[i].nbytes // self.num_experts

    def span(self, expert: int, i: int) -> Span:
        """Where slice `i` of `expert` lies."""
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of layer {self.layer}, which has {self.num_experts}")
        tensor, nbytes = self.slices[i], self.slice_bytes(i)
        return Span(tensor.file_index, tensor.offset + expert * nbytes, nbytes)


def find_towers(file: GGUFFile) -> dict[int, ExpertTower]:
    """The towers of a model by layer; every call gives new uids."""
    found: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in file.tensors.items():
        if match := _TOWER_NAME.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = tensor
        elif _ONE_TENSOR_AN_EXPERT.fullmatch(name):
            raise UnsupportedModelError(
                f"{file.paths[tensor.file_index]}: {name} is one tensor an expert, the old layout; convert again"
            )
    return {layer: _tower(file, layer, found[layer]) for layer in sorted(found)}


def _tower(file: GGUFFile, layer: int, by_role: dict[str, TensorInfo]) -> ExpertTower:
    where = f"{file.paths[0]}: the experts of layer {layer}"
    roles = next((roles for roles in _ROLES if set(roles) == set(by_role)), None)
    if roles is None:
        raise GGUFError(
            f"{where} have {', '.join(sorted(by_role))}, not (gate,) up, down or gate_up, down; convert again"
        )
    slices = tuple(by_role[role] for role in roles)
    shapes = [tensor.shape for tensor in slices]
    if any(len(shape) != 3 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise GGUFError(f"{where} disagree on their number: shapes {shapes}; convert again")
    num_experts, hidden, ffn = shapes[-1]
    wanted = (num_experts, 2 * ffn if "gate_up" in roles else ffn, hidden)
    if any(shape != wanted for shape in shapes[:-1]):
        raise GGUFError(f"{where} do not fit together: shapes {shapes} ({', '.join(roles)}); convert again")
    return ExpertTower(next(_uids), layer, num_experts, slices, roles)
