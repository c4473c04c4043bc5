"""The weighted sums that a combine has to return, made by the host, and how far from them it is.

`exchange.py` asks, of the answers that it gave and of tokens that came back.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxmoe.testing import tolerance

SAMPLED_TOKENS = 64  # whose sums in float32 say how far sums may be off
CHUNK_TOKENS = 1024  # that the host adds up at once: 60 MB of float64 for 7168 columns


class Sums(NamedTuple):
    """What `combine` has to add up, on the host.

    Args:
      answers: of all rows.
      rows: `[tokens, top_k]`, the row of each slot.
      weights: of each slot.
    """

    answers: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    def of(self, tokens: Any, dtype: Any) -> np.ndarray:
        """Returns the weighted sums of these tokens, slot after slot in this dtype."""
        slots = zip(self.rows[tokens].T, self.weights[tokens].T.astype(dtype), strict=True)
        return sum(weight[:, None] * self.answers[row].astype(dtype) for row, weight in slots)  # pyright: ignore[reportReturnType]


def is_off(sums: Sums, y: np.ndarray) -> str | None:
    """Says how far the worst token is from its weighted sum, where that is more than `_allowed`."""
    sampled = _sampled(y)
    allowed = _allowed(sums.of(sampled, np.float32).astype(y.dtype), sums.of(sampled, np.float64), y.dtype)
    error = np.max([_errors(y[chunk], sums.of(chunk, np.float64)).max() for chunk in _chunks(y)])
    return _more_than(error, allowed)


def has_changed(tokens: np.ndarray, weights: np.ndarray, rounds: int, y: np.ndarray) -> str | None:
    """Says the same of tokens that were sent and came back in so many rounds: their weights add up to one, nearly."""
    sampled, kept = _sampled(y), weights.sum(1, keepdims=True, dtype=np.float64) ** rounds
    rough, truth = tokens[sampled], kept[sampled] * tokens[sampled].astype(np.float64)
    its_own = np.broadcast_to(np.arange(len(sampled))[:, None], (len(sampled), weights.shape[1]))
    for _ in range(rounds):
        rough = Sums(rough, its_own, weights[sampled]).of(slice(None), np.float32).astype(y.dtype)
    error = np.max([_errors(y[chunk], kept[chunk] * tokens[chunk].astype(np.float64)).max() for chunk in _chunks(y)])
    return _more_than(error, _allowed(rough, truth, y.dtype))


def _sampled(y: np.ndarray) -> np.ndarray:
    return np.linspace(0, len(y) - 1, SAMPLED_TOKENS).astype(int)


def _chunks(y: np.ndarray) -> list[slice]:
    return [slice(begin, begin + CHUNK_TOKENS) for begin in range(0, len(y), CHUNK_TOKENS)]


def _errors(y: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns the relative error of each token; NaN stays NaN."""
    return np.linalg.norm(y.astype(np.float64) - truth, axis=1) / np.linalg.norm(truth, axis=1)


def _allowed(rough: np.ndarray, truth: np.ndarray, dtype: Any) -> float:
    """Returns the relative error that a token may have: `jaxmoe.testing.tolerance` of the worst one in the sample."""
    return max(tolerance(*of_token, dtype) for of_token in zip(rough, truth, strict=True))


def _more_than(error: float, allowed: float) -> str | None:
    """NaN is no error that is small."""
    if error <= allowed:
        return None
    return f"what comes back is not the weighted sum: a token has an error of {error:.1e}, above {allowed:.1e}"
