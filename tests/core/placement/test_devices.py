"""Which GPUs of its node a worker has, and what names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.placement.devices import cuda_names, indices, naming, own
from tests.profiles import examples


@pytest.mark.parametrize(
    ("nproc", "gpus", "expected"),
    [
        (2, 1, [[0], [1]]),
        (2, 2, [[0, 1], [2, 3]]),
        (2, 0.5, [[0], [0]]),
        (4, 0.5, [[0], [0], [1], [1]]),
        (3, 0.4, [[0], [0], [1]]),
        (6, 0.3333, [[0], [0], [0], [1], [1], [1]]),
        (2, 1.5, [[0], [1, 2]]),
        (3, 0, [[], [], []]),
    ],
)
def test_gpus_of_each_worker(nproc, gpus, expected):
    assert [[*indices(rank, nproc, gpus)] for rank in range(nproc)] == expected


@examples(200)
@given(st.integers(1, 16), st.one_of(st.integers(1, 4), st.floats(0.05, 1)))
def test_workers_divide_all_gpus_of_their_node(nproc, gpus):
    """Each GPU has a worker; and with whole GPUs, only one."""
    found = [gpu for rank in range(nproc) for gpu in indices(rank, nproc, gpus)]
    many = max(found) + 1
    assert many - 1 < round(gpus * nproc, 4) <= many
    assert found == sorted(found)
    assert set(found) == set(range(many))
    assert gpus < 1 or len(found) == many


@pytest.mark.parametrize(
    ("found", "environ", "expected"),
    [
        (range(1, 1), {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (range(2, 4), {}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (range(1, 1), {"CUDA_VISIBLE_DEVICES": "4,7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        (range(1, 2), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (range(2), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        (range(1, 1), {"CUDA_VISIBLE_DEVICES": ""}, {}),
        (
            range(1, 2),
            {"HIP_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "0,1"},
            {"HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "7"},
        ),
        (range(1, 2), {"ZE_AFFINITY_MASK": "2,3"}, {"ZE_AFFINITY_MASK": "3"}),
        (range(1, 2), {"ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"}),
    ],
)
def test_a_worker_s_own_gpus(found, environ, expected):
    """With `virtual_local_rank`; what sees no GPUs has none of its own either."""
    assert own(found, environ) == expected


def test_too_few_gpus():
    """As torchrun, and no GPU of somebody else."""
    with pytest.raises(ValueError, match="needs 2 GPUs for its workers, and CUDA_VISIBLE_DEVICES is 3"):
        own(range(1, 1), {"CUDA_VISIBLE_DEVICES": "3"})


@pytest.mark.parametrize(
    ("variable", "ids", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", ["0", "3"], "0,3"),
        ("ONEAPI_DEVICE_SELECTOR", ["0", "3"], "level_zero:0,3"),
    ],
)
def test_the_variable_that_names_gpus(variable, ids, expected):
    assert naming(variable, ids) == {variable: expected}


@pytest.mark.parametrize(
    ("listed", "names"), [(None, ("1", "2")), ("4,5, 6", ("5", "6")), ("GPU-a,GPU-b", ("GPU-b",)), ("", ())]
)
def test_names_of_nvidias_gpus(listed, names):
    """As far as the environment names them."""
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert cuda_names(range(1, 3), environ) == names
