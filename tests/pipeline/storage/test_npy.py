"""Arrays as files, beside NumPy's own reader and writer."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.storage import npy

SHAPES = arrays.array_shapes(min_dims=0, min_side=0)
WHOLE = npy.to_bytes(np.arange(9))
KINDS = st.sampled_from(["uint64", "int64", "int8", "float16", "float32", "bool", ">u8"])


@given(KINDS.flatmap(lambda kind: arrays.arrays(kind, SHAPES)), st.booleans())
def test_an_array_is_read_as_numpy_reads_it(array, columns_first):
    array = np.asfortranarray(array) if columns_first else array
    found = npy.from_bytes(npy.to_bytes(array))
    np.testing.assert_array_equal(found, np.load(io.BytesIO(npy.to_bytes(array))))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.flags.writeable


def test_many_threads_read_at_once():
    """np.load failed in one of some hundred runs: it evaluates headers as Python."""
    data = npy.to_bytes(np.arange(3))
    with ThreadPoolExecutor(8) as pool:
        assert {len(array) for array in pool.map(npy.from_bytes, [data] * 2_000)} == {3}


@pytest.mark.parametrize("data", [b"", b"PK", WHOLE[:-1], WHOLE[:40]])
def test_other_data_is_refused(data):
    with pytest.raises(ValueError, match=r"header|magic|buffer"):
        npy.from_bytes(data)
