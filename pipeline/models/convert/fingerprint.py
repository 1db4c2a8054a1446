"""FarmHash's Fingerprint64 (Pike and Alakuijala, Google 2014): TensorFlow's "fast" hash of strings.

The hash of a piece that a vocabulary lacks chooses one of ConveRT's spare embedding rows, so a model and
its tokenizer have to agree on every bit of it. Numbers are unsigned 64-bit; sums and products wrap around.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
# Primes between 2^63 and 2^64.
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81

_Pair = tuple[int, int]


def fingerprint64(data: bytes) -> int:
    """The fingerprint of some bytes, 0 to 2^64 - 1. Texts of up to 16, 32 and 64 bytes and longer ones
    are hashed by four different rules."""
    size = len(data)
    if size <= 16:
        return _hash_up_to_16(data)
    if size <= 32:
        return _hash_up_to_32(data)
    if size <= 64:
        return _hash_up_to_64(data)
    return _hash_longer(data)


def _word(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 8], "little")


def _half_word(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 4], "little")


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return (value >> bits | value << (64 - bits)) & _MASK


def _shift_mix(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _hash_words(low: int, high: int, factor: int) -> int:
    """Two words to one (Murmur's mixing)."""
    high &= _MASK
    mixed = _shift_mix(((low & _MASK) ^ high) * factor)
    return _shift_mix((high ^ mixed) * factor) * factor & _MASK


def _hash_up_to_16(data: bytes) -> int:
    size = len(data)
    factor = _K2 + size * 2
    if size >= 8:
        first, last = _word(data, 0) + _K2, _word(data, size - 8)
        low = _rotate(last, 37) * factor + first
        high = (_rotate(first, 25) + last) * factor
        return _hash_words(low, high, factor)
    if size >= 4:
        return _hash_words(size + (_half_word(data, 0) << 3), _half_word(data, size - 4), factor)
    if size > 0:
        low = data[0] + (data[size >> 1] << 8)
        high = size + (data[-1] << 2)
        return _shift_mix(low * _K2 ^ high * _K0) * _K2 & _MASK
    return _K2


def _hash_up_to_32(data: bytes) -> int:
    size = len(data)
    factor = _K2 + size * 2
    a, b = _word(data, 0) * _K1, _word(data, 8)
    c, d = _word(data, size - 8) * factor, _word(data, size - 16) * _K2
    low = _rotate(a + b, 43) + _rotate(c, 30) + d
    return _hash_words(low, a + _rotate(b + _K2, 18) + c, factor)


def _hash_up_to_64(data: bytes) -> int:
    size = len(data)
    factor = _K2 + size * 2
    a, b = _word(data, 0) * _K2, _word(data, 8)
    c, d = _word(data, size - 8) * factor, _word(data, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _hash_words(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = _word(data, 16) * factor, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * factor, (z + _word(data, size - 24)) * factor
    low = _rotate(e + f, 43) + _rotate(g, 30) + h
    return _hash_words(low, e + _rotate(f + a, 18) + g, factor)


def _hash_32_bytes(data: bytes, start: int, a: int, b: int) -> _Pair:
    """Two words of 32 bytes and two seeds."""
    w, x, y, z = (_word(data, start + offset) for offset in (0, 8, 16, 24))
    a += w
    b = _rotate(b + a + z, 21)
    total = a + x + y
    return (total + z) & _MASK, (b + _rotate(total, 44) + a) & _MASK


def _hash_longer(data: bytes) -> int:
    """64 bytes at a time; the last 64 bytes end the text, and may overlap those before."""
    size = len(data)
    x, y = _SEED, (_SEED * _K1 + 113) & _MASK
    z = _shift_mix(y * _K2 + 113) * _K2 & _MASK
    v: _Pair = (0, 0)
    w: _Pair = (0, 0)
    x = (x * _K2 + _word(data, 0)) & _MASK
    for start in range(0, (size - 1) // 64 * 64, 64):
        x = _rotate(x + y + v[0] + _word(data, start + 8), 37) * _K1
        y = _rotate(y + v[1] + _word(data, start + 48), 42) * _K1
        x = (x & _MASK) ^ w[1]
        y = (y + v[0] + _word(data, start + 40)) & _MASK
        z = _rotate(z + w[0], 33) * _K1 & _MASK
        v = _hash_32_bytes(data, start, v[1] * _K1, x + w[0])
        w = _hash_32_bytes(data, start + 32, z + w[1], y + _word(data, start + 16))
        z, x = x, z
    factor, start = _K1 + ((z & 0xFF) << 1), size - 64
    w = (w[0] + ((size - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x = _rotate(x + y + v[0] + _word(data, start + 8), 37) * factor
    y = _rotate(y + v[1] + _word(data, start + 48), 42) * factor
    x = (x & _MASK) ^ (w[1] * 9 & _MASK)
    y = (y + v[0] * 9 + _word(data, start + 40)) & _MASK
    z = _rotate(z + w[0], 33) * factor & _MASK
    v = _hash_32_bytes(data, start, v[1] * factor, x + w[0])
    w = _hash_32_bytes(data, start + 32, z + w[1], y + _word(data, start + 16))
    z, x = x, z
    low = _hash_words(v[0], w[0], factor) + _shift_mix(y) * _K0 + z
    return _hash_words(low, _hash_words(v[1], w[1], factor) + x, factor)
