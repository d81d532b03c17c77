"""What byte-level BPE of the library `tokenizers` needs to be told, and how the library is imported."""

from mod_jax.errors import ConfigError


def byte_alphabet() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself if it shows, else one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def import_tokenizers(name: str):
    """The library. `name` is the tokenizer that needs it, as `data.tokenizer` spells it."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"config.data.tokenizer = '{name}' needs an extra: pip install -e '.[bpe]'") from None
    return tokenizers
