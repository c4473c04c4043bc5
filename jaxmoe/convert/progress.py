"""How `from_hf` tells how far it is: a bar, or a function of the user's own."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

Progress = bool | None | Callable[[int, int], object]


@contextmanager
def reporter(progress: Progress, what: str, all_bytes: int) -> Iterator[Callable[[int], object]]:
    """Gives a function to be called with the bytes that were read last.

    Args:
      progress: as of `from_hf`.
      what: beside the bar.
      all_bytes: that will be read.

    Raises:
      ModuleNotFoundError: a bar was asked for, and tqdm is not installed.
    """
    if callable(progress):
        read = 0

        def call(count: int) -> None:
            nonlocal read
            read += count
            progress(read, all_bytes)

        yield call
        return
    # Of several processes one bar is enough, and a log is not to be filled with them.
    if not (progress or (progress is None and sys.stderr.isatty() and jax.process_index() == 0)):
        yield lambda count: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        if progress:
            raise ModuleNotFoundError(
                "from_hf: progress=True needs tqdm, which is not installed. Run: pip install 'jaxmoe[checkpoints]', "
                "or pass a function of the bytes read and the bytes in all."
            ) from error
        yield lambda count: None
        return
    with tqdm(total=all_bytes, desc=what, unit="B", unit_scale=True) as bar:
        yield bar.update
