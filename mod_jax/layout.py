"""What the letters of `model.layout` stand for."""

import dataclasses

# What a letter of `model.layout` stands for: the block's mixer and its channel (see `models.blocks`), None without one.
# They are named and not imported, for a config is read before JAX starts. Lower case, the class names the parameters.
LETTERS: dict[str, tuple[str | None, str | None]] = {
    "F": ("mod_jax.models.attention.Attention", "mod_jax.models.mlp.MLP"),
    "A": ("mod_jax.models.attention.Attention", None),
    "M": (None, "mod_jax.models.mlp.MLP"),
    "E": ("mod_jax.models.attention.Attention", "mod_jax.models.moe.Experts"),
}
ROUTED = {"R": "F"}  # what other letters stand for, routed; a lower-case letter is its upper case, routed


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One block of the stack: its letter in the layout, and the fraction of tokens that it computes on."""

    kind: str
    capacity: float

    @property
    def routed(self) -> bool:
        return is_routed(self.kind)

    @property
    def mixer(self) -> str | None:
        return LETTERS[unrouted(self.kind)][0]

    @property
    def channel(self) -> str | None:
        return LETTERS[unrouted(self.kind)][1]

    @property
    def has_experts(self) -> bool:
        return self.channel == LETTERS["E"][1]


def is_routed(kind: str) -> bool:
    return kind != unrouted(kind)


def unrouted(kind: str) -> str:
    """The letter of the same block without routing."""
    return ROUTED.get(kind, kind.upper())
